"""Processes, ports, permissions, systemd."""

from __future__ import annotations

import re

from .signature import CAUSE, CONSEQUENCE, WARNING, Signature

TOPIC = "The process ends, or does not start"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        name="process.sigquit",
        role=CONSEQUENCE,
        layer="process",
        needle=b"IGQUIT received",
        meaning="The parent stops because a child process failed. It is the symptom, not the cause.",
        advice="Look at the first exception above it.",
        fatal=True,
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
        name="process.child_killed",
        role=CAUSE,
        layer="process",
        needle=b"crashed with exit code -9",
        meaning="Something killed a child process: the kernel for want of memory, or a person.",
        advice="Look in the kernel log for oom-kill (module sglang_diagnose with kernel_log: journal).",
        fatal=True,
    ),
    Signature(
        name="process.child_crashed",
        role=CONSEQUENCE,
        layer="process",
        needle=b"crashed with exit code",
        # -15 is what a stop of the whole group leaves behind.
        pattern=re.compile(rb"crashed with exit code (?!-15\b)"),
        meaning="A child process ended by itself.",
        advice="Look at the first exception above it.",
        fatal=True,
    ),
    Signature(
        name="process.rank_died",
        role=CONSEQUENCE,
        layer="process",
        needle=b"scheduler died during initialization",
        meaning="A rank ended while starting.",
        advice="Look at the first exception above it; exit code -9 is the kernel's for want of memory.",
        fatal=True,
    ),
    Signature(
        name="process.initialization_failed",
        role=CONSEQUENCE,
        layer="process",
        needle=b"Initialization failed.",
        meaning="The server gave up starting; with 'warmup error' its own first request failed.",
        advice="Look at the first exception above it.",
        fatal=True,
    ),
    Signature(
        name="process.rank_gave_up",
        role=CONSEQUENCE,
        layer="process",
        needle=b"rror",
        pattern=re.compile(
            rb"^EOFError$|ConnectionResetError: .*Connection reset by peer|^BrokenPipeError"
            rb"|Connection closed by peer \["
        ),
        meaning="Another process of the server is gone.",
        advice="Look for the rank that failed first.",
    ),
    Signature(
        name="process.segfault",
        role=CAUSE,
        layer="process",
        needle=b"rror",
        pattern=re.compile(rb"Fatal Python error: (?!none)\w+"),
        meaning="A compiled part crashed the process.",
        advice="The stack below the line names the extension; check its version against the release set.",
        fatal=True,
    ),
    Signature(
        name="network.port_in_use",
        role=CAUSE,
        layer="network",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)\[Errno 98\]|EADDRINUSE|address already in use|port \d+ .*(?:in use|not available)"
        ),
        meaning="Another process listens on the port that the server wants.",
        advice="ss -ltnp shows who. Stop it, or choose another sglang_server_port.",
        fatal=True,
    ),
    Signature(
        name="network.address",
        role=CAUSE,
        layer="network",
        needle=b"rror",
        pattern=re.compile(rb"\[Errno 99\]|[Cc]annot assign requested address"),
        meaning="The address to bind to is not one of this host's.",
        advice="Set sglang_server_host to 127.0.0.1 or an address that ip addr shows.",
        fatal=True,
    ),
    Signature(
        name="host.permission",
        role=CAUSE,
        layer="host",
        needle=b"rror",
        pattern=re.compile(rb"PermissionError|\[Errno 13\]"),
        meaning="The service user may not read or write a file.",
        advice="The line names it; namei -l PATH shows where the way is closed.",
    ),
    Signature(
        name="host.read_only",
        role=CAUSE,
        layer="host",
        needle=b"rror",
        pattern=re.compile(rb"\[Errno 30\]|Read-only file system"),
        meaning="The unit's hardening (ProtectSystem, ProtectHome) closes the folder.",
        advice="Add it to the unit's ReadWritePaths.",
    ),
    Signature(
        name="host.too_many_files",
        role=CAUSE,
        layer="host",
        needle=b"rror",
        pattern=re.compile(rb"\[Errno 24\]|Too many open files"),
        meaning="The server ran out of file descriptors: one per connection.",
        advice="LimitNOFILE=1048576 in the unit.",
    ),
    Signature(
        name="host.threads",
        role=CAUSE,
        layer="host",
        needle=b"hread",
        pattern=re.compile(
            rb"can't start new thread|hread.*Resource temporarily unavailable"
            rb"|Resource temporarily unavailable.*thread"
        ),
        meaning="The unit may not make more threads.",
        advice="Raise TasksMax and LimitNPROC of the unit.",
    ),
    Signature(
        name="systemd.start_limit",
        role=CONSEQUENCE,
        layer="process",
        needle=b"ailed with result 'start-limit-hit'",
        meaning="systemd stopped trying to start the unit.",
        advice="Cure the first cause, then systemctl reset-failed UNIT.",
    ),
    Signature(
        name="systemd.exec",
        role=CAUSE,
        layer="process",
        needle=b"",
        pattern=re.compile(
            rb"Failed at step (?:EXEC|CHDIR|USER|GROUP|NAMESPACE|EXEC_START)|status=2(?:0[0-9]|1[0-9]|26)/"
        ),
        meaning="systemd could not even start the program: a path, the user or the sandbox.",
        advice="systemctl status UNIT names the step; the venv's python must be readable for the "
        "service user.",
        fatal=True,
    ),
    Signature(
        name="systemd.killed",
        role=CONSEQUENCE,
        layer="process",
        needle=b"ailed with result 'signal'",
        meaning="The main process was killed by a signal. SGLang kills itself when a child has "
        "failed; without an "
        "exception above it the kernel did it for want of memory, or a person.",
        advice="Look at the first exception above it, then for oom-kill in the kernel log.",
        fatal=True,
    ),
    Signature(
        name="systemd.failed",
        role=CONSEQUENCE,
        layer="process",
        needle=b"ailed with result '",
        meaning="systemd saw the unit's main process end.",
        advice="Look at the first exception above it.",
        fatal=True,
    ),
    Signature(
        name="process.forced_exit",
        role=WARNING,
        layer="process",
        needle=b"Signal SIGTERM received while health check failed",
        meaning="The server was told to stop and did so at once, because its scheduler did not answer.",
        advice="Look for why the scheduler did not answer.",
    ),
)
