#!/usr/bin/python
# Copyright: the sglang-sm120 contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: flashinfer_cache
short_description: Purge the kernels that FlashInfer compiled and kept
description:
  - Removes what FlashInfer's JIT compiled, for every version and architecture, with locks of killed builds.
  - Refuses V(/), relative and symbolically linked folders, a folder that FlashInfer cannot have filled, and a
    cache of which a live process has a file open or mapped.
  - Cubins and tuning results stay; they are the same before and after an edit. A folder in which only
    C(flashinfer_jit.log) is left counts as purged.
author: sglang-sm120 contributors
attributes:
  check_mode:
    description: Tells what it would remove, and which processes are in the way.
    support: full
  diff_mode:
    description: Lists the paths that go.
    support: full
options:
  home:
    description: Home folder of the user whose cache is meant.
    type: path
  user:
    description: The user whose cache is meant. A user that does not exist has nothing to purge.
    type: str
  workspace_base:
    description: The server's E(FLASHINFER_WORKSPACE_BASE), which goes before the home folder.
    type: path
  state:
    description: What the cache should be.
    type: str
    choices: [absent]
    default: absent
"""

EXAMPLES = r"""
- name: Purge the service user's cache
  flashinfer_cache:
    user: sglang

- name: Purge a cache that a server was given by FLASHINFER_WORKSPACE_BASE
  flashinfer_cache:
    workspace_base: /var/cache/sglang
"""

RETURN = r"""
paths:
  description: What was, or in check mode would be, removed.
  returned: always
  type: list
  elements: str
bytes_freed:
  description: Size of the removed files in bytes.
  returned: always
  type: int
busy:
  description: Processes with a file of the cache open or mapped, each with C(pid), C(command) and C(path).
  returned: always
  type: list
  elements: dict
"""

import pwd
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120 import jit_cache


def argument_spec() -> dict[str, Any]:
    return {
        "home": {"type": "path"},
        "user": {"type": "str"},
        "workspace_base": {"type": "path"},
        "state": {"type": "str", "choices": ["absent"], "default": "absent"},
    }


def _base(given: dict[str, Any]) -> Path | None:
    """The folder that has .cache in it; None for a user that does not exist."""
    if given["workspace_base"]:
        return Path(given["workspace_base"])
    if given["home"] is not None:
        return Path(given["home"])
    try:
        return Path(pwd.getpwnam(given["user"]).pw_dir)
    except KeyError:
        return None


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_one_of=[("home", "user", "workspace_base")],
        mutually_exclusive=[("home", "user")],
        supports_check_mode=True,
    )
    base = _base(module.params)
    if base is None:
        module.exit_json(changed=False, paths=[], bytes_freed=0, busy=[])
    try:
        found = jit_cache.contents(jit_cache.cache_folder(base))
    except jit_cache.Refused as error:
        module.fail_json(msg=str(error))
    paths = [str(path) for path in found.paths]
    busy = jit_cache.users_of(found.folder) if paths else []
    if not module.check_mode:
        if busy:
            module.fail_json(msg=jit_cache.busy_message(busy), busy=busy)
        jit_cache.purge(found)
    module.exit_json(
        changed=bool(paths),
        paths=paths,
        bytes_freed=found.size,
        busy=busy,
        msg=jit_cache.busy_message(busy) if busy else "",
        diff={"before": "".join(f"{path}\n" for path in paths), "after": ""},
    )


if __name__ == "__main__":
    main()
