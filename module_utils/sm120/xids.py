"""NVIDIA's Xid events: what each means and what to do, for the diagnosis of logs and for the findings about GPUs.

Actions are the "Resolution Bucket (Immediate Action)" of NVIDIA's catalogue for Ampere and later
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, as of 2025-10-29); the bucket stands beside each.
Where a card's own story says more, its address stands there too.
"""

from __future__ import annotations

from dataclasses import dataclass

CATALOGUE_URL = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"

# A program's doing; the hardware's, but of one program alone; the hardware's or the driver's; nothing to do at once;
# what another Xid led to; what the card needs after another.
APPLICATION = "application"
CONTAINED = "contained"
HARDWARE = "hardware"
NOTICE = "notice"
AFTERMATH = "aftermath"
RECOVERY = "recovery"


@dataclass(frozen=True)
class Xid:
    kind: str
    meaning: str
    advice: str


_RESTART = "Restart the server."
_RESET = "Stop the server, then nvidia-smi --gpu-reset -i N; in a VM reboot the VM."
_SUPPORT = "If it comes back: NVIDIA's support, with nvidia-bug-report.sh."

XIDS: dict[int, Xid] = {
    # RESTART_APP
    8: Xid(
        APPLICATION,
        "A kernel ran too long or the GPU stopped processing.",
        f"{_RESTART} {_SUPPORT}",
    ),
    # RESTART_APP, then its own workflow: mostly the application, else the GPU's diagnostics
    13: Xid(
        APPLICATION,
        "A kernel went out of bounds or met an illegal instruction. Usually software.",
        f"{_RESTART} If it repeats: switch the fusion off, purge the JIT cache, another FP4 backend; on one card "
        "only: dcgmi diag.",
    ),
    # RESTART_APP, then its own workflow
    31: Xid(
        APPLICATION,
        "A kernel touched memory that is not mapped. Usually software, at times P2P.",
        f"{_RESTART} If it repeats: switch the fusion off, purge the JIT cache, check P2P.",
    ),
    # RESTART_APP, CHECK_APP/CUDA
    32: Xid(
        APPLICATION,
        "The GPU met a corrupt command; program, driver or PCIe.",
        f"{_RESTART} If it repeats check PCIe errors.",
    ),
    # IGNORE, CONTACT_SUPPORT
    38: Xid(NOTICE, "The driver's firmware reported an error.", f"Nothing at once. {_SUPPORT}"),
    # IGNORE: the GPU itself is well
    43: Xid(
        AFTERMATH,
        "The GPU ended this program's work after a fault of the program; the card itself is well.",
        "Nothing for the card. Look for the Xid or the exception before it, and restart the server if it died.",
    ),
    # its own workflow: follow the other Xid
    45: Xid(
        AFTERMATH,
        "The driver cleaned up after a program that died.",
        "Nothing for the card. Look for the Xid or the exception before it.",
    ),
    # its own workflow: what to do depends on the Xid beside it
    48: Xid(
        HARDWARE,
        "An uncorrectable memory error (double bit).",
        f"With Xid 94 beside it, restarting the server is enough; with 95, 63 or 64 or alone: {_RESET} {_SUPPORT}",
    ),
    # unused since Ampere: CONTACT_SUPPORT
    61: Xid(
        HARDWARE,
        "The GPU's internal controller stopped at a breakpoint; NVIDIA lists it as unused for cards like these.",
        f"{_RESET} {_SUPPORT}",
    ),
    # RESET_GPU; https://forums.developer.nvidia.com/t/364958 for the power cycle
    62: Xid(
        HARDWARE,
        "The GPU's internal controller halted. On RTX PRO 6000 seen together with 120 and 154.",
        f"{_RESET} When that does not help, as reported of RTX PRO 6000: power the host off and on, and update "
        f"the driver. {_SUPPORT}",
    ),
    # IGNORE
    63: Xid(
        NOTICE,
        "A memory row was marked for remapping.",
        "Nothing at once; the remap takes effect at the next reset of the GPU. nvidia-smi -q -d ROW_REMAPPER.",
    ),
    # RESET_GPU
    64: Xid(
        HARDWARE,
        "A memory row could not be remapped.",
        f"{_RESET} nvidia-smi -q -d ROW_REMAPPER tells more. {_SUPPORT}",
    ),
    # RESTART_APP, CHECK_APP/CUDA
    69: Xid(APPLICATION, "A kernel met an engine class error.", _RESTART),
    # its own workflow
    74: Xid(
        HARDWARE,
        "An NVLink error. RTX PRO 6000 has no NVLink.",
        f"Stop the server and reset the GPUs of the link. If it comes back, check the bridge or switch. {_SUPPORT}",
    ),
    # RESTART_BM: the machine itself
    79: Xid(
        HARDWARE,
        "The GPU has fallen off the bus: power, heat, riser, link, or the host's reset.",
        "Restart the host; in a VM that is the host below it, not the VM alone. Check power, riser, slot and cooling. "
        f"{_SUPPORT}",
    ),
    # IGNORE, CONTACT_SUPPORT
    92: Xid(NOTICE, "Many correctable memory errors.", f"Watch it; nvidia-smi -q -d ECC. {_SUPPORT}"),
    # RESTART_APP
    94: Xid(
        CONTAINED,
        "A memory error, contained to one program: the others are well.",
        f"{_RESTART} Reset the GPU when convenient; its memory row is remapped then.",
    ),
    # RESET_GPU
    95: Xid(
        HARDWARE,
        "A memory error that was not contained: every program on the card is in doubt.",
        f"{_RESET} {_SUPPORT}",
    ),
    # RESET_GPU, CONTACT_SUPPORT
    109: Xid(HARDWARE, "The GPU did not switch between programs in time.", f"{_RESET} {_SUPPORT}"),
    # RESET_GPU, INVESTIGATE_SW
    119: Xid(
        HARDWARE,
        "The GPU's system processor (GSP) did not answer.",
        f"{_RESET} If it comes back, update the driver; when the reset fails, power the host off and on.",
    ),
    # RESET_GPU, INVESTIGATE_SW
    120: Xid(
        HARDWARE,
        "The GPU's system processor (GSP) failed.",
        f"{_RESET} If it comes back, update the driver; when the reset fails, power the host off and on.",
    ),
    # RESET_GPU
    140: Xid(HARDWARE, "An ECC error that was not recovered.", f"{_RESET} {_SUPPORT}"),
    # RESET_GPU
    143: Xid(HARDWARE, "The card failed to initialise.", f"{_RESET} {_SUPPORT}"),
    # informational: says what another Xid needs
    154: Xid(
        RECOVERY,
        "The driver says what the GPU needs after another Xid; the line names it.",
        "Do what the line says before anything runs on it again: GPU Reset, Node Reboot, Drain. On RTX PRO 6000 a "
        "power cycle was needed (https://forums.developer.nvidia.com/t/364958).",
    ),
}
