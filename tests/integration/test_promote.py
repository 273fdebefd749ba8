"""Promotion from end to end on a real server: a side "on" that is slower takes itself back.

It is slower by an argument tried together with fusion: one request at a time, where eight are sent. In the second case
it does not start at all, for want of memory.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hosts import ROOT, Host, Run

SCHEMA = json.loads((ROOT / "docs/run.schema.json").read_text())
ARGUMENTS = "/etc/sglang-sm120/main/arguments.yaml"
MEASUREMENT = {
    "sglang_promote_blocks": ["off", "on"],
    "sglang_promote_repeats": 5,
    "sglang_promote_concurrency": [8],
    "sglang_promote_requests_per_stream": 1,
    "sglang_promote_input_tokens": 32,
    "sglang_promote_output_tokens": 24,
    "sglang_promote_prompt_output_tokens": 16,
    "sglang_promote_on_arguments": {"max-running-requests": 1},
}


@pytest.fixture(scope="module")
def host(make_host: Any) -> Host:
    made: Host = make_host("promote", 4)
    made.variables = {
        **MEASUREMENT,
        "sm120_gates_policy": "measured",
        "sglang_promote_artifacts_dir": str(made.folder / "artifacts"),
        "sglang_verify_repeats": 1,
        "sglang_verify_concurrency": [8],
    }
    run = made.play("--tags", "gates,serve")
    assert run.rc == 0, run.stdout
    # Open gates alone switch nothing on: nothing was measured yet.
    assert len(made.differing()) == 6
    assert "fusion" not in made.read(ARGUMENTS)
    return made


@pytest.fixture(scope="module")
def promoted(host: Host) -> Run:
    return host.play(playbook="playbooks/promote.yml")


@pytest.fixture(scope="module")
def told(host: Host, promoted: Run) -> tuple[dict[str, Any], Path]:
    """(the run's JSON, the folder it lies in)."""
    (folder,) = (host.folder / "artifacts/promote").iterdir()
    return json.loads((folder / "run.json").read_text()), folder


def test_a_slower_side_is_switched_off_and_the_play_fails(host: Host, promoted: Run) -> None:
    assert promoted.rc == 2, promoted.stdout
    (failure,) = promoted.failures()
    assert "worse" in failure
    assert "concurrency 8" in failure
    arguments = host.read(ARGUMENTS)
    assert "fusion" not in arguments
    assert "max-running-requests: 64" in arguments
    assert host.active() == "active"
    assert host.generates() == 4
    verdict = json.loads(host.read("/var/lib/sglang-sm120/verdicts/main.json"))
    assert (verdict["verdict"], verdict["keep"]) == ("worse", False)
    # One strict look at each side, and one at what was decided.
    looked = [each for each in promoted.results("sglang_health") if each["status"] == "healthy"]
    assert len(looked) >= len(MEASUREMENT["sglang_promote_blocks"]) + 1
    for side in ("off", "on"):
        assert f"msg: 'fusion {side}, 8 streams: " in promoted.stdout


def test_the_report_says_why(promoted: Run, told: tuple[dict[str, Any], Path]) -> None:
    run, folder = told
    jsonschema.validate(run, SCHEMA)
    assert run["kind"] == "promote"
    assert run["verdict"]["bad"]
    assert run["verdict"]["reasons"] == run["decision"]["reasons"]
    rate = next(one for one in run["decision"]["comparisons"] if one["figure"] == "output_tokens_per_second")
    assert (rate["concurrency"], rate["verdict"]) == (8, "worse")
    assert rate["ratio_high"] < 1
    for side in ("off", "on"):
        (rung,) = run["sides"][side]["rungs"]
        assert (rung["repeats"], rung["valid"]) == (5, True)
        # Prompts are random: two may begin with the same token, not with the same text.
        assert rung["cached_tokens"] < rung["completed"]
    assert (run["method"]["seed"], run["method"]["seed_given"]) == (1, True)
    assert (run["system"]["os"][:6], run["system"]["gpus"]) == ("Debian", [])
    assert run["system"]["versions"]["sglang"] == "0.5.9"
    answers = [run["sides"][side]["answers"] for side in ("off", "on")]
    assert [one["output_ids"] for one in answers[0]] == [one["output_ids"] for one in answers[1]]
    page = (folder / "report.html").read_text()
    assert [reason for reason in run["verdict"]["reasons"] if escape(reason) not in page] == []
    assert "/../" not in promoted.failures()[0]
    assert str(folder / "report.html") in promoted.failures()[0]


def test_a_side_that_does_not_start_is_switched_off_and_the_play_fails(host: Host, promoted: Run) -> None:
    artifacts = host.folder / "crashed"
    run = host.play(
        playbook="playbooks/promote.yml",
        sglang_promote_again=True,
        sglang_promote_concurrency=[1],
        sglang_promote_on_arguments={"max-total-tokens": 1, "mem-fraction-static": 0.0001},
        sglang_promote_artifacts_dir=str(artifacts),
    )
    assert run.rc == 2, run.stdout
    assert "with the change on the server failed" in run.failures()[-1]
    assert len(run.results("sglang_throughput")) == 1
    arguments = host.read(ARGUMENTS)
    assert "fusion" not in arguments
    assert "max-total-tokens: 1\n" not in arguments
    assert host.active() == "active"
    assert host.generates() == 4
    verdict = json.loads(host.read("/var/lib/sglang-sm120/verdicts/main.json"))
    assert (verdict["verdict"], verdict["keep"]) == ("worse", False)
    (folder,) = (artifacts / "promote").iterdir()
    told = json.loads((folder / "run.json").read_text())
    jsonschema.validate(told, SCHEMA)
    assert told["verdict"]["bad"]
    assert told["sides"]["on"] == {"rungs": [], "answers": []}
    assert escape(told["verdict"]["reasons"][0]) in (folder / "report.html").read_text()


def test_later_runs_keep_to_it(host: Host, promoted: Run) -> None:
    started = host.started()
    run = host.play("--skip-tags", "verify")
    assert (run.rc, run.changed) == (0, 0), run.stdout
    run = host.play(playbook="playbooks/promote.yml")
    assert (run.rc, run.changed) == (0, 0), run.stdout
    assert run.results("sglang_throughput") == []
    assert host.started() == started
    assert host.generates() == 4
