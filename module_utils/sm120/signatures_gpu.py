"""What the kernel and nvidia-smi say about GPUs, PCIe and memory. Xid actions follow NVIDIA's Xid catalogue
(https://docs.nvidia.com/deploy/xid-errors/)."""

from __future__ import annotations

import re

from .signature import CAUSE, CONSEQUENCE, WARNING, Signature

TOPIC = "GPU, driver, PCIe"

_RESTART = "Restart the server."
_RESET = (
    "Stop the server, then nvidia-smi --gpu-reset -i N; in a VM reboot the VM. "
    "If it comes back, replace the card."
)
_REBOOT = (
    "Reboot; in a VM power the VM off and on, and when that fails the host. Check power, riser and cooling."
)

# Number: role, what it means, what to do.
XIDS: dict[int, tuple[str, str, str]] = {
    8: (CAUSE, "A kernel ran too long or the GPU stopped processing.", _RESTART),
    13: (
        CAUSE,
        "A kernel went out of bounds or met an illegal instruction. Usually software.",
        f"{_RESTART} If it repeats: switch the fusion off, purge the JIT cache, another FP4 backend.",
    ),
    31: (
        CAUSE,
        "A kernel touched memory that is not mapped. Usually software, at times P2P.",
        f"{_RESTART} If it repeats: switch the fusion off, purge the JIT cache, check P2P.",
    ),
    32: (
        CAUSE,
        "The GPU met a corrupt command; driver or PCIe.",
        f"{_RESTART} If it repeats check PCIe errors.",
    ),
    38: (CAUSE, "The driver's firmware failed.", _RESET),
    43: (
        CONSEQUENCE,
        "The GPU ended this program's work after a fault of the program.",
        f"{_RESTART} Look for the Xid or the exception before it.",
    ),
    45: (CONSEQUENCE, "The driver cleaned up after a program that died.", "Look for the Xid before it."),
    48: (CAUSE, "An uncorrectable memory error (double bit).", _RESET),
    61: (CAUSE, "The GPU's internal controller stopped with a warning.", _RESET),
    62: (
        CAUSE,
        "The GPU's internal controller halted. On RTX PRO 6000 seen together with 120 and 154.",
        "Power the host off and on: a reset is not always enough. Then update the driver.",
    ),
    63: (
        WARNING,
        "A memory row was marked for remapping.",
        "Nothing at once; the remap takes effect at the next reset of the GPU. nvidia-smi -q -d "
        "ROW_REMAPPER.",
    ),
    64: (CAUSE, "A memory row could not be remapped.", f"{_RESET} nvidia-smi -q -d ROW_REMAPPER tells."),
    69: (CAUSE, "A kernel met an engine class error.", _RESTART),
    74: (
        CAUSE,
        "An NVLink error. RTX PRO 6000 has no NVLink.",
        "Check the bridge or switch, then reset the GPUs.",
    ),
    79: (
        CAUSE,
        "The GPU has fallen off the bus: power, heat, riser, link, or the host's reset.",
        _REBOOT,
    ),
    92: (WARNING, "Many correctable memory errors.", "Watch it; nvidia-smi -q -d ECC."),
    94: (CAUSE, "A memory error, contained to one program.", f"{_RESTART} Reset the GPU when convenient."),
    95: (CAUSE, "A memory error that was not contained.", _RESET),
    119: (CAUSE, "The GPU's system processor (GSP) did not answer.", f"{_RESET} Then update the driver."),
    120: (CAUSE, "The GPU's system processor (GSP) failed.", f"{_RESET} Then update the driver."),
    140: (CAUSE, "An ECC error that was not recovered.", _RESET),
    154: (
        CAUSE,
        "The driver says what the GPU needs before it works again; the line names it.",
        "Do what the line says (reset, reboot, drain). Do not retry before: on RTX PRO 6000 a power "
        "cycle was needed.",
    ),
}


def _xid(number: int, role: str, meaning: str, advice: str) -> Signature:
    return Signature(
        name=f"xid.{number}",
        role=role,
        layer="gpu",
        needle=b"Xid",
        pattern=re.compile(rb"Xid \([^)]*\): %d\b" % number),
        meaning=f"Xid {number}. {meaning}",
        advice=advice,
        fatal=role == CAUSE,
    )


DRIVER: tuple[Signature, ...] = (
    Signature(
        name="driver.mismatch",
        role=CAUSE,
        layer="driver",
        needle=b"ersion mismatch",
        pattern=re.compile(rb"Driver/library version mismatch"),
        meaning="The driver's libraries were upgraded under the loaded kernel module.",
        advice="Reboot, or unload and load the module with the GPUs idle. Hold the packages (role "
        "nvidia_driver).",
    ),
    Signature(
        name="driver.mismatch",
        role=CAUSE,
        layer="driver",
        needle=b"NVRM: API mismatch",
        meaning="The driver's libraries were upgraded under the loaded kernel module.",
        advice="Reboot, or unload and load the module with the GPUs idle. Hold the packages (role "
        "nvidia_driver).",
    ),
    Signature(
        name="driver.too_old",
        role=CAUSE,
        layer="driver",
        needle=b"driver version is insufficient",
        meaning="The driver is older than the CUDA runtime wants.",
        advice="Update the driver (role nvidia_driver).",
    ),
    Signature(
        name="driver.not_running",
        role=CAUSE,
        layer="driver",
        needle=b"ailed",
        pattern=re.compile(rb"NVIDIA-SMI has failed|couldn't communicate with the NVIDIA driver"),
        meaning="The driver is not loaded.",
        advice="modprobe nvidia; dkms status; with Secure Boot the module must be signed.",
    ),
    Signature(
        name="driver.no_gpu",
        role=CAUSE,
        layer="driver",
        needle=b"rror",
        pattern=re.compile(
            rb"No CUDA GPUs are available|no CUDA-capable device|CUDA unknown error|Found no NVIDIA driver|"
            rb"system not yet initialized|cudaErrorNoDevice|invalid device ordinal"
        ),
        meaning="The service sees no GPU, or fewer than it wants.",
        advice="nvidia-smi -L as the service user; CUDA_VISIBLE_DEVICES; PrivateDevices must not be "
        "set in the unit.",
    ),
)

KERNEL: tuple[Signature, ...] = (
    *(_xid(number, *entry) for number, entry in XIDS.items()),
    Signature(
        name="xid.other",
        role=WARNING,
        layer="gpu",
        needle=b"Xid",
        pattern=re.compile(rb"Xid \([^)]*\): \d+"),
        meaning="A GPU error that this catalogue does not list.",
        advice="Look its number up in NVIDIA's Xid catalogue.",
    ),
    Signature(
        name="driver.init_failed",
        role=CAUSE,
        layer="driver",
        needle=b"RmInitAdapter failed",
        meaning="The driver could not start the card. Blackwell works only with the open kernel modules.",
        advice="modinfo -F license nvidia must say Dual MIT/GPL; install the -open flavour (role "
        "nvidia_driver).",
        fatal=True,
    ),
    Signature(
        name="driver.needs_open_modules",
        role=CAUSE,
        layer="driver",
        needle=b"requires use of the NVIDIA open kernel modules",
        meaning="The proprietary kernel module does not support this card.",
        advice="Install the -open flavour of the same driver (role nvidia_driver).",
        fatal=True,
    ),
    Signature(
        name="gpu.fallen_off",
        role=CAUSE,
        layer="gpu",
        needle=b"has fallen off the bus",
        meaning="The GPU is gone from PCIe.",
        advice=_REBOOT,
        fatal=True,
    ),
    Signature(
        name="pcie.bar",
        role=CAUSE,
        layer="pcie",
        needle=b"BAR",
        pattern=re.compile(
            rb"(?i)BAR\d? is 0M|BAR \d+.*(?:can't assign|no space|failed to assign)|PCI I/O region.*invalid"
        ),
        meaning="A card's memory window was not mapped: the VM's address space is too small.",
        advice="cpu host with host-phys-bits, and a larger MMIO window for OVMF (role pve_gpu_vm).",
        fatal=True,
    ),
    Signature(
        name="pcie.error",
        role=WARNING,
        layer="pcie",
        needle=b"AER:",
        pattern=re.compile(rb"AER:.*(?:Uncorrect|Fatal)|AER:.*Multiple Corrected"),
        meaning="PCIe errors on a link.",
        advice="Riser, slot, seating; as a test force a lower PCIe generation.",
    ),
    Signature(
        name="pcie.link_down",
        role=CAUSE,
        layer="pcie",
        needle=b"Link Down",
        meaning="A PCIe link went down.",
        advice="Riser and power; on the host pcie_aspm=off and pcie_port_pm=off.",
        fatal=True,
    ),
    Signature(
        name="pcie.reset",
        role=CAUSE,
        layer="pcie",
        needle=b"not ready",
        pattern=re.compile(rb"not ready \d+ms after (?:FLR|bus reset)"),
        meaning="The card did not come back from a reset between two VM starts.",
        advice="Power the host off and on; on the host options vfio_pci disable_idle_d3=1.",
        fatal=True,
    ),
    Signature(
        name="iommu.fault",
        role=CAUSE,
        layer="pcie",
        needle=b"",
        pattern=re.compile(rb"(?i)IO_PAGE_FAULT|DMAR:.*fault addr|IOMMU_IOAS_MAP"),
        meaning="The IOMMU stopped a card's access: P2P between cards that may not, or a bad mapping.",
        advice="nvidia-smi topo -p2p r; GPUDirect cliques in the VM, ACS on the host.",
    ),
    Signature(
        name="memory.host_oom",
        role=CAUSE,
        layer="host",
        needle=b"illed process",
        pattern=re.compile(rb"(?:Out of memory|Memory cgroup out of memory)"),
        meaning="The kernel killed a process for want of host memory.",
        advice="More memory for the VM, fewer loader threads, or a higher MemoryMax of the unit.",
        fatal=True,
    ),
    Signature(
        name="kernel_log.segfault",
        role=WARNING,
        layer="process",
        needle=b"segfault at",
        pattern=re.compile(rb"(?:python|sglang|pt_main)\S*\[\d+\]: segfault"),
        meaning="A process of the server crashed in compiled code.",
        advice="The line names the library.",
    ),
)

SIGNATURES = DRIVER
