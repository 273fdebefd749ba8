"""Every released version: opened as a whole, stable on the second run, and back to the bytes of its wheel."""

from __future__ import annotations

import pytest
import versions
from conftest import DECOYS, PAIRS, Host, wheels

APPLIED, AGAIN, REVERTED = range(3)


@pytest.fixture(params=PAIRS, ids=lambda pair: f"sglang-{pair[0]}-flashinfer-{pair[1]}")
def host(request: pytest.FixtureRequest, matrix: dict[tuple[str, str], Host]) -> Host:
    return matrix[request.param]


def states(host: Host, run: int) -> dict[str, str]:
    return {gate["id"]: gate["state"] for gate in host.facts[run]["gates"]}


def test_opens_as_a_whole_and_stays(host: Host) -> None:
    for run in (APPLIED, AGAIN):
        assert host.facts[run]["features"] == {"allreduce_fusion": "open", "moe_autotune": "open"}
        assert host.facts[run]["consistent"]
        assert set(states(host, run).values()) - {"closed"} <= {"open", "native", "absent"}
        assert [gate for gate, state in states(host, run).items() if state == "closed"] == ["moe.runner_auto"]
    assert host.differing[APPLIED] == host.differing[AGAIN]
    assert host.changed[APPLIED] > 0
    assert host.changed[AGAIN] == 0


def test_reverts_to_the_wheel(host: Host) -> None:
    assert host.differing[REVERTED] == set()
    assert host.facts[REVERTED]["digest"] == "pristine"
    assert "open" not in states(host, REVERTED).values()
    assert wheels.recorded(host.site)


def test_flashinfer_is_opened_up_to_0_6_16_and_native_after(host: Host) -> None:
    edited = {path for path in host.differing[APPLIED] if path.startswith("flashinfer/")}
    if host.flashinfer in versions.NATIVE:
        assert edited == set()
        for run in (APPLIED, AGAIN, REVERTED):
            assert {states(host, run)[gate] for gate in ("fusion.jit", "fusion.header_guard")} == {"native"}
        assert host.marker_left == [True, True, True]
    else:
        assert {"flashinfer/jit/comm.py"} < edited
        assert {states(host, APPLIED)[gate] for gate in ("fusion.jit", "fusion.header_guard")} == {"open"}
        assert {states(host, REVERTED)[gate] for gate in ("fusion.jit", "fusion.header_guard")} == {"closed"}
        assert host.marker_left == [False, True, False]


def test_the_communication_module_can_be_built_for_sm120_once_opened(host: Host) -> None:
    """FlashInfer's own gen_trtllm_comm_module(), called: a specification, or the error of the story."""
    before, *after = host.called
    native = host.flashinfer in versions.NATIVE
    shut = "RuntimeError: No supported CUDA architectures found for major versions [9, 10]."
    for architecture in ("12.0a", "12.0f"):
        code = architecture.replace(".", "")
        built = [f"-gencode=arch=compute_{code},code=sm_{code}"]
        assert before[architecture] == (built if native else shut)
        assert [each[architecture] for each in after] == [built, built, before[architecture]]
    for architecture in ("9.0a", "10.0a"):
        assert all(each[architecture] == before[architecture] for each in after)
        assert isinstance(before[architecture], list)
    for each in host.called:
        assert str(each["8.0"]).startswith("RuntimeError")


def test_decoys_are_untouched(host: Host) -> None:
    for run in (APPLIED, AGAIN, REVERTED):
        changed = {name for name, text in host.seen_functions[run].items() if text != host.functions[name]}
        opened = run != REVERTED and host.flashinfer in versions.CLOSED
        assert changed == ({"gen_trtllm_comm_module"} if opened else set())
    if list(versions.PINS).index(host.sglang) >= list(versions.PINS).index("0.5.15"):
        assert any((host.site / decoy).is_file() for decoy in DECOYS)
        assert not host.differing[APPLIED] & set(DECOYS)
