"""kill -9 of ansible-playbook in the middle of things: the next run goes on, or all the way back."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import KILLED, STATE, Host

EDIT_TASKS = {"lineinfile": "Edit a line", "blockinfile": "Insert a block", "replace": "Replace a text"}
JOB = ("--tags", "gates,serve")
STOPPED = {"sglang_server_state_after_revert": "stopped"}


def between_two_edits_of_one_file(host: Host) -> dict[str, str]:
    """The start of the first edit of a file that has had one: edits run in the order of the plan."""
    run = host.play("--check", "--tags", "gates")
    (plan,) = [each for each in run.results("sm120_gates_info") if each["edits"]]
    edits = plan["edits"]
    second = next(index for index in range(1, len(edits)) if edits[index]["path"] == edits[index - 1]["path"])
    module = edits[second]["module"]
    nth = [edit["module"] for edit in edits[: second + 1]].count(module)
    return {"AT_TASK": EDIT_TASKS[module], "AT_NTH": str(nth)}


def after_the_last_edit(host: Host) -> dict[str, str]:
    return {"AT_TASK": "Purge what FlashInfer compiled"}


def before_the_restart(host: Host) -> dict[str, str]:
    return {"AT_TASK": "Start the server"}


MOMENTS = {"edit": between_two_edits_of_one_file, "purge": after_the_last_edit, "restart": before_the_restart}


@pytest.fixture(scope="module")
def host(make_host: Any) -> Host:
    """A host whose server runs on unpatched code."""
    made: Host = make_host("killed", 3)
    run = made.play(*JOB, sm120_gates_policy="off")
    assert run.rc == 0, run.stdout
    assert made.differing() == set()
    return made


def digest(host: Host) -> str:
    """The gates' digest in the environment of the running server."""
    pid = host.sh("systemctl show -P MainPID sglang-main.service").strip()
    pairs = host.read(f"/proc/{pid}/environ").split("\0")
    return next(pair.partition("=")[2] for pair in pairs if pair.startswith("SM120_GATES_DIGEST="))


def kill(host: Host, moment: str, where: dict[str, str]) -> None:
    """Plant a kernel, run the job, die at the moment; see that it was that moment."""
    marker = host.plant()
    run = host.play(*JOB, at={**where, "AT_DO": "kill"})
    assert run.rc == KILLED, run.stdout
    states = list(host.edited().values())
    assert states.count("partial") == (1 if moment == "edit" else 0)
    assert ("pristine" in states) == (moment == "edit")
    assert host.exists(marker) == (moment != "restart")
    assert host.exists(f"{STATE}/lock.json") == (moment != "restart")
    assert host.active() != "active"


@pytest.mark.parametrize("moment", MOMENTS)
def test_back_and_on_from_a_kill(host: Host, moment: str) -> None:
    if host.differing():  # by the moment before; only the first one needs a server that is to be stopped
        assert host.play("--tags", "revert", **STOPPED).rc == 0
    assert host.differing() == set()
    where = MOMENTS[moment](host)

    kill(host, moment, where)
    run = host.play("--tags", "revert", **STOPPED)
    assert run.rc == 0, run.stdout
    assert host.differing() == set()
    assert host.manifest()["entries"] == {}
    assert not host.exists(f"{STATE}/lock.json")

    marker = host.plant()
    kill(host, moment, where)
    run = host.play(*JOB)
    assert run.rc == 0, run.stdout
    assert len(host.differing()) == 6
    assert not host.exists(marker)
    assert not host.exists(f"{STATE}/lock.json")
    assert host.generates() == 4
    assert set(host.edited().values()) == {"open"}
    assert host.settled() == {digest(host)} != {"pristine"}
