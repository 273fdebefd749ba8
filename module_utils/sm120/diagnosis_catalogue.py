"""What the lines of a failing server mean, and what to do next."""

from __future__ import annotations

import re

from .diagnosis import CAUSE, CONSEQUENCE, WARNING, Signature

SERVER: tuple[Signature, ...] = (
    Signature(
        name="jit.architecture_refused",
        role=CAUSE,
        layer="layer 3",
        needle=b"No supported CUDA architectures found for major versions",
        meaning="FlashInfer refuses to compile the kernel for this GPU: its gate in flashinfer/jit/comm.py "
        "(supported_major_versions) is closed, while SGLang's gates above it are open.",
        advice="Open all gates or none: playbooks/gates.yml, or --tags revert. "
        "playbooks/audit.yml shows each gate.",
    ),
    Signature(
        name="process.sigquit",
        role=CONSEQUENCE,
        layer="process",
        needle=b"igquit from a child process",
        meaning="The parent stops because a child process failed. It is the symptom, not the cause.",
        advice="Look at the first exception above it.",
        fatal=True,
    ),
    Signature(
        name="process.sigquit",
        role=CONSEQUENCE,
        layer="process",
        needle=b"SIGQUIT received",
        meaning="The parent stops because a child process failed. It is the symptom, not the cause.",
        advice="Look at the first exception above it.",
        fatal=True,
    ),
    Signature(
        name="process.child_crashed",
        role=CONSEQUENCE,
        layer="process",
        needle=b"crashed with exit code",
        # -15 is what a stop of the whole group leaves behind.
        pattern=re.compile(rb"Subprocess \S+ \(pid=\d+\) crashed with exit code (?!-15\b)"),
        meaning="A child process ended. With exit code -9 something killed it, often the kernel for want "
        "of memory.",
        advice="Look at the first exception above it, and for -9 in the kernel log for oom-kill.",
        fatal=True,
    ),
    Signature(
        name="process.rank_died",
        role=CONSEQUENCE,
        layer="process",
        needle=b"scheduler died during initialization",
        meaning="A rank ended while starting.",
        advice="Look at the first exception above it.",
        fatal=True,
    ),
    Signature(
        name="network.port_in_use",
        role=CAUSE,
        layer="network",
        needle=b"rror",
        pattern=re.compile(rb"(?i)\[Errno 98\]|address already in use"),
        meaning="Another process listens on the port that the server wants.",
        advice="ss -ltnp shows who. Stop it, or choose another sglang_server_port.",
        fatal=True,
    ),
    Signature(
        name="process.warmup_failed",
        role=CONSEQUENCE,
        layer="process",
        needle=b"Initialization failed",
        meaning="The server's own first request failed.",
        advice="Look at the first exception above it.",
        fatal=True,
    ),
    Signature(
        name="process.watchdog",
        role=CAUSE,
        layer="hang",
        needle=b"atchdog timeout",
        meaning="A forward pass did not end within the watchdog's time: a collective that never ends, "
        "or a compile that takes longer.",
        advice="If a JIT compile was running, raise watchdog_timeout for the first start. Otherwise take "
        "py-spy dumps of the schedulers, and try with the fusion off.",
        fatal=True,
    ),
    Signature(
        name="fusion.disabled",
        role=WARNING,
        layer="layer 2",
        needle=b"usion",
        pattern=re.compile(
            rb"(?i)(?:skipping|disabl\w+) .*allreduce fusion|allreduce fusion .*(?:skipped|disabled)"
        ),
        meaning="All-reduce fusion was asked for and is not active.",
        advice="playbooks/audit.yml shows which gate is closed.",
    ),
)

KERNEL: tuple[Signature, ...] = ()
