#!/usr/bin/python
# Copyright: the sglang-sm120 contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_host_info
short_description: What of a host decides whether SGLang can be served there, before anything is touched
description:
  - Reads C(/proc), the model's folder and the records of what is deployed, and changes nothing. To learn whether a
    server could listen it binds the address and lets it go at once.
  - Judges no values. A port that is none is passed over.
  - Needs no rights; but only root sees whose process holds a port.
author: sglang-sm120 contributors
attributes:
  check_mode:
    description: Changes nothing, so it does the same in check mode.
    support: full
  diff_mode:
    description: There is nothing to differ.
    support: none
options:
  model_path:
    description: Folder of the model. It need not exist.
    type: path
  models:
    description:
      - Absolute paths at which a model is to be.
      - A folder is one with C(config.json) or C(params.json), a file with C(.gguf).
    type: list
    elements: path
    default: []
  listeners:
    description: The instances that are to listen, in the order in which they are deployed.
    type: list
    elements: dict
    default: []
    suboptions:
      instance:
        description: Its name.
        type: raw
        required: true
      host:
        description: The address that it is to listen on.
        type: raw
        required: true
      port:
        description: The port that it is to listen on.
        type: raw
        required: true
  state_dir:
    description:
      - Folder of what is deployed here, with a file C(instance.json) for each instance. It need not exist.
      - Without it no unit counts as one of ours.
    type: path
"""

EXAMPLES = r"""
- name: Look at the host
  sglang_host_info:
    model_path: /srv/models/glm-5-nvfp4
    state_dir: /etc/sglang-sm120
    listeners:
      - {instance: main, host: 127.0.0.1, port: 30000}
  register: host

- name: Refuse ports that are taken
  ansible.builtin.assert:
    that: not host.unable_to_listen
"""

RETURN = r"""
machine:
  description: Architecture of the processor.
  returned: always
  type: str
  sample: x86_64
systemd:
  description: Whether systemd runs the host.
  returned: always
  type: bool
vocab_size:
  description: Size of the model's vocabulary; V(null) where its C(config.json) does not tell or cannot be read.
  returned: always
  type: int
model_begun:
  description: Whether the model's folder has something in it, or may not be looked into.
  returned: always
  type: bool
absent:
  description: Those of O(models) at which none is. What may not be looked at counts as there.
  returned: always
  type: list
  elements: str
unable_to_listen:
  description:
    - The instances that could not listen, with C(instance), C(host) and C(port); C(why) as V(taken), V(address) (not
      one of this host's) or V(privileged); C(by), the processes that hold the port with their units, in words; and
      C(units), the units.
    - What units of O(state_dir) hold is free, but not where one holds it that comes later in O(listeners).
  returned: always
  type: list
  elements: dict
"""

import platform
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.listeners import BadRecord, deployed_units, unable
from ansible.module_utils.sm120.vocabulary import vocabulary_at

RAW = {"type": "raw", "required": True}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "model_path": {"type": "path"},
    "models": {"type": "list", "elements": "path", "default": []},
    "listeners": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {"instance": RAW, "host": RAW, "port": RAW},
    },
    "state_dir": {"type": "path"},
}


def begun(folder: Path) -> bool:
    """Whether something is there, or may be."""
    try:
        return any(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def absent(path: str) -> bool:
    """Whether no model is there for sure."""
    wanted = [path] if path.endswith(".gguf") else [f"{path}/config.json", f"{path}/params.json"]
    for each in wanted:
        try:
            Path(each).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return False
        return False
    return True


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    given = module.params
    model = given["model_path"]
    try:
        ours = deployed_units(Path(given["state_dir"])) if given["state_dir"] else {}
    except BadRecord as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(
        changed=False,
        machine=platform.machine(),
        systemd=Path("/run/systemd/system").is_dir(),
        vocab_size=vocabulary_at(model) if model else None,
        model_begun=begun(Path(model)) if model else False,
        absent=[path for path in given["models"] if absent(path)],
        unable_to_listen=list(unable(given["listeners"], ours)),
    )


if __name__ == "__main__":
    main()
