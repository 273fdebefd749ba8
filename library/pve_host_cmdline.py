#!/usr/bin/python
"""Merge parameters into the kernel command line of a boot loader's file, and take them back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pve_host_cmdline
short_description: Kernel parameters of a boot loader's file, merged one by one
description:
  - Adds and removes single parameters and leaves every other one where it is.
  - Keeps the file's first bytes in a record. V(absent) puts them back byte for byte when nobody else changed
    the file since, and otherwise takes back this module's parameters only.
  - The boot loader is not refreshed; that is for the caller when RV(changed).
attributes:
  check_mode:
    support: full
    description: Writes neither the file nor the record.
  diff_mode:
    support: full
    description: Shows the command line before and after.
options:
  path: {type: path, required: true, description: "For example /etc/default/grub or /etc/kernel/cmdline."}
  kind:
    type: str
    required: true
    choices: [grub, plain]
    description: V(grub), GRUB_CMDLINE_LINUX_DEFAULT; V(plain), one line that is all.
  add: {type: list, elements: str, default: [], description: Parameters to have.}
  remove: {type: list, elements: str, default: [], description: "Parameters not to have."}
  state: {type: str, choices: [present, absent], default: present, description: Merge or take back.}
  record_dir: {type: path, required: true, description: Folder of the record.}
"""

EXAMPLES = r"""
- name: The IOMMU in pass-through mode
  pve_host_cmdline:
    path: /etc/default/grub
    kind: grub
    add: [iommu=pt, pcie_aspm=off]
    record_dir: /var/lib/sglang-sm120/pve_host
"""

RETURN = r"""
line_before:
  description: The command line found.
  returned: success
  type: str
line_after:
  description: The command line now.
  returned: success
  type: str
recorded:
  description: Whether a record of the first bytes is kept.
  returned: success
  type: bool
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.pve_cmdline import check_parameters
from ansible.module_utils.sm120.pve_finding import errors, render
from ansible.module_utils.sm120.pve_record import Record, plan_absent, plan_present, record_path
from ansible.module_utils.sm120.storage import make_private_folder, write_file


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "kind": {"type": "str", "required": True, "choices": ["grub", "plain"]},
            "add": {"type": "list", "elements": "str", "default": []},
            "remove": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "record_dir": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    path, kept = Path(params["path"]), record_path(params["record_dir"], params["path"])
    wrong = errors(check_parameters(params["add"], "the option add", wanted=True))
    if wrong and params["state"] == "present":
        module.fail_json(msg=render(wrong))
    begun = False
    try:
        data = path.read_bytes()
        record = Record.load(kept.read_text()) if kept.exists() else None
        if params["state"] == "present":
            change = plan_present(str(path), data, params["kind"], params["add"], params["remove"], record)
        else:
            change = plan_absent(data, params["kind"], record)
        changed = change.data != data or change.record != record
        if changed and not module.check_mode:
            begun = True
            if change.record is not None:  # the way back is on disk before the first step
                make_private_folder(kept.parent)
                write_file(kept, change.record.dump().encode(), 0o600)
            if change.data != data:
                owner = path.stat()
                write_file(path, change.data, owner.st_mode & 0o7777, (owner.st_uid, owner.st_gid))
            if change.record is None and record is not None:
                kept.unlink()
    except (OSError, ValueError, KeyError) as problem:
        module.fail_json(
            msg=f"wanted {path} readable, and its record in {params['record_dir']} whole; "
            f"found {problem} ({type(problem).__name__}). Fix: look at both"
            + ("; then run this again, which goes on from there" if begun else "; nothing was changed")
        )
    answer = {
        "changed": changed,
        "line_before": change.line_before,
        "line_after": change.line_after,
        "recorded": change.record is not None,
    }
    if module._diff:
        answer["diff"] = {
            "before": change.line_before + "\n",
            "after": change.line_after + "\n",
            "before_header": str(path),
            "after_header": str(path),
        }
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
