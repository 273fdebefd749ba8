"""The search for the first cause: roles, starts, tracebacks, splits, secrets."""

from __future__ import annotations

import random
import re

import pytest
from ansible.module_utils.sm120.diagnosis import Scanner
from ansible.module_utils.sm120.diagnosis_catalogue import KERNEL, SERVER, kernel_scanner, server_scanner
from ansible.module_utils.sm120.signature import CAUSE, CONSEQUENCE, NOTE, WARNING, Signature
from log_lines import HARMLESS, KERNEL_LINES, SERVER_LINES
from story import STORY

pytestmark = pytest.mark.once


def scan(text: str, *, pieces: int = 1) -> Scanner:
    scanner = server_scanner()
    data = text.encode()
    rng = random.Random(len(data) + pieces)  # noqa: S311 - reproducible cuts
    cuts = sorted(rng.randrange(len(data)) for _ in range(pieces - 1))
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        scanner.feed(data[begin:end])
    scanner.close()
    return scanner


@pytest.mark.parametrize("pieces", [1, 2, 7, 50, 400])
def test_the_story_names_layer_three_and_the_sigquit_as_its_consequence(pieces: int) -> None:
    scanner = scan(STORY, pieces=pieces)
    cause = scanner.first_cause
    assert cause is not None
    assert (cause.signature, cause.layer) == ("gate.jit_closed", "layer 3")
    assert cause.line_number == 11
    assert cause.frame == "/v/flashinfer/compilation_context.py:62 in get_nvcc_flags_list"
    quit_line = scanner.findings["process.sigquit"]
    assert quit_line.role == CONSEQUENCE
    assert (quit_line.count, quit_line.line_number, quit_line.last_line_number) == (2, 13, 14)
    assert scanner.fatal is quit_line
    assert len(scanner.findings) == 2


@pytest.mark.parametrize("pieces", [1, 3, 60])
def test_the_story_between_a_days_lines_keeps_its_line_numbers(pieces: int) -> None:
    day = (
        "[2026-03-01 10:00:00 TP0] Decode batch, #running-req: 512, #token: 123456, token usage: 0.41, \n"
        '[2026-03-01 10:00:00] INFO:     127.0.0.1:50814 - "POST /generate HTTP/1.1" 200 OK\n'
        '[2026-03-01 10:00:02] INFO:     127.0.0.1:5 - "POST /generate HTTP/1.1" 500 Internal Server Error\n'
    ) * 20
    # Written into the middle of a traceback by another process, as it happens.
    story = STORY.replace(
        "    scheduler = Scheduler(\n", day[: day.index("\n") + 1] + "    scheduler = Scheduler(\n"
    )
    scanner = scan(day + story + day, pieces=pieces)
    cause = scanner.first_cause
    assert cause is not None
    assert (cause.signature, cause.line_number) == ("gate.jit_closed", 60 + 12)
    assert cause.frame == "/v/flashinfer/compilation_context.py:62 in get_nvcc_flags_list"
    assert scanner.findings["process.sigquit"].last_line_number == 60 + 15
    assert len(scanner.findings) == 2


def test_an_unknown_traceback_is_unknown_with_its_last_frame() -> None:
    text = STORY.replace("RuntimeError: No supported CUDA architectures found", "zorp.ZorpError: zorp")
    cause = scan(text).first_cause
    assert cause is not None
    assert cause.layer == "unknown"
    assert cause.signature == "unknown:zorp.ZorpError"
    assert cause.frame is not None
    assert cause.frame.endswith("compilation_context.py:62 in get_nvcc_flags_list")


def test_a_clients_end_and_harmless_words_are_nothing() -> None:
    text = """\
[x] server_args=ServerArgs(log_level_http=None, crash_dump_folder=None)
[x] Ignore import error when loading sglang.srt.models.foo: No module named 'decord'
[x] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK error_count=0
[x] Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit
[x] Handling: Traceback (most recent call last):
  File "/v/uvicorn/x.py", line 1, in run
    go()
asyncio.exceptions.CancelledError: Task cancelled
[x] The server is fired up and ready to roll!
"""
    scanner = scan(text)
    assert scanner.first_cause is None
    assert scanner.findings == {}
    assert scanner.ready
    assert scanner.fatal is None


def test_a_later_start_leaves_the_old_crash_behind() -> None:
    again = "[x] server_args=ServerArgs(model_path='/m')\n[x] The server is fired up and ready to roll!\n"
    scanner = scan(STORY + again)
    assert scanner.first_cause is None
    assert scanner.fatal is None
    assert scanner.starts == 2
    assert "gate.jit_closed" in scanner.findings


def test_systemd_and_the_program_announce_one_start() -> None:
    scanner = scan(
        "Started sglang-main.service - SGLang.\n" + STORY + "x.service: Failed with result 'signal'.\n"
    )
    assert scanner.starts == 1
    assert scanner.first_cause is not None
    # A later run that was killed without a word is not explained by an older crash.
    killed = scan(STORY + "Started sglang-main.service.\nx.service: Failed with result 'signal'.\n")
    assert killed.starts == 2
    assert killed.first_cause is None
    assert killed.fatal is not None
    assert killed.fatal.signature == "systemd.killed"


def test_a_restart_under_way_still_tells_why_the_last_one_died() -> None:
    cause = scan(STORY + "[x] server_args=ServerArgs(model_path='/m')\n").first_cause
    assert cause is not None
    assert cause.signature == "gate.jit_closed"


def test_a_stop_is_no_crash() -> None:
    stopped = (
        "[x] Subprocess scheduler_0 (pid=12) crashed with exit code -15. Triggering SIGQUIT for cleanup\n"
    )
    killed = stopped.replace("-15", "-9")
    assert scan(stopped).fatal is None
    assert scan(killed).fatal is not None


def test_keys_do_not_pass() -> None:
    text = "[x] ERROR:    [Errno 98] error while attempting to bind, api_key='s3cret-key' in use\n"
    finding = scan(text).findings["network.port_in_use"]
    assert finding.role == CAUSE
    assert "s3cret-key" not in finding.line


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    scanner = server_scanner()
    for _ in range(64):
        scanner.feed(b"x" * 1_000_000)
    assert len(scanner._tail) < 2_000_000
    scanner.feed(b"\n" + STORY.encode())
    scanner.close()
    assert scanner.first_cause is not None


def test_fusion_that_was_skipped_is_a_warning() -> None:
    text = "[x TP0] FlashInfer workspace preflight probe failed (x). Skipping allreduce fusion.\n"
    finding = scan(text).findings["fusion.preflight_failed"]
    assert finding.role == WARNING


@pytest.mark.parametrize(("name", "lines"), SERVER_LINES, ids=lambda v: v if isinstance(v, str) else "")
def test_every_known_line_is_found_by_its_signature(name: str, lines: tuple[str, ...]) -> None:
    scanner = scan("\n".join([*lines, ""]))
    assert [one for one, found in scanner.findings.items() if found.line_number == len(lines)] == [name]


@pytest.mark.parametrize(("name", "line"), KERNEL_LINES, ids=lambda v: v if "." in v[:30] else "")
def test_every_known_kernel_line_is_found_by_its_signature(name: str, line: str) -> None:
    scanner = kernel_scanner()
    scanner.feed(f"{line}\n".encode())
    assert list(scanner.findings) == [name]


def test_the_lines_cover_the_catalogue() -> None:
    shown = {name for name, _ in SERVER_LINES} | {name for name, _ in KERNEL_LINES}
    all_of_them = {one.name for one in (*SERVER, *KERNEL) if not one.name.startswith("xid.")}
    assert all_of_them - shown == set()


def alternatives(pattern: str) -> list[str]:
    """What stands between the bars of an expression that are in no group or set."""
    found, depth, inside = [""], 0, False
    for part in re.findall(r"\\.|.", pattern):
        inside = part == "[" or (inside and part != "]")
        depth += {"(": 1, ")": -1}.get("" if inside else part, 0)
        if part == "|" and not depth and not inside:
            found.append("")
        else:
            found[-1] += part
    return found


@pytest.mark.parametrize(
    "signature",
    [one for one in dict.fromkeys((*SERVER, *KERNEL)) if one.pattern and not one.name.startswith("xid.")],
    ids=lambda s: s.name,
)
def test_every_alternative_has_a_line_that_is_found(signature: Signature) -> None:
    assert signature.pattern is not None
    whole = signature.pattern.pattern.decode()
    flags = "(?i)" if signature.pattern.flags & re.IGNORECASE else ""
    shown = [*((name, lines[-1]) for name, lines in SERVER_LINES), *KERNEL_LINES]
    lines = [line for name, line in shown if name == signature.name]
    parts = alternatives(whole.removeprefix("(?i)"))
    assert [one for one in parts if not any(re.search(flags + one, line) for line in lines)] == []


@pytest.mark.parametrize("line", HARMLESS)
def test_harmless_lines_are_nothing(line: str) -> None:
    assert scan(f"{line}\n").findings == {}
    kernel = kernel_scanner()
    kernel.feed(f"{line}\n".encode())
    assert kernel.findings == {}


@pytest.mark.parametrize("signature", [*SERVER, *KERNEL], ids=lambda s: s.name)
def test_every_signature_can_be_found_and_helps(signature: Signature) -> None:
    assert len(signature.meaning) > 20
    assert len(signature.advice) > 15
    assert signature.role in (CAUSE, CONSEQUENCE, WARNING, NOTE)
    # The same name must always say the same.
    same = [one for one in (*SERVER, *KERNEL) if one.name == signature.name]
    assert len({(one.role, one.meaning, one.advice) for one in same}) == 1
