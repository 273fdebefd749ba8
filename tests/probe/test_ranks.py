"""The probe's ranks on the CPU: the shipped program and supervisor, gloo for NCCL, the operation emulated."""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from typing import Any

import pytest
from sm120 import probe_watch
from sm120.probe import Probe, Settings
from sm120.probe_call import FusionCall
from sm120.probe_run import Account

ROOT = Path(__file__).resolve().parents[2]
FACTS = {"packages": {"flashinfer-python": {"version": "0.6.12", "root": ""}}}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_watch, "START_LIMIT_SECONDS", 600.0)


def run(folder: Path, python: str, ranks: int, fp32: bool = False, **given: Any) -> dict[str, Any]:
    settings = Settings(
        python=python,
        program=ROOT / "roles" / "fusion_probe" / "files" / "program",
        work=folder,
        logs=folder,
        account=Account.of(getpass.getuser()),
        environment={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        ranks=ranks,
        rank_program=str(ROOT / "tests" / "probe" / "emulated_rank.py"),
        **{
            "stages": ("nccl", "workspace", "numbers"),
            "hidden": (2048,),
            "tokens": (1, 17),
            "dtypes": ("bf16", "fp16"),
            "modes": ("auto", "one_shot", "two_shot"),
            "step_factor": 4.0,  # eight ranks share two cores
            "stage_limits": {"nccl": 600.0},
            **given,
        },
    )
    probe = Probe(settings, FACTS, print)
    probe.call = FusionCall("unified", fp32, 2048, True, False)
    return probe.run()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("ranks", "fp32"), [(2, False), (4, False), (8, False), pytest.param(8, True, marks=LONG)]
)
def test_right_numbers_pass_at_every_size(tmp_path: Path, torch_python: str, ranks: int, fp32: bool) -> None:
    report = run(tmp_path, torch_python, ranks, fp32)
    assert report["failure"] is None
    assert {s["name"] for s in report["stages"] if s["status"] == "passed"} == {
        "nccl",
        "workspace",
        "numbers",
    }
    assert report["verdict"] == "incomplete"  # neither built nor timed: never passed
    assert len(report["cases"]) == 2 * (2 + 2 + 1)
    for case in report["cases"]:
        assert case["ok"]
        assert case["worst"] < 1
        assert 0.5 < case["rms"] < 1  # near the limit, or the limit says little
        assert case["bias"] < 1


def test_every_pipeline_stage_computes(tmp_path: Path, torch_python: str) -> None:
    report = run(tmp_path, torch_python, 2, groups=2, tokens=(17,), modes=("auto",), dtypes=("bf16",))
    assert report["failure"] is None
    assert [group["name"] for group in report["processes"]] == ["compute-group0", "compute-group1"]
    assert [(case["name"], case["ok"]) for case in report["cases"]] == [
        ("eager hidden=2048 tokens=17 bf16 auto", True)
    ] * 2
    assert len({pid for group in report["processes"] for pid in group["pids"]}) == 4


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=LONG), pytest.param(8, marks=LONG)])
@pytest.mark.parametrize(
    ("fault", "words"), [("wrong_scale", "input counted 1.02"), ("missing_residual", "the residual counted")]
)
def test_a_wrong_sum_is_found_and_its_origin_named(
    tmp_path: Path, torch_python: str, ranks: int, fault: str, words: str
) -> None:
    report = run(tmp_path, torch_python, ranks, fault=fault, modes=("auto",), tokens=(17,), dtypes=("bf16",))
    assert report["failure"]["cause"] == "wrong_numbers"
    problems = " ".join(report["cases"][0]["problems"])
    assert words in problems
    if fault == "wrong_scale":
        assert f"rank {ranks - 1}'s input" in problems


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("garbage_row", "1 rows, row 682"),
        ("unwritten_row", "2048 elements unwritten in 1 rows, row 682"),
        ("moving_error", "other bits the second time"),
    ],
)
def test_one_row_of_2048_is_found(tmp_path: Path, torch_python: str, fault: str, words: str) -> None:
    report = run(tmp_path, torch_python, 2, fault=fault, modes=("auto",), tokens=(2048,), dtypes=("bf16",))
    assert report["failure"]["cause"] == "wrong_numbers"
    assert any(words in problem for problem in report["cases"][0]["problems"])
    assert (report["cases"][0]["worst"] is None) == (fault == "unwritten_row")


@pytest.mark.parametrize(
    ("ranks", "fault", "cause"),
    [
        (2, "absent_rank", "hang"),
        (2, "crashed_rank", "crash"),
        pytest.param(8, "absent_rank", "hang", marks=LONG),
        pytest.param(8, "crashed_rank", "crash", marks=LONG),
    ],
)
def test_a_lost_rank_is_named_and_all_processes_end(
    tmp_path: Path, torch_python: str, ranks: int, fault: str, cause: str
) -> None:
    report = run(tmp_path, torch_python, ranks, fault=fault, tokens=(17,), modes=("auto",), step_factor=0.3)
    failure = report["failure"]
    assert (failure["stage"], failure["cause"]) == ("numbers", cause)
    if cause == "crash":  # gloo blocks in the call itself, so all ranks stand at the same place in a hang
        assert failure["rank"] == ranks - 1
    assert "tokens=17" in failure["case"]
    group = report["processes"][0]
    assert len(group["pids"]) == ranks
    assert group["pids_left"] == []
    assert not [pid for pid in group["pids"] if Path(f"/proc/{pid}").exists()]
    # The store that the dead left behind must not catch the living.
    again = run(tmp_path, torch_python, ranks, tokens=(17,), modes=("auto",), dtypes=("bf16",))
    assert again["failure"] is None
