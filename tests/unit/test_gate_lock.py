"""One operator at a time, and a dead one is no operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import RunModule
from gates_driver import Gates

ME = {
    "id": "aaa",
    "user": "me",
    "host": "here",
    "where": "www",
    "pid": 1,
    "pid_started": "1",
    "since": "2026-01-01 00:00:00 UTC",
}
OTHER = {**ME, "id": "bbb", "user": "ann", "since": "2026-01-02 00:00:00 UTC"}


@pytest.fixture
def gates(make_site: Any, run_module: RunModule) -> Gates:
    return Gates(run_module, make_site("0.5.9", "0.6.3"))


def held(gates: Gates) -> dict[str, Any] | None:
    path = gates.state_dir / "lock.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_second_operator_is_refused_with_who_and_since(gates: Gates) -> None:
    plan = gates.info()["plan"]
    gates.must("keep", plan, operator=OTHER)
    assert gates.info()["lock"] == OTHER
    manifest = (gates.state_dir / "manifest.json").read_bytes()
    for action in ("keep", "restore", "settle", "forget"):
        for operator in ({"operator": ME}, {}):
            code, answer = gates.state(action, plan, **operator)
            assert code == 1
            assert answer["lock"] == OTHER
            for word in ("ann", OTHER["since"], "sm120_gates_break_lock=bbb"):
                assert word in answer["msg"]
    assert (gates.state_dir / "manifest.json").read_bytes() == manifest
    assert held(gates) == OTHER


def test_the_same_run_takes_it_again_and_gives_it_back(gates: Gates) -> None:
    plan = gates.info()["plan"]
    gates.must("keep", plan, operator=ME)
    gates.must("keep", plan, operator=ME)
    gates.must("release", plan, operator=ME)
    assert held(gates) is None


def test_release_leaves_the_lock_of_another(gates: Gates) -> None:
    plan = gates.info()["plan"]
    gates.must("keep", plan, operator=OTHER)
    code, _ = gates.state("release", plan, operator=ME)
    assert code == 0
    assert held(gates) == OTHER


@pytest.mark.parametrize(("broken", "code"), [("bbb", 0), ("ccc", 1), ("", 1)])
def test_a_lock_is_broken_by_its_id_only(gates: Gates, broken: str, code: int) -> None:
    plan = gates.info()["plan"]
    gates.must("keep", plan, operator=OTHER)
    assert gates.state("keep", plan, operator=ME, break_lock=broken, check=True)[0] == code
    assert gates.state("keep", plan, operator=ME, break_lock=broken)[0] == code
    assert held(gates) == (ME if code == 0 else OTHER)


def test_a_refused_keep_holds_no_lock(gates: Gates) -> None:
    plan = gates.info()["plan"]
    (gates.site / "sglang/srt/server_args.py").write_text("")
    assert gates.state("keep", plan, operator=ME)[0] == 1
    assert held(gates) is None


def ask(lookup: ModuleType, lock: dict[str, Any] | None) -> dict[str, Any]:
    answer: dict[str, Any] = lookup.LookupModule().run([lock])[0]
    return answer


def test_operator_is_the_main_process(lookup: ModuleType) -> None:
    first, second = ask(lookup, None)["operator"], ask(lookup, None)["operator"]
    assert first["pid"] == os.getpid()
    assert first["id"] == second["id"]
    assert first["user"]
    assert first["since"].endswith("UTC")


def test_dead_means_gone_or_another_process_of_that_number(lookup: ModuleType) -> None:
    me = ask(lookup, None)["operator"]
    assert ask(lookup, me)["dead_lock"] == ""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    living = {**me, "id": "x", "pid": child.pid, "pid_started": lookup._started(child.pid)}
    assert ask(lookup, living)["dead_lock"] == ""
    child.communicate(b"\n")
    assert ask(lookup, living)["dead_lock"] == "x"
    assert ask(lookup, {**me, "id": "y", "pid_started": "1"})["dead_lock"] == "y"
    assert ask(lookup, {**living, "where": "elsewhere"})["dead_lock"] == ""
    del living["where"]  # of an older checkout
    assert ask(lookup, living)["dead_lock"] == ""


@pytest.mark.parametrize("other", ["/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"])
def test_a_machine_of_the_same_name_says_nothing_about_a_process(
    lookup: ModuleType, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    me = ask(lookup, None)["operator"]
    dead = {**me, "id": "x", "pid_started": "1"}
    assert ask(lookup, dead)["dead_lock"] == "x"
    read, follow = Path.read_text, Path.readlink
    monkeypatch.setattr(Path, "read_text", lambda path: "other" if str(path) == other else read(path))
    monkeypatch.setattr(
        Path, "readlink", lambda path: Path("pid:[1]") if str(path) == other else follow(path)
    )
    assert ask(lookup, None)["operator"]["host"] == me["host"]
    assert ask(lookup, dead)["dead_lock"] == ""
