#!/usr/bin/python
# Copyright: the project's contributors
# Apache License 2.0 (see LICENSE)
"""Find the first cause in the logs of a failed SGLang server."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_diagnose
short_description: Find the first cause in the logs of a failed SGLang server
description:
  - Reads a whole log, not its end, and names what went wrong first, what only followed from it, and what
    to do next.
  - Sources are a file, a unit's journal or a text; beside them the kernel's log and C(nvidia-smi).
  - An exception that the catalogue does not know is reported as unknown with its last frame.
  - Of a log with several starts the first cause is that of the last start that failed.
options:
  path:
    description: Log file on this host.
    type: path
  unit:
    description: systemd unit whose journal is read.
    type: str
  text:
    description: The log itself.
    type: str
  kernel_log:
    description: A file with the kernel's log, or V(journal) for the kernel's messages in the journal.
    type: str
  since:
    description: Read the journal only from here on, as C(journalctl --since) takes it.
    type: str
  this_start:
    description:
      - Of O(unit), read only what its present start has logged. Of a unit that systemd knows no start of, nothing is
        read, and RV(msg) says so.
    type: bool
    default: false
  nvidia_smi:
    description: Also run C(nvidia-smi), where there is one, and look at what it says about driver and cards.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    details: Reads only.
  diff_mode:
    support: none
    details: Changes nothing.
author:
  - sglang-sm120 contributors
"""

EXAMPLES = r"""
- name: Ask why the server died
  sglang_diagnose:
    unit: sglang-main.service
    kernel_log: journal
    since: "-2h"
  register: diagnosis

- name: Look at a log that a user sent
  sglang_diagnose:
    path: /tmp/sglang.log
"""

RETURN = r"""
first_cause:
  description: The finding that explains the failure; null when nothing was found.
  returned: always
  type: dict
findings:
  description:
    - Everything that the catalogue knows, causes before consequences before warnings before notes, each once.
  returned: always
  type: list
  elements: dict
  contains:
    signature: {description: Name in the catalogue., type: str}
    role: {description: One of cause consequence warning note., type: str}
    layer: {description: Where it went wrong., type: str}
    line: {description: The first such line., type: str}
    line_number: {description: Its number in what was read., type: int}
    last_line_number: {description: The number of the last such line., type: int}
    count: {description: How many such lines., type: int}
    meaning: {description: What it means., type: str}
    advice: {description: What to do next., type: str}
    frame: {description: Last frame of the traceback that it ended., type: str}
    source: {description: One of log kernel., type: str}
    fatal: {description: Whether no server outlives it., type: bool}
fusion:
  description:
    - What was read says of all-reduce fusion. C(state) is V(active) (SGLang has made its workspace), V(inactive)
      (it says that it skipped or disabled it) or V(unsaid), C(line) the line that says so.
  returned: always
  type: dict
starts:
  description: How often the server was started in what was read.
  returned: always
  type: int
msg:
  description: The first cause and the next step in one line.
  returned: always
  type: str
"""

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.diagnosis import Finding, Scanner, first_cause, scan
from ansible.module_utils.sm120.diagnosis_catalogue import fusion_said, kernel_scanner, server_scanner
from ansible.module_utils.sm120.signature import NOTE
from ansible.module_utils.sm120.unit_log import journal_command, stream_command, stream_file, unit_state

ARGUMENTS: dict[str, dict[str, Any]] = {
    "path": {"type": "path"},
    "unit": {"type": "str"},
    "text": {"type": "str"},
    "kernel_log": {"type": "str"},
    "since": {"type": "str"},
    "this_start": {"type": "bool", "default": False},
    "nvidia_smi": {"type": "bool", "default": False},
}
ROLES = ("cause", "consequence", "warning", NOTE)


def file_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from stream_file(file)


def server_blocks(given: dict[str, Any], invocation: str) -> Iterable[bytes]:
    if given["path"]:
        return file_blocks(Path(given["path"]))
    if given["unit"]:
        return stream_command(journal_command(given["unit"], invocation, given["since"]))
    return [(given["text"] or "").encode()]


def kernel_blocks(given: dict[str, Any]) -> Iterable[bytes]:
    if given["kernel_log"] == "journal":
        command = ["journalctl", "--no-pager", "--quiet", "--dmesg", "--output=short-iso"]
        return stream_command([*command, f"--since={given['since']}"] if given["since"] else command)
    return file_blocks(Path(given["kernel_log"])) if given["kernel_log"] else []


def nvidia_smi_blocks() -> Iterable[bytes]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run(
        [program, "-L"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    return [done.stdout]


def ordered(scanners: list[Scanner]) -> list[Finding]:
    found = [finding for scanner in scanners for finding in scanner.findings.values()]
    return sorted(found, key=lambda one: (ROLES.index(one.role), one.line_number))


def message(cause: Finding | None, findings: list[Finding]) -> str:
    if cause is not None:
        return f"{cause.layer}: {cause.line} - {cause.meaning} Next: {cause.advice}"
    amiss = [one for one in findings if one.role != NOTE]
    if amiss:
        return f"no cause found; {len(amiss)} consequences or warnings"
    return "nothing found that the catalogue knows, and no traceback"


def main() -> None:
    module = AnsibleModule(
        argument_spec=ARGUMENTS,
        supports_check_mode=True,
        mutually_exclusive=[("path", "unit", "text")],
    )
    given = module.params
    if not any(given[name] for name in ("path", "unit", "text", "kernel_log", "nvidia_smi")):
        module.fail_json(msg="nothing to read: give one of path, unit, text, kernel_log or nvidia_smi")
    one_start = given["unit"] and given["this_start"]
    try:
        invocation = unit_state(given["unit"]).invocation if one_start else ""
        unstarted = one_start and not invocation
        server = scan(server_scanner(), [] if unstarted else server_blocks(given, invocation))
        kernel = scan(kernel_scanner(), kernel_blocks(given))
        if given["nvidia_smi"]:
            scan(kernel, nvidia_smi_blocks())
    except (OSError, subprocess.SubprocessError) as error:
        module.fail_json(msg=f"the log cannot be read: {error}")
    cause = first_cause([server, kernel])
    findings = ordered([server, kernel])
    unread = (
        f"systemd knows no start of {given['unit']}: nothing of its journal was read; " if unstarted else ""
    )
    module.exit_json(
        changed=False,
        first_cause=cause.as_dict() if cause else None,
        findings=[one.as_dict() for one in findings],
        fusion=fusion_said(server.findings),
        starts=server.starts,
        msg=unread + message(cause, findings),
    )


if __name__ == "__main__":
    main()
