#!/usr/bin/python
# Copyright: the sglang-sm120 contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: sm120_gates_state
short_description: Keep, verify and restore the files that the SM120 gates live in
description:
  - The steps around the edits of a plan from M(sm120_gates_info). Each is safe to repeat.
  - V(keep) takes the lock and writes the delivered bytes and the manifest, before the first edit.
  - V(restore) puts files back to what their package delivered, after proving that only our edits are in them.
  - V(verify) compares every file with the hash that was planned.
  - V(settle) removes bytecode of edited files, records that caches were purged for the planned state, and gives the
    lock back.
  - V(forget) drops the records of files that are as delivered, and of versions no longer installed.
  - V(release) gives the lock back too, if this run holds it, where the work ended before V(settle).
author: sglang-sm120 contributors
attributes:
  check_mode:
    description: Tells what it would do; writes nothing.
    support: full
  diff_mode:
    description: Shows the text of each file before and after V(restore).
    support: partial
options:
  action:
    description: The step.
    type: str
    choices: [keep, verify, restore, settle, forget, release]
    required: true
  plan:
    description: RV(sm120_gates_info#module:plan) of the same run.
    type: dict
    required: true
  state_dir:
    description: Folder on the host that holds the manifest and the delivered bytes of edited files.
    type: path
    default: /var/lib/sglang-sm120/gates
  operator:
    description:
      - Who runs this, as a dict of C(id), C(user), C(host), C(where), C(pid), C(pid_started) and C(since).
      - Without it no lock is taken; a lock that another run holds is respected all the same.
    type: dict
  break_lock:
    description: Id of a lock that V(keep) may take over and the others may pass, because its holder is dead.
    type: str
    default: ""
  scope:
    description: Whether V(restore) handles every file, or only those that have to go back before an edit.
    type: str
    choices: [all, outdated]
    default: all
"""

EXAMPLES = r"""
- name: Keep the delivered bytes before the first edit
  sm120_gates_state:
    action: keep
    plan: "{{ gates.plan }}"

- name: Put everything back
  sm120_gates_state:
    action: restore
    plan: "{{ gates.plan }}"
"""

RETURN = r"""
files:
  description: Every file of the plan with its C(path), C(sha256_pristine), C(sha256_after) and C(sha256_now).
  returned: always
  type: list
  elements: dict
restored:
  description: Paths that were, or in check mode would be, put back.
  returned: when O(action=restore)
  type: list
  elements: str
lock:
  description: The holder that stands in the way.
  returned: when another run holds the lock
  type: dict
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120 import gate_lock, transaction
from ansible.module_utils.sm120.manifest import ManifestProblem, kept_bytes


def argument_spec() -> dict[str, Any]:
    return {
        "action": {
            "type": "str",
            "choices": ["keep", "verify", "restore", "settle", "forget", "release"],
            "required": True,
        },
        "plan": {"type": "dict", "required": True},
        "state_dir": {"type": "path", "default": "/var/lib/sglang-sm120/gates"},
        "operator": {"type": "dict"},
        "break_lock": {"type": "str", "default": ""},
        "scope": {"type": "str", "choices": ["all", "outdated"], "default": "all"},
    }


def _differences(given: dict[str, Any]) -> list[dict[str, str]]:
    """What a restore changes, as texts."""
    differences = []
    for file in given["plan"]["files"]:
        data = kept_bytes(Path(given["state_dir"]), file["sha256_pristine"])
        path = Path(file["path"])
        if data is not None and path.is_file() and (given["scope"] == "all" or file["restore"]):
            before, after = path.read_text(encoding="utf-8", errors="replace"), data.decode(errors="replace")
            header = f"{path} (content)"
            if before != after:
                differences.append(
                    {"before": before, "after": after, "before_header": header, "after_header": header}
                )
    return differences


def _act(given: dict[str, Any], dry: bool, with_diff: bool) -> dict[str, Any]:
    state_dir, plan, me = Path(given["state_dir"]), given["plan"], given["operator"]
    if given["action"] == "keep":
        gate_lock.check(state_dir, me, given["break_lock"])
        if dry or not me:
            return {"changed": transaction.keep(state_dir, plan, dry)}
        gate_lock.take(state_dir, me, given["break_lock"])
        try:
            return {"changed": transaction.keep(state_dir, plan, dry)}
        except BaseException:
            gate_lock.release(state_dir, me)
            raise
    if given["action"] == "release":
        if me and not dry:
            gate_lock.release(state_dir, me)
        return {"changed": False}
    if given["action"] == "verify":
        transaction.verify(plan, dry)
        return {"changed": False}
    gate_lock.check(state_dir, me, given["break_lock"])
    if given["action"] == "restore":
        differences = _differences(given) if with_diff else []
        restored = transaction.restore(state_dir, plan, given["scope"] == "outdated", dry)
        return {"changed": bool(restored), "restored": restored, "diff": differences}
    if given["action"] == "forget":
        return {"changed": transaction.forget(state_dir, plan, dry)}
    settled = transaction.settle(state_dir, plan, dry)
    if me and not dry:
        gate_lock.release(state_dir, me)
    return {"changed": settled}


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    given = module.params
    if "files" not in given["plan"]:
        module.fail_json(msg="the plan is empty: look at the problems that sm120_gates_info told")
    try:
        result = _act(given, module.check_mode, module._diff)
    except gate_lock.Locked as error:
        module.fail_json(msg=str(error), lock=error.holder)
    except (transaction.Refused, ManifestProblem) as error:
        module.fail_json(msg=str(error), files=transaction.reports(given["plan"]))
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename or given['state_dir']}: {error.strerror}. What was there is still there",
            files=transaction.reports(given["plan"]),
        )
    module.exit_json(files=transaction.reports(given["plan"]), **result)


if __name__ == "__main__":
    main()
