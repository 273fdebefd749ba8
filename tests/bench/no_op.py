#!/usr/bin/env python3
"""How long plays take that find nothing to do, on a lab host with stand-ins for its GPUs, and a VM made and left alone.

    no_op.py

Prints the seconds of each and ends with 0 when all of them keep to their limits.
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/integration"), str(ROOT / "tests/support")]

import test_driver  # noqa: E402
import test_pve_provision as provision  # noqa: E402
from heading import heading  # noqa: E402
from hosts import Host  # noqa: E402
from pve_stub import Stub, make_certificate  # noqa: E402

JOB_SECONDS, GATES_SECONDS, GATES_TASKS, VM_SECONDS = 25, 3, 3, 10
JOB: dict[str, tuple[str, ...]] = {
    "playbooks/driver.yml": (),
    "playbooks/probe.yml": ("--tags", "cuda"),
    "site.yml": ("--skip-tags", "verify"),
}
# Evaluated by the controller: no module is sent.
CONTROLLER = (
    "assert",
    "debug",
    "fail",
    "set_fact",
    "include_tasks",
    "import_tasks",
    "include_role",
    "validate_argument_spec",
)


def gates(events: list[dict[str, Any]]) -> tuple[int, float]:
    """(tasks that sent a module to the host, seconds from the role's first task to its last result)."""
    ours = [event for event in events if event["event_data"].get("role") == "sm120_gates"]
    sent = {
        event["event_data"]["task_uuid"]
        for event in ours
        if event["event"] == "runner_on_ok"
        and event["event_data"]["task_action"].split(".")[-1] not in CONTROLLER
    }
    at = [datetime.fromisoformat(event["created"]) for event in ours]
    return len(sent), (max(at) - min(at)).total_seconds()


def on_a_host(folder: Path, repository: dict[str, str]) -> bool:
    host = Host("noop", 22123, 30240, folder)
    try:
        host.variables = {
            **test_driver.set_up(host, repository),
            "cuda_toolkit_method": "apt",
        }
        for playbook, options in JOB.items():
            assert host.play(*options, playbook=playbook).rc == 0
        whole = 0.0
        for playbook, options in JOB.items():
            began = time.monotonic()
            run = host.play(*options, playbook=playbook)
            seconds = time.monotonic() - began
            assert (run.rc, run.changed) == (0, 0), run.stdout
            print(f"{playbook + ' ' + ' '.join(options):40} {seconds:6.1f} s", flush=True)
            whole += seconds
        tasks, seconds = gates(run.events)
        print(f"{'driver, CUDA, runtime, gates and serve':40} {whole:6.1f} s of {JOB_SECONDS}")
        print(
            f"{'of it the gates':40} {seconds:6.1f} s of {GATES_SECONDS}, {tasks} module tasks of {GATES_TASKS}"
        )
        return whole < JOB_SECONDS and seconds <= GATES_SECONDS and 0 < tasks <= GATES_TASKS
    finally:
        host.remove()


def vm(folder: Path) -> bool:
    with Stub(*make_certificate(folder)) as stub:
        stub.state.add_mappings()
        run = provision.Run(folder, stub, folder / "none")
        began = time.monotonic()
        for changes in (1, 0):
            assert provision.changed(run("--tags", "provision", pve_gpu_vm_wait_for_ssh=False)) == changes
        seconds = time.monotonic() - began
    print(f"{'a VM made, and found as it should be':40} {seconds:6.1f} s of {VM_SECONDS}")
    return seconds < VM_SECONDS


def main() -> None:
    print(heading(__file__))
    with tempfile.TemporaryDirectory() as place:
        for name in ("nvidia", "host", "vm"):
            (Path(place) / name).mkdir()
        with test_driver.served(Path(place) / "nvidia") as repository:
            kept = [on_a_host(Path(place) / "host", repository), vm(Path(place) / "vm")]
    sys.exit(not all(kept))


if __name__ == "__main__":
    main()
