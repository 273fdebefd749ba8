"""The story replayed: SGLang's gates open over FlashInfer's closed one. Every step tells what it took the people of the
story 7.5 minutes and a grep to find."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sglang_diagnose
import sglang_health
from ansible.module_utils.sm120 import health as looks
from gates_driver import Gates
from story import STORY

WANTED_SECONDS = 10
LIMIT_SECONDS = 450  # what they waited


def open_sglangs(gates: Gates, plan: dict[str, Any]) -> None:
    """Layers 1 and 2, and none of FlashInfer's."""
    edits = [edit for edit in plan["edits"] if f"{gates.site}/sglang/" in edit["path"]]
    assert 0 < len(edits) < len(plan["edits"])
    gates.edit(edits)


def test_layers_edited_by_hand_are_named_one_by_one(run_module: Any, make_site: Any) -> None:
    gates = Gates(run_module, make_site("0.5.9", "0.6.3"))
    open_sglangs(gates, gates.info())
    audit = gates.info(scan=True)
    states = {gate["id"]: gate["state"] for gate in audit["gates"]}
    assert [states[each] for each in ("fusion.runtime", "fusion.auto_enable", "fusion.jit")] == [
        *("drifted", "drifted", "closed")
    ]
    for file in ("layers/communicator.py", "server_args.py"):
        assert len([one for one in audit["problems"] if f"sglang/srt/{file}" in one]) == 1, audit["problems"]


def test_the_first_attempt(
    run_module: Any, make_site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates(run_module, make_site("0.5.9", "0.6.3"))
    plan = gates.info()
    gates.must("keep", plan["plan"])
    open_sglangs(gates, plan)

    audit = gates.info(scan=True)
    states = {gate["id"]: gate["state"] for gate in audit["gates"]}
    assert [states[each] for each in ("fusion.runtime", "fusion.auto_enable", "fusion.jit")] == [
        *("open", "open", "closed")
    ]
    assert not audit["consistent"]
    (crossed,) = [each for each in audit["crossed"] if each["closed"] == ["fusion.jit"]]
    assert "fusion.runtime" in crossed["open"]
    assert "No supported CUDA architectures found for major versions [9, 10]" in crossed["text"]

    # The server dies a second after we begin to wait for it.
    log = tmp_path / "server.log"
    begin, crash = STORY.split("[2026-03-01 10:01:01 TP3]")
    log.write_text(begin)
    crashed: list[float] = []

    def die() -> None:
        with log.open("a") as file:
            file.write("[2026-03-01 10:01:01 TP3]" + crash)
        crashed.append(time.monotonic())

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(looks, "SETTLE_SECONDS", 0.05)
    threading.Timer(1, die).start()
    code, health = run_module(
        sglang_health.main, url=url, log=str(log), wait=True, timeout_seconds=LIMIT_SECONDS
    )
    assert time.monotonic() - crashed[0] < WANTED_SECONDS
    assert (code, health["status"]) == (0, "crashed")
    assert (health["diagnosis"]["signature"], health["diagnosis"]["layer"]) == ("gate.jit_closed", "layer 3")

    code, diagnosis = run_module(sglang_diagnose.main, path=str(log))
    assert code == 0
    assert diagnosis["first_cause"] == health["diagnosis"]
    roles = {one["signature"]: (one["role"], one["count"]) for one in diagnosis["findings"]}
    assert roles == {"gate.jit_closed": ("cause", 1), "process.sigquit": ("consequence", 2)}
    assert "s3cret-key" not in json.dumps([health, diagnosis])
