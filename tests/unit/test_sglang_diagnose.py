from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sglang_diagnose
from ansible.module_utils.sm120 import unit_log
from story import STORY

XID = "Mar 01 10:01:00 h kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=12, GPU has fallen off the bus.\n"


def test_the_story_from_a_file(run_module: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(STORY)
    code, out = run_module(sglang_diagnose.main, path=str(log))
    assert code == 0
    assert out["first_cause"]["layer"] == "layer 3"
    assert [(one["signature"], one["role"]) for one in out["findings"]] == [
        ("gate.jit_closed", "cause"),
        ("process.sigquit", "consequence"),
    ]
    assert out["starts"] == 1
    assert not out["changed"]
    assert "s3cret-key" not in json.dumps(out)


def test_a_lost_gpu_explains_what_the_server_saw(run_module: Any, tmp_path: Path) -> None:
    kernel = tmp_path / "kern.log"
    kernel.write_text(XID)
    text = "[x] server_args=ServerArgs()\nRuntimeError: CUDA error: unspecified launch failure\n"
    code, out = run_module(sglang_diagnose.main, text=text, kernel_log=str(kernel))
    assert code == 0
    assert out["first_cause"]["signature"] == "xid.79"
    assert out["first_cause"]["source"] == "kernel"
    assert {one["signature"] for one in out["findings"]} == {"xid.79", "kernel.illegal_access"}


# NVIDIA's catalogue, "Resolution Bucket (Immediate Action)": what the advice must come to.
BUCKETS = {
    **dict.fromkeys((13, 31, 94), ("cause", "Restart the server")),
    **dict.fromkeys((43, 63), (None, "Nothing")),
    **dict.fromkeys((62, 64, 95, 119, 120), ("cause", "nvidia-smi --gpu-reset")),
    48: ("cause", "Xid 94"),
    61: ("cause", "NVIDIA's support"),
    74: ("cause", "reset the GPUs"),
    79: ("cause", "Restart the host"),
    154: ("consequence", "what the line says"),
}


@pytest.mark.parametrize("number", BUCKETS)
def test_each_xid_comes_with_nvidias_action(run_module: Any, tmp_path: Path, number: int) -> None:
    kernel = tmp_path / "kern.log"
    kernel.write_text(XID.replace(": 79,", f": {number},").replace("GPU has fallen off the bus.", "x"))
    _, out = run_module(sglang_diagnose.main, kernel_log=str(kernel))
    role, action = BUCKETS[number]
    (found,) = out["findings"]
    assert found["signature"] == f"xid.{number}"
    assert action in found["advice"]
    assert (out["first_cause"] is not None) == (role == "cause")
    assert role in (None, found["role"])


def test_a_recovery_that_is_over_asks_for_nothing(run_module: Any, tmp_path: Path) -> None:
    kernel = tmp_path / "kern.log"
    begun = XID.replace(
        "79, pid=12, GPU has fallen off the bus.", "119, pid=12, Timeout after 6s of waiting for RPC"
    )
    asked = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from {}\n"
    kernel.write_text(begun + asked.format("0x0 (None) to 0x1 (GPU Reset Required)"))
    _, out = run_module(sglang_diagnose.main, kernel_log=str(kernel))
    assert out["first_cause"]["signature"] == "xid.119"
    assert {one["signature"]: one["role"] for one in out["findings"]} == {
        "xid.119": "cause",
        "xid.154": "consequence",
    }
    kernel.write_text(asked.format("0x1 (GPU Reset Required) to 0x0 (None)"))
    _, out = run_module(sglang_diagnose.main, kernel_log=str(kernel))
    assert [(one["signature"], one["role"]) for one in out["findings"]] == [("xid.154_over", "warning")]


def test_nothing_is_said_to_be_nothing(run_module: Any) -> None:
    code, out = run_module(sglang_diagnose.main, text="[x] The server is fired up and ready to roll!\n")
    assert (code, out["first_cause"], out["findings"]) == (0, None, [])


ACTIVE = "[x TP0] FlashInfer workspace initialized for rank 0, world_size 2, backend trtllm\n"
DISABLED = "[x TP1] FlashInfer allreduce fusion disabled globally because workspace initialization failed\n"


@pytest.mark.parametrize(
    ("log", "state", "line"),
    [
        (ACTIVE, "active", ACTIVE),
        (ACTIVE + DISABLED, "inactive", DISABLED),
        ("[x] ready to roll!\n", "unsaid", ""),
    ],
)
def test_what_the_log_says_of_fusion(run_module: Any, log: str, state: str, line: str) -> None:
    _, out = run_module(sglang_diagnose.main, text=log)
    assert (out["fusion"]["state"], out["fusion"]["line"] or "") == (state, line.strip())
    assert out["first_cause"] is None
    assert ("warnings" in out["msg"]) == (state == "inactive")


def test_only_this_starts_journal_is_read(
    run_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal holds an earlier start with fusion; the present one skipped it."""
    stand_ins = {
        "systemctl": "echo LoadState=loaded; echo ActiveState=active; echo InvocationID=0a0b",
        "journalctl": f"""case "$*" in
          *_SYSTEMD_INVOCATION_ID=0a0b*) printf '%s' '{DISABLED}';;
          *) printf '%s' '{ACTIVE}{DISABLED}';;
        esac""",
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _, out = run_module(sglang_diagnose.main, unit="sglang-main.service", this_start=True)
    assert [one["signature"] for one in out["findings"]] == ["fusion.disabled"]
    _, out = run_module(sglang_diagnose.main, unit="sglang-main.service")
    assert [one["signature"] for one in out["findings"]] == ["fusion.disabled", "fusion.active"]


def test_of_a_unit_without_a_start_no_journal_is_read(
    run_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"systemctl": "echo LoadState=loaded", "journalctl": f"printf '%s' '{ACTIVE}'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _, out = run_module(sglang_diagnose.main, unit="sglang-main.service", this_start=True)
    assert (out["fusion"]["state"], out["findings"], out["starts"]) == ("unsaid", [], 0)
    assert "no start of sglang-main.service" in out["msg"]


def test_a_journal_that_hangs_is_told(
    run_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "journalctl").write_text(f"#!/bin/sh\nprintf '%s' '{ACTIVE}'\nexec sleep 60\n")
    (tmp_path / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(unit_log, "SILENT_SECONDS", 1)
    code, out = run_module(sglang_diagnose.main, unit="sglang-main.service")
    assert code == 1
    assert "timed out after 1 seconds" in out["msg"]


def test_nvidia_smi_is_asked(run_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, out = run_module(sglang_diagnose.main, nvidia_smi=True)
    assert code == 0
    assert out["first_cause"]["signature"] == "driver.mismatch"


def test_a_log_that_is_not_there_fails(run_module: Any, tmp_path: Path) -> None:
    code, out = run_module(sglang_diagnose.main, path=str(tmp_path / "none"))
    assert code == 1
    assert "none" in out["msg"]


def test_two_sources_of_the_same_kind_are_refused(run_module: Any) -> None:
    assert run_module(sglang_diagnose.main, text="a", unit="b")[0] == 1
    assert run_module(sglang_diagnose.main)[0] == 1
