#!/usr/bin/python
# Copyright: the sglang-sm120 contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_repository
short_description: NVIDIA's package repository for apt, with its key checked
description:
  - Writes one deb822 source and the key that alone may sign it, and fetches its lists. apt as a whole gets no key.
  - The key is checked against a SHA-256 before anything is written. What fails afterwards is put back.
  - Several roles may use it. The last one that lets go takes it along.
  - Where the host has this very source already, by somebody else, nothing is written.
author: sglang-sm120 contributors
attributes:
  check_mode:
    description: Neither fetches nor writes.
    support: full
  diff_mode:
    description: Shows the source before and after.
    support: full
options:
  user:
    description: Who needs it; a role's name.
    type: str
    required: true
  url:
    description: Where the packages are. Empty for NVIDIA's own repository of this distribution.
    type: str
    default: ""
  suite:
    description: Suite of the repository. V(/) for a flat one, as NVIDIA's is.
    type: str
    default: /
  components:
    description: Components of a repository that is not flat.
    type: str
    default: ""
  key_url:
    description:
      - The key, in a keyring package or as it is; C(file://) for one on the host.
      - Empty for NVIDIA's keyring package beside the packages.
    type: str
    default: ""
  key_sha256:
    description: SHA-256 of what O(key_url) names. Empty for that of NVIDIA's keyring package.
    type: str
    default: ""
  contrib_url:
    description:
      - Debian only. Where the component C(contrib) is taken from when no source has it; NVIDIA's Debian packages depend
        on some of it. Empty adds nothing.
    type: str
    default: ""
  record:
    description: Path of the record of what was written.
    type: path
    required: true
  timeout_seconds:
    description: How long the download of the key may take.
    type: int
    default: 60
  state:
    description: Have it, or let go of it.
    type: str
    choices: [present, absent]
    default: present
"""

EXAMPLES = r"""
- name: NVIDIA's repository
  nvidia_repository:
    user: nvidia_driver
    record: /var/lib/sglang-sm120/nvidia_repository/files.json
"""

RETURN = r"""
distribution:
  description: The distribution as NVIDIA spells it.
  returned: success
  type: str
problem:
  description: Why it failed, with nothing left changed.
  returned: failure
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120 import nvidia_repository as repository
from ansible.module_utils.sm120 import own_files
from ansible.module_utils.sm120.apt_packages import run_apt
from ansible.module_utils.urls import open_url

FILES = {"url": "", "suite": "/", "components": "", "key_url": "", "key_sha256": "", "contrib_url": ""}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            **{name: {"type": "str", "default": default} for name, default in FILES.items()},
            "record": {"type": "path", "required": True},
            "timeout_seconds": {"type": "int", "default": 60},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    given = module.params

    def fetch(url: str) -> bytes:
        data: bytes = open_url(url, timeout=given["timeout_seconds"]).read()
        return data

    try:
        host = repository.Host(run_apt, fetch, repository.examine(), Path(given["record"]))
        diff = []
        record = own_files.load(host.record)
        left = own_files.changed_since(record, record.files) if record else ()
        if given["state"] == "absent":
            changed = repository.absent(host, given["user"], module.check_mode)
        else:
            asked = repository.Repository(**{name: given[name] for name in FILES})
            change = repository.present(host, asked, given["user"], module.check_mode)
            changed = change.changed
            if repository.SOURCES in change.write:
                before, after = (
                    files.get(repository.SOURCES, b"") for files in (change.before, change.write)
                )
                diff = [
                    {"before": before.decode(), "after": after.decode(), "before_header": repository.SOURCES}
                ]
    except repository.Refused as why:
        module.fail_json(msg=str(why), problem=str(why))
    except (OSError, ValueError, KeyError, own_files.NotOurs) as why:
        problem = f"Wanted: {repository.SOURCES} and its key, ours to write. Found: {why}. Move that away."
        module.fail_json(msg=problem, problem=problem)
    if left and not host.record.exists():
        module.warn(own_files.left_message(left))
    module.exit_json(changed=changed, distribution=host.system.distribution, diff=diff)


if __name__ == "__main__":
    main()
