#!/usr/bin/python
# Copyright: the project's contributors
# Apache License 2.0 (see LICENSE)
"""Compile FlashInfer's fused all-reduce and compute with it, before a server depends on it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: fusion_probe
short_description: Compile and compute the fused all-reduce in isolation
description:
  - Runs the operation that the installed SGLang calls (all-reduce, residual add and RMSNorm in one
    FlashInfer kernel) as the service user, with the server's environment, one process on each GPU, and
    compares it with a float64 result.
  - Stages, in order, each with a time limit of its own. C(toolchain), C(jit), C(nccl), C(workspace),
    C(numbers), C(graph), C(speed). The first two need no GPU. Without GPUs the others are reported as not
    run, never as passed.
  - Processes that hang are ended with everything they started, and the GPU memory is seen free again.
  - A verdict holds for the packages, gates, driver, GPUs and settings it was found with. Where all are the
    same and the built library is still there, O(reuse) returns it without running anything.
  - Each stage is told in the journal (C(journalctl -t ansible-fusion_probe -f)) and in C(progress.log)
    below O(evidence_dir) while it runs.
options:
  python:
    description: The venv's Python.
    type: path
    required: true
  ranks:
    description:
      - Number of GPUs, the tensor parallel size of the server. V(0) means all GPUs of the host. With V(1) there is
        nothing to reduce, and only the build runs.
    type: int
    default: 0
  groups:
    description:
      - How many groups of O(ranks) GPUs compute, one after the other, in the order in which CUDA counts them
        (of E(CUDA_VISIBLE_DEVICES), where O(environment) has it). The pipeline parallel size of the server.
    type: int
    default: 1
  stages:
    description: Stages to run.
    type: list
    elements: str
    choices: [toolchain, jit, nccl, workspace, numbers, graph, speed]
    default: [toolchain, jit, nccl, workspace, numbers, graph, speed]
  timeout_seconds:
    description: Limit for the build, and again for what runs on the GPUs of each group.
    type: int
    default: 5400
  stage_limits_seconds:
    description: Other limits than the built-in ones, by stage.
    type: dict
    default: {}
  user:
    description: The service user. The probe runs as nobody else, so that the JIT cache is the server's.
    type: str
    required: true
  environment:
    description:
      - The server's environment, whole. Nothing is inherited from the session. Put no secrets here.
    type: dict
    default: {}
  program_dir:
    description: Folder of the probe program on this host. Belongs to root.
    type: path
    default: /usr/local/lib/sglang-sm120/fusion_probe
  program:
    description:
      - The program's files, as a dict of relative path and text. Written to O(program_dir), where anything
        else is removed. Without it the folder is used as it is.
    type: dict
  evidence_dir:
    description: Folder for report, logs and progress. Belongs to root.
    type: path
    default: /var/lib/sglang-sm120/fusion_probe
  hidden:
    description: Hidden sizes to compute with.
    type: list
    elements: int
    default: [2048, 4096, 6144, 7168]
  tokens:
    description: Token counts to compute with, up to the 2048 for which SGLang uses fusion.
    type: list
    elements: int
    default: [1, 2, 4, 8, 16, 17, 32, 64, 128, 512, 2048]
  dtypes:
    description: Types to compute with. The first is also that of the graph cases.
    type: list
    elements: str
    choices: [bf16, fp16]
    default: [bf16, fp16]
  modes:
    description: V(auto) is what SGLang asks for. The others force one of the two kernels.
    type: list
    elements: str
    choices: [auto, one_shot, two_shot]
    default: [auto, one_shot, two_shot]
  capability:
    description: Compute capability to build for where no GPU is there to ask.
    type: str
    default: "12.0"
  max_slowdown:
    description: >-
      Fail when the fused call takes this many times as long as NCCL and norm at any size, or is slower at
      every size.
    type: float
    default: 3.0
  of_server:
    description:
      - Whether this is about what the server runs with, its own ranks and environment. The report of such a run of all
        stages without a fault is C(report.json), which the server heeds, unless it failed for want of GPUs or of their
        memory. That of any other run goes to a file of its own.
    type: bool
    default: true
  gates_digest:
    description: Digest of the gates, part of what a verdict holds for.
    type: str
    default: ""
  reuse:
    description: Return the last verdict when everything it depends on is the same.
    type: bool
    default: true
  fault:
    description:
      - A fault to put in on purpose, to see the probe find it on these GPUs. The report of such a run is
        never reused.
      - V(garbage_row), V(unwritten_row) and V(moving_error) act in calls of 2048 tokens alone, so O(tokens) must have
        them.
    type: str
    choices:
      - none
      - wrong_scale
      - missing_residual
      - garbage_row
      - unwritten_row
      - moving_error
      - absent_rank
      - crashed_rank
    default: none
attributes:
  check_mode:
    description: Says whether a probe would run; runs none.
    support: full
  diff_mode:
    description: There is nothing to show as a difference.
    support: none
"""

EXAMPLES = r"""
- name: Probe the fused all-reduce on all GPUs
  fusion_probe:
    python: /opt/sglang-sm120/venv/bin/python
    user: sglang
    environment:
      HOME: /var/lib/sglang
      PATH: /opt/sglang-sm120/venv/bin:/usr/local/cuda-13.0/bin:/usr/bin:/bin
      CUDA_HOME: /usr/local/cuda-13.0

- name: See that a hang is found
  fusion_probe:
    python: /opt/sglang-sm120/venv/bin/python
    user: sglang
    ranks: 2
    fault: absent_rank
  register: hung
  failed_when: hung.failure.cause != 'hang'
"""

RETURN = r"""
verdict:
  description: >-
    V(passed) when every stage passed, V(compiled) when only the build was asked for or no GPU is there and it
    passed, V(failed), or V(incomplete) when stages were left out or nothing runs (check mode).
  type: str
  returned: always
reused:
  description: Whether this is an earlier verdict that still holds.
  type: bool
  returned: always
stages:
  description: Name, status (passed, failed, not_run), seconds, detail and facts of each stage.
  type: list
  elements: dict
  returned: always
failure:
  description: The first failure with stage, cause, text, rank, case and next; null when there is none.
  type: dict
  returned: always
cases:
  description: >-
    Each case with ok, problems, and its figures as multiples of their limits (worst, rms, bias), worst being null where
    an element is not finite or was not written.
  type: list
  elements: dict
  returned: always
case_table:
  description: >-
    The same for each launch, hidden size and type - cases, right, error (largest relative error) and worst (as a
    multiple of its limit); both null where an element is not finite or was not written.
  type: list
  elements: dict
  returned: always
speed:
  description: >-
    Rows (microseconds, ratio unfused to fused), and for each hidden size the token count from which fusion
    loses.
  type: dict
  returned: always
call:
  description: How the installed SGLang calls FlashInfer.
  type: dict
  returned: always
gpus:
  description: The GPUs as nvidia-smi had them before the probe; memory in MiB.
  type: list
  elements: dict
  returned: always
evidence:
  description: Path of the report on this host.
  type: str
  returned: always
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.probe import FAULTS, Probe, ProbeError, Settings, environment_facts, key_of
from ansible.module_utils.sm120.probe_cases import DTYPES, HIDDEN, MODES, RANKS, TOKENS
from ansible.module_utils.sm120.probe_report import BUILD_STAGES, NO_WORD, STAGES, Stage
from ansible.module_utils.sm120.probe_run import Account, DriverSilent, gpu_table

REUSABLE = ("passed", "compiled")


def write_program(folder: Path, files: dict[str, str]) -> None:
    """Make the folder hold exactly these files."""
    for path in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else []:
        if path.is_file() and str(path.relative_to(folder)) not in files:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            path.chmod(0o644)


def last_report(path: Path, key: str) -> dict[str, Any] | None:
    """The stored report, if it is of this key, is good, and what it built is still there."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if report.get("key") != key or report.get("verdict") not in REUSABLE or report["failure"]:
        return None
    if report["fault"] != "none":
        return None
    libraries = [stage["facts"]["library"] for stage in report["stages"] if "library" in stage["facts"]]
    return report if all(os.path.isfile(library) for library in libraries) else None


def settings_of(module: AnsibleModule, account: Account, work: Path, ranks: int) -> Settings:
    given = module.params
    return Settings(
        python=given["python"],
        program=Path(given["program_dir"]),
        work=work,
        logs=Path(given["evidence_dir"]),
        account=account,
        environment={"HOME": account.home, **{k: str(v) for k, v in given["environment"].items()}},
        ranks=ranks,
        groups=given["groups"],
        stages=tuple(given["stages"]),
        hidden=tuple(given["hidden"]),
        tokens=tuple(given["tokens"]),
        dtypes=tuple(given["dtypes"]),
        modes=tuple(given["modes"]),
        capability=given["capability"],
        fault=given["fault"],
        max_slowdown=given["max_slowdown"],
        timeout_seconds=given["timeout_seconds"],
        stage_limits={k: float(v) for k, v in given["stage_limits_seconds"].items()},
    )


def stop(_number: int, _frame: Any) -> NoReturn:
    """Ends through the clean-up, so that no rank goes on spinning."""
    raise SystemExit(143)


def report_name(given: dict[str, Any]) -> str:
    """What a server relies on is the word of a run about that server; any other neither is nor replaces it."""
    if given["fault"] != "none":
        return f"fault-{given['fault']}.json"
    return "report.json" if given["of_server"] and set(given["stages"]) == set(STAGES) else "other.json"


def preview(evidence: Path, gpus: list[dict[str, Any]], note: str) -> dict[str, Any]:
    stages = [Stage(name, detail=note).as_dict() for name in STAGES]
    empty = {"failure": None, "cases": [], "case_table": [], "speed": {}, "call": {}, "gpus": gpus}
    more = {"reused": False, "evidence": str(evidence)}
    return {"changed": True, "verdict": "incomplete", "stages": stages, **empty, **more}


def run(module: AnsibleModule) -> dict[str, Any]:
    given, folder = module.params, Path(module.params["evidence_dir"])
    report_path = folder / report_name(given)
    try:
        account = Account.of(given["user"])
    except KeyError:
        raise ProbeError(f"no user {given['user']} on this host: make it first, or name another") from None
    computes = bool(set(given["stages"]) - set(BUILD_STAGES))
    try:
        gpus = gpu_table(
            {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}, must_answer=computes and not module.check_mode
        )
    except DriverSilent as error:
        raise ProbeError(
            f"wanted: the GPUs of this host, to compute with them; found: nvidia-smi, {error}. Mend the driver first "
            "(playbooks/driver.yml; journalctl -k | grep -iE 'nvrm|nvidia'), or ask for the build alone: stages "
            f"{', '.join(BUILD_STAGES)}"
        ) from None
    ranks = given["ranks"] or len(gpus) or RANKS[0]
    if gpus and ranks not in (1, *RANKS):
        raise ProbeError(
            f"ranks={ranks}: FlashInfer's kernels exist for {', '.join(map(str, RANKS))} ranks. Set "
            'sglang_server_allreduce_fusion: "off" for a server of this tensor parallel size, or change the size'
        )
    if module.check_mode and not (Path(given["program_dir"]) / "facts.py").is_file():
        return preview(report_path, gpus, "check mode; the program is not on this host yet")
    if given["program"] is not None and not module.check_mode:
        write_program(Path(given["program_dir"]), given["program"])
    work = Path(tempfile.mkdtemp(prefix="fusion-probe-"))
    try:
        os.chown(work, account.uid, account.gid)
        settings = settings_of(module, account, work, ranks)
        facts = environment_facts(settings)
        key = key_of(settings, facts, gpus, given["gates_digest"])
        old = last_report(report_path, key) if given["reuse"] else None
        if old is not None:
            return {**old, "changed": False, "reused": True, "evidence": str(report_path)}
        if module.check_mode:
            return preview(report_path, gpus, "check mode")
        folder.mkdir(parents=True, exist_ok=True)
        progress = folder / "progress.log"
        progress.write_text("", encoding="utf-8")

        def announce(text: str) -> None:
            module.log(text)
            with progress.open("a", encoding="utf-8") as sink:
                sink.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n")

        report = {"key": key, "gates": given["gates_digest"], **Probe(settings, facts, announce).run()}
    finally:
        shutil.rmtree(work)
    text = json.dumps(report, indent=1, sort_keys=True)
    if not report["failure"] or report["failure"]["cause"] not in NO_WORD:
        module.atomic_move(_written(folder, text), str(report_path))
    if report["failure"]:
        failed = folder / f"failed-{report['began'].replace(':', '')}.json"
        failed.write_text(text, encoding="utf-8")
        report_path = failed
    return {**report, "changed": True, "reused": False, "evidence": str(report_path)}


def _written(folder: Path, text: str) -> str:
    handle, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as sink:
        sink.write(text)
    return name


def argument_spec() -> dict[str, Any]:
    return {
        "python": {"type": "path", "required": True},
        "ranks": {"type": "int", "default": 0},
        "groups": {"type": "int", "default": 1},
        "stages": {"type": "list", "elements": "str", "choices": list(STAGES), "default": list(STAGES)},
        "timeout_seconds": {"type": "int", "default": 5400},
        "stage_limits_seconds": {"type": "dict", "default": {}},
        "user": {"type": "str", "required": True},
        "environment": {"type": "dict", "default": {}},
        "program_dir": {"type": "path", "default": "/usr/local/lib/sglang-sm120/fusion_probe"},
        "program": {"type": "dict"},
        "evidence_dir": {"type": "path", "default": "/var/lib/sglang-sm120/fusion_probe"},
        "hidden": {"type": "list", "elements": "int", "default": list(HIDDEN)},
        "tokens": {"type": "list", "elements": "int", "default": list(TOKENS)},
        "dtypes": {"type": "list", "elements": "str", "choices": list(DTYPES), "default": list(DTYPES)},
        "modes": {"type": "list", "elements": "str", "choices": list(MODES), "default": list(MODES)},
        "capability": {"type": "str", "default": "12.0"},
        "max_slowdown": {"type": "float", "default": 3.0},
        "of_server": {"type": "bool", "default": True},
        "gates_digest": {"type": "str", "default": ""},
        "reuse": {"type": "bool", "default": True},
        "fault": {"type": "str", "choices": list(FAULTS), "default": "none"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    sys.dont_write_bytecode = True
    try:
        result = run(module)
    except ProbeError as error:
        module.fail_json(msg=str(error))
    failure = result["failure"]
    if failure is None:
        module.exit_json(**result)
    module.fail_json(
        msg=f"Stage {failure['stage']} failed: {failure['text']}. {failure['next']}. "
        f"Evidence: {result['evidence']}",
        **result,
    )


if __name__ == "__main__":
    main()
