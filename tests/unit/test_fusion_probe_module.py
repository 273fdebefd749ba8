"""The module round a stand-in program: verdicts, re-use, check mode, messages, and its papers."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusion_probe
import pytest
import yaml
from ansible.module_utils.sm120 import probe as probe_module
from ansible.module_utils.sm120.probe_report import PLAY

ROOT = Path(__file__).resolve().parents[2]
RunModule = Callable[..., tuple[int, dict[str, Any]]]

FACTS = """
import json
packages = {"flashinfer-python": {"version": "0.6.12", "root": "/nowhere/flashinfer"}}
print(json.dumps({"python": "3.11", "executable": "python", "packages": packages}))
"""
BUILD = """
import json, os, sys
from pathlib import Path
config = json.load(sys.stdin)
say = lambda **k: print(json.dumps(k), flush=True)
home = Path(os.environ["HOME"])
with (home / "runs").open("a") as sink:
    sink.write("run\\n")
(home / "config").write_text(json.dumps(config))
say(t="begin", stage="toolchain")
say(t="end", stage="toolchain", nvcc="13.0")
say(t="begin", stage="jit")
if (home / "closed").exists():
    say(t="fail", stage="jit", cause="gate_closed", text="gate fusion.jit is closed")
    sys.exit(3)
(home / "library.so").write_text("built")
say(t="end", stage="jit", library=str(home / "library.so"))
say(t="done")
"""
RANK = """
import json, os, sys
from pathlib import Path
config = json.load(sys.stdin)
say = lambda **k: print(json.dumps(k), flush=True)
with (Path(os.environ["HOME"]) / "seen").open("a") as sink:
    sink.write(sys.argv[1] + " of " + os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\\n")
good = {"worst": 0.9, "rms": 0.7, "bias": 0.2, "error": 0.002, "problems": []}
kinds = {"numbers": "eager", "graph": "graph"}
for stage in config["stages"]:
    say(t="begin", stage=stage)
    for case in config["cases"]:
        if case["kind"] == kinds.get(stage):
            say(t="case", case=case["name"], **good)
    say(t="end", stage=stage)
say(t="done")
"""
ALL = {"facts.py": FACTS, "build.py": BUILD, "rank.py": RANK}


@pytest.fixture
def probe(tmp_path: Path, run_module: RunModule, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no nvidia-smi of a developer's machine
    (tmp_path / "home").mkdir()

    def run(**given: Any) -> tuple[int, dict[str, Any]]:
        check = given.pop("check", False)
        args = {
            "python": sys.executable,
            "user": getpass.getuser(),
            "program": {"facts.py": FACTS, "build.py": BUILD},
            "program_dir": str(tmp_path / "program"),
            "evidence_dir": str(tmp_path / "evidence"),
            "environment": {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"},
            **given,
        }
        return run_module(fusion_probe.main, check=check, **args)

    return run


def with_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> str:
    """A PATH whose nvidia-smi shows so many."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    rows = "".join(f"echo '{i}, GPU-{i}, NVIDIA X, 580.1, 0, 97887'\n" for i in range(count))
    tool.write_text("#!/bin/sh\n" + rows)
    tool.chmod(0o755)
    path = f"{tool.parent}:/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    return path


def runs(folder: Path) -> int:
    path = folder / "home" / "runs"
    return path.read_text().count("run") if path.exists() else 0


def test_without_gpus_the_build_runs_and_the_rest_is_not_run(
    probe: Callable[..., Any], tmp_path: Path
) -> None:
    code, answer = probe()
    assert (code, answer["verdict"], answer["changed"]) == (0, "compiled", True)
    status = {stage["name"]: stage["status"] for stage in answer["stages"]}
    assert [name for name, found in status.items() if found == "passed"] == ["toolchain", "jit"]
    assert {status[name] for name in ("nccl", "workspace", "numbers", "graph", "speed")} == {"not_run"}
    assert json.loads((tmp_path / "home" / "config").read_text())["architectures"] == ["120f"]
    assert json.loads(Path(answer["evidence"]).read_text())["verdict"] == "compiled"
    assert "stage jit passed" in (tmp_path / "evidence" / "progress.log").read_text()


@pytest.mark.parametrize(
    ("gpus", "ranks", "groups", "verdict", "cause"),
    [
        (1, 0, 1, "compiled", None),
        (4, 1, 1, "compiled", None),
        (2, 4, 1, "failed", "ranks"),
        (4, 2, 3, "failed", "ranks"),
        (6, 0, 1, None, None),
    ],
)
def test_ranks_that_this_host_cannot_have(
    probe: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    ranks: int,
    groups: int,
    verdict: str | None,
    cause: str | None,
) -> None:
    path = with_gpus(tmp_path, monkeypatch, gpus)
    code, answer = probe(
        ranks=ranks, groups=groups, environment={"HOME": str(tmp_path / "home"), "PATH": path}
    )
    assert answer.get("verdict") == verdict
    assert code == (0 if verdict == "compiled" else 1)
    assert (answer.get("failure") or {}).get("cause") == cause
    if verdict is None:
        assert "2, 4, 8, 16" in answer["msg"]
    if cause == "ranks":
        assert f"{gpus} GPUs on this host, {ranks * groups} wanted" in answer["msg"]


@pytest.mark.parametrize(
    ("visible", "ranks", "groups", "seen"),
    [
        (None, 6, 1, None),
        (None, 2, 1, ["all"]),
        (None, 2, 3, ["0,1", "2,3", "4,5"]),
        ("5,4,3,2", 2, 2, ["5,4", "3,2"]),
        ("5,4,3", 2, 2, None),
    ],
)
def test_the_gpus_of_each_group(
    probe: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    ranks: int,
    groups: int,
    seen: list[str] | None,
) -> None:
    path = with_gpus(tmp_path, monkeypatch, 6)
    environment = {"HOME": str(tmp_path / "home"), "PATH": path}
    code, answer = probe(
        ranks=ranks,
        groups=groups,
        environment={**environment, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})},
        program=ALL,
    )
    told = tmp_path / "home" / "seen"
    if seen is None:
        assert code == 1
        assert not told.exists()
        if visible:
            assert f"3 GPUs visible (CUDA_VISIBLE_DEVICES={visible}) of 6, 4 wanted" in answer["msg"]
            assert "Name more GPUs in CUDA_VISIBLE_DEVICES" in answer["msg"]
        return
    assert (code, answer["verdict"], answer["groups"]) == (0, "passed", groups)
    lines = sorted(told.read_text().splitlines())
    assert lines == sorted(f"{rank} of {gpus}" for gpus in seen for rank in range(ranks))


def test_a_good_verdict_is_used_again_until_something_differs(
    probe: Callable[..., Any], tmp_path: Path
) -> None:
    probe()
    code, again = probe()
    assert (code, again["changed"], again["reused"], runs(tmp_path)) == (0, False, True, 1)
    assert probe(check=True)[1]["changed"] is False
    assert probe(gates_digest="other")[1]["reused"] is False
    assert probe(gates_digest="other", reuse=False)[1]["reused"] is False
    assert runs(tmp_path) == 3
    (tmp_path / "home" / "library.so").unlink()  # a purge of the cache
    assert probe(gates_digest="other")[1]["reused"] is False


def test_a_run_with_a_fault_is_no_verdict_and_replaces_none(probe: Callable[..., Any]) -> None:
    probe(fault="wrong_scale")
    assert probe(fault="wrong_scale")[1]["reused"] is False
    assert probe()[1]["reused"] is False
    probe(fault="wrong_scale")
    assert probe()[1]["reused"] is True


@pytest.fixture
def on_gpus(probe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The same on two GPUs, all stages."""
    environment = {"HOME": str(tmp_path / "home"), "PATH": with_gpus(tmp_path, monkeypatch, 2)}

    def run(**given: Any) -> tuple[int, dict[str, Any]]:
        more = given.pop("environment", {})
        answer: tuple[int, dict[str, Any]] = probe(
            environment={**environment, **more}, **{"program": ALL, "reuse": False, **given}
        )
        return answer

    return run


def stored(folder: Path, name: str = "report.json") -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "evidence" / name).read_text())
    return report


def test_memory_that_stays_taken_fails_the_probe_and_is_no_verdict(
    on_gpus: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_gpus()[1]["verdict"] == "passed"
    before = stored(tmp_path)
    with monkeypatch.context() as held:
        held.setattr(probe_module, "wait_memory_free", lambda *_: ["GPU 0 (GPU-0): 900 MiB used"])
        held.setattr(probe_module, "units_on_gpus", lambda _: ["sglang-main.service"])
        code, answer = on_gpus()
    assert (code, answer["verdict"], answer["failure"]["cause"]) == (1, "failed", "memory")
    stage = next(each for each in answer["stages"] if each["name"] == "speed")
    assert (stage["status"], "not free again" in stage["detail"]) == ("failed", True)
    assert "systemctl stop sglang-main.service" in answer["msg"]
    assert stored(tmp_path) == before
    assert json.loads(Path(answer["evidence"]).read_text())["verdict"] == "failed"


def test_processes_that_do_not_end_fail_the_probe(
    on_gpus: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_group = probe_module.run_group

    def left(job: Any, *more: Any) -> Any:
        return {**run_group(job, *more), "pids_left": [7] if job.name == "compute" else []}

    monkeypatch.setattr(probe_module, "run_group", left)
    code, answer = on_gpus()
    assert (code, answer["verdict"], answer["failure"]["cause"]) == (1, "failed", "hang")
    assert [each["name"] for each in answer["stages"] if each["status"] == "failed"] == ["speed"]
    assert stored(tmp_path)["verdict"] == "failed"


def test_a_verdict_with_a_failure_in_it_is_not_used_again(probe: Callable[..., Any], tmp_path: Path) -> None:
    probe()
    report = stored(tmp_path)
    report["failure"] = {"stage": "speed", "cause": "memory", "text": "", "next": ""}
    (tmp_path / "evidence/report.json").write_text(json.dumps(report))
    assert probe()[1]["reused"] is False


@pytest.mark.parametrize(
    "given", [{"of_server": False}, {"stages": ["toolchain", "jit"]}, {"ranks": 4}], ids=str
)
def test_a_run_about_something_else_leaves_the_servers_verdict(
    on_gpus: Callable[..., Any], tmp_path: Path, given: dict[str, Any]
) -> None:
    (tmp_path / "home" / "closed").touch()
    on_gpus()
    (tmp_path / "home" / "closed").unlink()
    assert stored(tmp_path)["failure"]["cause"] == "gate_closed"
    code, answer = on_gpus(**given)
    assert code == (1 if "ranks" in given else 0)
    assert stored(tmp_path)["failure"]["cause"] == "gate_closed"
    if code == 0:
        assert answer["evidence"] == str(tmp_path / "evidence/other.json")
        assert on_gpus(**given, reuse=True)[1]["reused"] is True
    assert on_gpus(reuse=True)[1]["reused"] is False
    assert stored(tmp_path)["verdict"] == "passed"


@pytest.mark.parametrize(
    ("name", "bears"),
    [
        ("NCCL_P2P_LEVEL", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", True),
        ("LD_LIBRARY_PATH", True),
        ("SGLANG_LOG_LEVEL", False),
        ("NCCL_DEBUG", False),
        ("FLASHINFER_LOGLEVEL", False),
        ("OMP_NUM_THREADS", False),
        ("SM120_GATES_DIGEST", False),
    ],
)
def test_a_verdict_holds_for_the_environment_that_bears_on_it(
    on_gpus: Callable[..., Any], name: str, bears: bool
) -> None:
    on_gpus()
    assert on_gpus(reuse=True, environment={name: "1,0"})[1]["reused"] is not bears


def test_the_units_on_the_gpus_are_told(tmp_path: Path) -> None:
    units = {71: "sglang-main.service", 72: "user.slice/session-1.scope", 73: "ssh.service"}
    for pid, unit in units.items():
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text(f"0::/{unit}\n")
    rows = "".join(f"00000000:0{pid}:00.0, {pid}, python, 80000\n" for pid in units)
    host = probe_module.Host(tmp_path, lambda _: (0, rows))
    assert probe_module.units_on_gpus(host) == ["sglang-main.service"]
    assert probe_module.units_on_gpus(probe_module.Host(tmp_path, lambda _: (127, ""))) == []


def test_a_failure_names_stage_cause_next_step_and_evidence(
    probe: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "home" / "closed").touch()
    code, answer = probe()
    assert (code, answer["verdict"]) == (1, "failed")
    assert (answer["failure"]["stage"], answer["failure"]["cause"]) == ("jit", "gate_closed")
    assert "fusion.jit" in answer["msg"]
    assert f"{PLAY}gates.yml" in answer["msg"]
    assert answer["evidence"] in answer["msg"]
    assert json.loads(Path(answer["evidence"]).read_text())["failure"]["cause"] == "gate_closed"
    (tmp_path / "home" / "closed").unlink()
    code, answer = probe()
    assert (code, answer["verdict"], answer["reused"]) == (0, "compiled", False)


def test_the_server_is_told_of_a_failure_and_of_what_it_is_about(
    probe: Callable[..., Any], tmp_path: Path
) -> None:
    examine = ROOT / "roles/sglang_server/files/examine.py"

    def told() -> Any:
        report = tmp_path / "evidence/report.json"
        command = [sys.executable, str(examine), str(tmp_path), str(tmp_path), str(tmp_path), str(report)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)["probe"]

    nothing = dict.fromkeys(("verdict", "began", "stage", "cause", "text", "gates"), "")
    assert told() == {**nothing, "packages": {}, "gpus": []}
    (tmp_path / "home" / "closed").touch()
    _, answer = probe(gates_digest="d1")
    assert told() == {
        "verdict": "failed",
        "began": answer["began"],
        "stage": "jit",
        "cause": "gate_closed",
        "text": "gate fusion.jit is closed",
        "gates": "d1",
        "packages": {"flashinfer-python": "0.6.12"},
        "gpus": [],
    }
    (tmp_path / "home" / "closed").unlink()
    probe(gates_digest="d1")
    assert (told()["verdict"], told()["text"]) == ("compiled", "")


def test_check_mode_runs_and_writes_nothing(probe: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "facts.py").write_text(FACTS)
    code, answer = probe(check=True)
    assert (code, answer["changed"], runs(tmp_path)) == (0, True, 0)
    assert not (tmp_path / "evidence").exists()
    assert {stage["status"] for stage in answer["stages"]} == {"not_run"}


def test_check_mode_on_a_host_without_the_program_asks_nothing(
    probe: Callable[..., Any], tmp_path: Path
) -> None:
    code, answer = probe(check=True)
    assert (code, answer["verdict"], answer["changed"]) == (0, "incomplete", True)
    assert "not on this host yet" in answer["stages"][0]["detail"]
    assert not (tmp_path / "program").exists()


def test_the_program_folder_holds_exactly_the_program(probe: Callable[..., Any], tmp_path: Path) -> None:
    stale = tmp_path / "program" / "sm120" / "old.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("old")
    probe()
    found = {str(path.relative_to(tmp_path / "program")) for path in (tmp_path / "program").rglob("*")}
    assert found == {"facts.py", "build.py"}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"user": "nobody-of-this-name"}, "no user"),
        ({"python": "/nowhere/bin/python"}, f"Run: {PLAY}runtime.yml"),
        ({"program": {"facts.py": "raise SystemExit(4)"}}, "ended with 4"),
        ({"program": {"facts.py": "print('hello')"}}, "told no facts"),
        ({"program": {"facts.py": "import time; time.sleep(60)"}}, "told nothing about its packages in 1 s"),
        (
            {"program": {"facts.py": "print('{\"packages\": {}}')"}},
            f"flashinfer-python is not installed in this environment. Run: {PLAY}runtime.yml",
        ),
    ],
)
def test_what_cannot_start_says_why(
    probe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], word: str
) -> None:
    if "sleep" in str(given):
        monkeypatch.setattr(probe_module, "FACTS_SECONDS", 1)
    code, answer = probe(**given)
    assert code == 1
    assert word in answer["msg"]


def test_an_error_of_our_own_does_not_pass_for_a_missing_user(
    probe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_words: Any) -> str:
        raise KeyError("packages")

    monkeypatch.setattr(fusion_probe, "key_of", wrong)
    with pytest.raises(KeyError, match="packages"):
        probe()


def test_what_others_read_of_the_answer_is_documented() -> None:
    assert set(yaml.safe_load(fusion_probe.RETURN)) >= {"stages", "cases", "speed", "verdict"}


def test_the_role_hands_on_the_modules_own_defaults() -> None:
    defaults = yaml.safe_load((ROOT / "roles" / "fusion_probe" / "defaults" / "main.yml").read_text())
    for name in (
        "stages",
        "hidden",
        "tokens",
        "dtypes",
        "modes",
        "max_slowdown",
        "timeout_seconds",
    ):
        assert defaults[f"fusion_probe_{name}"] == fusion_probe.argument_spec()[name]["default"], name
