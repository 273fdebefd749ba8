"""The gate modules on real upstream files: open, close, revert, refuse."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import wheels
from conftest import RunModule
from gates_driver import Gates

COMMUNICATOR = "sglang/srt/layers/communicator.py"
OPENED_059 = {
    "fusion.header_guard": "open",
    "fusion.jit": "open",
    "fusion.multicast_preflight": "absent",
    "fusion.workspace_multicast": "open",
    "fusion.resolve_backend": "absent",
    "fusion.runtime": "open",
    "fusion.auto_enable": "open",
    "moe.autotune": "open",
    "moe.runner_auto": "closed",
}
OPENED_0523 = {
    "fusion.header_guard": "native",
    "fusion.jit": "native",
    "fusion.multicast_preflight": "open",
    "fusion.workspace_multicast": "native",
    "fusion.resolve_backend": "open",
    "fusion.runtime": "open",
    "fusion.auto_enable": "open",
    "moe.autotune": "native",
    "moe.runner_auto": "closed",
}
SETS = [("0.5.9", "0.6.3", OPENED_059), ("0.5.23", "0.7.2", OPENED_0523)]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(site: Path) -> dict[str, tuple[str, int]]:
    return {str(path): (sha256(path), path.stat().st_mtime_ns) for path in site.rglob("*") if path.is_file()}


def manifest(gates: Gates) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((gates.state_dir / "manifest.json").read_text())
    return told


@pytest.fixture
def gates(make_site: Any, run_module: RunModule) -> Gates:
    return Gates(run_module, make_site("0.5.9", "0.6.3"))


@pytest.mark.parametrize(("sglang", "flashinfer", "opened"), SETS)
def test_open_and_back(
    sglang: str, flashinfer: str, opened: dict[str, str], make_site: Any, run_module: RunModule
) -> None:
    gates = Gates(run_module, make_site(sglang, flashinfer))
    first = gates.info()
    assert first["digest"] == "pristine"
    assert first["consistent"]
    assert first["settled"]
    assert {each["version"] for each in first["packages"].values()} == {sglang, flashinfer}

    gates.apply()
    after = gates.info()
    assert gates.states() == opened
    assert after["features"] == {"allreduce_fusion": "open", "moe_autotune": "open"}
    assert after["digest"] == first["wanted_digest"]
    assert (after["needed"], after["edits"], after["consistent"]) == (False, [], True)
    assert wheels.differing(gates.site) == {
        str(Path(edit["path"]).relative_to(gates.site)) for edit in first["edits"]
    }
    assert (gates.state_dir.stat().st_mode & 0o777) == 0o700
    assert ((gates.state_dir / "manifest.json").stat().st_mode & 0o777) == 0o600

    gates.apply("absent")
    assert wheels.differing(gates.site) == set()
    assert manifest(gates) == {"format": 1, "entries": {}, "settled": {}}
    assert list((gates.state_dir / "pristine").iterdir()) == []
    assert not gates.info("absent")["needed"]


def test_edits_come_bottom_layer_first(gates: Gates) -> None:
    order = list(dict.fromkeys(edit["gate"] for edit in gates.info()["edits"]))
    assert order == [
        "fusion.header_guard",
        "fusion.jit",
        "fusion.workspace_multicast",
        "fusion.runtime",
        "fusion.auto_enable",
        "moe.autotune",
    ]


@pytest.mark.parametrize("want", ["present", "absent"])
@pytest.mark.parametrize("done", range(11))
def test_interrupted_after_any_edit(gates: Gates, done: int, want: str) -> None:
    plan = gates.apply(edits=done)
    assert len(plan["edits"]) == 10
    broken = gates.info(want)
    assert broken["problems"] == []
    assert broken["consistent"] == (done in (0, 9, 10))  # the ninth edit is the last of allreduce_fusion
    assert broken["needed"]
    assert not broken["settled"]
    gates.apply(want)
    assert gates.info(want)["needed"] is False
    assert gates.info(want)["digest"] == (plan["wanted_digest"] if want == "present" else "pristine")
    assert (wheels.differing(gates.site) == set()) == (want == "absent")


@pytest.mark.parametrize("want", ["present", "absent"])
def test_killed_before_the_purge_purges_on_the_next_run(gates: Gates, want: str) -> None:
    if want == "absent":
        gates.apply()
    plan = gates.info(want)
    gates.must("keep", plan["plan"])
    gates.must("restore", plan["plan"], scope="outdated")
    gates.edit(plan["edits"])
    gates.must("verify", plan["plan"])
    again = gates.info(want)
    assert (again["edits"], again["settled"], again["needed"], again["purge"]) == ([], False, True, True)
    other = gates.info("absent" if want == "present" else "present")
    assert other["purge"]
    gates.apply(want)
    assert gates.info(want)["settled"]


def test_partial_names_the_gate(gates: Gates) -> None:
    gates.apply(edits=6)
    states = gates.states()
    assert states["fusion.runtime"] == "partial"
    assert states["fusion.jit"] == "open"
    assert states["fusion.auto_enable"] == "closed"
    assert gates.info()["features"]["allreduce_fusion"] == "partial"


def test_one_feature_alone_and_closing_the_other(gates: Gates) -> None:
    gates.features = ["moe_autotune"]
    gates.apply()
    assert wheels.differing(gates.site) == {"sglang/srt/model_executor/model_runner.py"}
    gates.features = ["allreduce_fusion"]
    gates.apply()
    assert gates.states()["moe.autotune"] == "closed"
    assert gates.info()["features"] == {"allreduce_fusion": "open", "moe_autotune": "closed"}
    assert "sglang/srt/model_executor/model_runner.py" not in wheels.differing(gates.site)
    gates.features = ["allreduce_fusion", "moe_autotune"]
    gates.apply()
    assert gates.states() == OPENED_059


def test_only_sglang_edits_leave_compiled_kernels_alone(make_site: Any, run_module: RunModule) -> None:
    gates = Gates(run_module, make_site("0.5.23", "0.7.2"))
    assert not gates.apply()["purge"]
    assert not gates.apply("absent")["purge"]


def refuses(gates: Gates, *words: str, want: str = "present") -> dict[str, Any]:
    """The plan is refused, each word stands in a problem, nothing on disk moved."""
    before = tree(gates.site)
    answer = gates.info(want)
    assert answer["problems"]
    assert (answer["edits"], answer["plan"]) == ([], {})
    told = "\n".join(answer["problems"])
    for word in words:
        assert word in told
    code, _ = gates.state("keep", answer["plan"])
    assert code == 1
    assert tree(gates.site) == before
    return answer


def test_refuses_an_altered_line(gates: Gates) -> None:
    path = gates.site / COMMUNICATOR
    pristine = sha256(path)
    path.write_text(
        path.read_text().replace(
            "FUSE_ALLREDUCE_MAX_BATCH_SIZE = 2048", "FUSE_ALLREDUCE_MAX_BATCH_SIZE = 4096"
        )
    )
    refuses(gates, str(path), "0.5.9", pristine, sha256(path), "--force-reinstall")
    assert gates.states()["fusion.runtime"] == "drifted"


@pytest.mark.parametrize("factor", [0, 2])
@pytest.mark.parametrize(
    "line", ["    is_sm100_supported,\n", "        (_is_sm90_supported or _is_sm100_supported)\n"]
)
def test_refuses_a_release_that_moved_a_gate(gates: Gates, line: str, factor: int) -> None:
    text = (gates.site / COMMUNICATOR).read_text()
    assert text.count(line) == 1
    wheels.deliver(gates.site, COMMUNICATOR, text.replace(line, line * factor).encode())
    refuses(gates, COMMUNICATOR, f"matches {factor} times", "moved this gate")
    assert gates.states()["fusion.runtime"] == "unknown"


def test_refuses_a_file_changed_by_another_hand_after_the_edit(gates: Gates) -> None:
    gates.apply()
    path = gates.site / COMMUNICATOR
    path.write_text(path.read_text() + "# a note\n")
    for want in ("present", "absent"):
        refuses(gates, str(path), sha256(path), "another hand", want=want)


def test_restore_proves_every_file_before_it_touches_one(gates: Gates) -> None:
    gates.apply()
    plan = gates.info("absent")["plan"]
    path = gates.site / "flashinfer/jit/comm.py"
    path.write_text(path.read_text() + "# a note\n")
    before = tree(gates.site)
    code, answer = gates.state("restore", plan)
    assert code == 1
    assert str(path) in answer["msg"]
    assert sha256(path) in answer["msg"]
    assert tree(gates.site) == before


def test_keep_refuses_when_a_file_changed_since_the_plan(gates: Gates) -> None:
    plan = gates.info()["plan"]
    path = gates.site / COMMUNICATOR
    path.write_text(path.read_text() + "\n")
    code, answer = gates.state("keep", plan)
    assert (code, str(path) in answer["msg"]) == (1, True)
    assert not (gates.state_dir / "manifest.json").exists()


def test_verify_finds_an_edit_that_did_not_happen(gates: Gates) -> None:
    plan = gates.info()
    gates.must("keep", plan["plan"])
    gates.edit(plan["edits"][:-1])
    code, answer = gates.state("verify", plan["plan"])
    assert code == 1
    assert "model_runner.py" in answer["msg"]
    gates.must("restore", plan["plan"])
    assert wheels.differing(gates.site) == set()


def test_a_symbolic_link_is_not_followed(gates: Gates, tmp_path: Path) -> None:
    path = gates.site / COMMUNICATOR
    shared = tmp_path / "shared.py"
    path.rename(shared)
    path.symlink_to(shared)
    refuses(gates, str(path), "symbolic link", str(shared))


def test_a_lost_state_folder_is_drift_in_both_directions(gates: Gates) -> None:
    gates.apply()
    gates.state_dir.rename(gates.state_dir.with_name("lost"))
    for want in ("present", "absent"):
        refuses(gates, COMMUNICATOR, "no record of an edit", want=want)


def test_restore_keeps_mode_and_gives_a_fresh_mtime(gates: Gates) -> None:
    path = gates.site / COMMUNICATOR
    path.chmod(0o640)
    gates.apply()
    edited = path.stat().st_mtime_ns
    gates.apply("absent")
    assert (path.stat().st_mode & 0o777) == 0o640
    assert path.stat().st_mtime_ns > edited


def test_bytecode_of_edited_files_goes_and_other_bytecode_stays(gates: Gates) -> None:
    folder = (gates.site / COMMUNICATOR).parent / "__pycache__"
    folder.mkdir()
    own, other = folder / "communicator.cpython-311.pyc", folder / "communicator_x.cpython-311.pyc"
    for want in ("present", "absent"):
        own.write_bytes(b"x")
        other.write_bytes(b"x")
        gates.apply(want)
        assert (own.exists(), other.exists()) == (False, True)


def test_check_mode_of_every_step_writes_nothing(gates: Gates) -> None:
    plan = gates.info()["plan"]
    before = tree(gates.site)
    for action in ("keep", "restore", "verify", "settle", "forget", "release"):
        code, _ = gates.state(action, plan, check=True)
        assert code == 0
    assert tree(gates.site) == before
    assert not gates.state_dir.exists()
    gates.apply()
    before = tree(gates.site) | tree(gates.state_dir)
    plan = gates.info("absent")["plan"]
    code, answer = gates.state("restore", plan, check=True)
    assert (code, len(answer["restored"])) == (0, 6)
    assert tree(gates.site) | tree(gates.state_dir) == before


def test_a_native_flashinfer_is_left_alone(make_site: Any, run_module: RunModule) -> None:
    gates = Gates(run_module, make_site("0.5.9", "0.7.2"))
    gates.apply()
    assert not any(path.startswith("flashinfer") for path in wheels.differing(gates.site))
    gates.apply("absent")
    assert gates.states()["fusion.jit"] == "native"
    assert gates.info()["features"]["allreduce_fusion"] == "closed"


def test_reinstalled_in_place_is_opened_again(gates: Gates) -> None:
    gates.apply()
    for path in sorted(wheels.differing(gates.site)):
        (gates.site / path).unlink()
    for package, version in (("sglang", "0.5.9"), ("flashinfer", "0.6.3")):
        wheels.unpack(package, version, gates.site)
    plan = gates.info()
    assert plan["problems"] == []
    assert not plan["settled"]
    gates.apply()
    assert gates.states() == OPENED_059


@pytest.mark.parametrize("capability", ["9.0", "10.0", "nonsense"])
def test_other_capabilities_are_refused(gates: Gates, capability: str) -> None:
    answer = gates.info(capability=capability)
    assert capability in answer["problems"][0]
    assert answer["edits"] == []


def test_no_runtime_yet(run_module: RunModule, tmp_path: Path) -> None:
    import sm120_gates_info

    code, answer = run_module(
        sm120_gates_info.main,
        check=True,
        python=str(tmp_path / "bin/python"),
        state_dir=str(tmp_path / "state"),
    )
    assert (code, answer["packages"]) == (0, {})
    assert {gate["state"] for gate in answer["gates"]} == {"unknown"}
    assert len(answer["problems"]) == 1
    assert str(tmp_path / "bin/python") in answer["problems"][0]


HEADER = "flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh"
NATIVE = [
    ("flashinfer/jit/comm.py", {"fusion.jit"}),
    (HEADER, {"fusion.header_guard"}),
    ("flashinfer/comm/mnnvl.py", {"fusion.workspace_multicast"}),
    ("sglang/srt/model_executor/runner/flashinfer_autotune.py", {"moe.autotune"}),
    ("sglang/srt/arg_groups/overrides.py", {"fusion.auto_enable", "moe.runner_auto"}),
]


@pytest.mark.parametrize(("relative", "named"), NATIVE)
def test_a_gate_that_needs_no_edit_is_proved_by_hash_too(
    make_site: Any, run_module: RunModule, relative: str, named: set[str]
) -> None:
    gates = Gates(run_module, make_site("0.5.23", "0.7.2"))
    path = gates.site / relative
    delivered = sha256(path)
    path.write_text(path.read_text() + "\n")
    seen = gates.info()
    drifted = {gate["id"]: gate for gate in seen["gates"] if gate["state"] == "drifted"}
    assert set(drifted) == named
    assert {(gate["expected"], gate["found"]) for gate in drifted.values()} == {(delivered, sha256(path))}
    assert seen["features"]["moe_autotune" if named == {"moe.autotune"} else "allreduce_fusion"] == "drifted"
    assert seen["edits"] == []
    assert any(str(path) in problem and delivered in problem for problem in seen["problems"])
    path.unlink()
    assert {gate["id"] for gate in gates.info()["gates"] if gate["state"] == "drifted"} == named


def test_a_way_back_leaves_alone_what_it_never_edited(make_site: Any, run_module: RunModule) -> None:
    gates = Gates(run_module, make_site("0.5.23", "0.7.2"))
    gates.apply()
    path = gates.site / HEADER
    path.write_text(path.read_text() + "\n")
    gates.apply("absent")
    assert wheels.differing(gates.site) == {HEADER}
