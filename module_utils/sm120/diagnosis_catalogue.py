"""All signatures, in the order in which a line is held against them: the special before the general."""

from __future__ import annotations

from collections.abc import Mapping

from . import (
    signatures_communication,
    signatures_gates,
    signatures_gpu,
    signatures_memory,
    signatures_model,
    signatures_packages,
    signatures_process,
)
from .diagnosis import Finding, Scanner
from .signature import Signature

# Title of each group in docs/troubleshooting.md.
TOPICS: tuple[tuple[str, tuple[Signature, ...]], ...] = (
    (signatures_gates.TOPIC, signatures_gates.SIGNATURES),
    (signatures_gpu.TOPIC, signatures_gpu.DRIVER + signatures_gpu.KERNEL),
    (signatures_memory.TOPIC, signatures_memory.SIGNATURES),
    (signatures_communication.TOPIC, signatures_communication.SIGNATURES),
    (signatures_packages.TOPIC, signatures_packages.SIGNATURES),
    (signatures_model.TOPIC, signatures_model.SIGNATURES),
    (signatures_process.TOPIC, signatures_process.SIGNATURES),
)

SERVER: tuple[Signature, ...] = (
    *signatures_gates.SIGNATURES,
    *signatures_gpu.DRIVER,
    *signatures_memory.SIGNATURES,
    *signatures_communication.SIGNATURES,
    *signatures_packages.SIGNATURES,
    *signatures_model.SIGNATURES,
    *signatures_process.SIGNATURES,
)

KERNEL: tuple[Signature, ...] = signatures_gpu.DRIVER + signatures_gpu.KERNEL

# Bytes that the interesting lines contain and the daily ones (batches, requests) do not. A block of log is
# searched for each of them, far faster than one expression could, and only lines with a hit are looked at.
# Every line that a signature is for must contain one of these, its needle need not: an exception's name does it, too.
SERVER_TRIGGERS = (
    b"rror",
    b"xception",
    b"Traceback",
    b"eceived",
    b"ailed",
    b"fatal",
    b"atchdog",
    b"NCCL WARN",
    b"usion",
    b"crashed",
    b"code=exited",
    b"not found",
    b"cannot find",
    b"NaN",
    b"actic",
    b"pool is full",
    b"server_args=",
    b"Started ",
    b"ready to roll",
    b"Load weight",
    b"Capture ",
    b"workspace init",
)
KERNEL_TRIGGERS = (
    b"NVRM",
    b"Xid",
    b"mismatch",
    b"ailed",
    b"rror",
    b"insufficient",
    b"BAR",
    b"AER:",
    b"Link Down",
    b"not ready",
    b"fault",
    b"FAULT",
    b"IOMMU",
    b"illed process",
)


def server_scanner(secrets: tuple[str | None, ...] = ()) -> Scanner:
    """For what SGLang and its unit log."""
    return Scanner(SERVER, SERVER_TRIGGERS, secrets=secrets)


def kernel_scanner(secrets: tuple[str | None, ...] = ()) -> Scanner:
    """For the kernel's log and what nvidia-smi says."""
    return Scanner(KERNEL, KERNEL_TRIGGERS, source="kernel", secrets=secrets)


FUSION_ON = "fusion.active"
FUSION_OFF = ("fusion.preflight_failed", "fusion.workspace_failed", "fusion.disabled")


def fusion_said(findings: Mapping[str, Finding]) -> dict[str, str | None]:
    """What a log says of all-reduce fusion. One rank without it outweighs all that have it: then no rank uses it."""
    for state, names in (("inactive", FUSION_OFF), ("active", (FUSION_ON,))):
        lines = [findings[name].line for name in names if name in findings]
        if lines:
            return {"state": state, "line": lines[0]}
    return {"state": "unsaid", "line": None}
