"""What the kernel and nvidia-smi say about GPUs, PCIe and memory."""

from __future__ import annotations

import re

from .signature import CAUSE, CONSEQUENCE, WARNING, Signature
from .xids import AFTERMATH, NOTICE, RECOVERY, XIDS, Xid

TOPIC = "GPU, driver, PCIe"

_BAR_MEANING = "A card's memory window was not mapped: the VM's address space is too small."
_BAR_ADVICE = "cpu host with host-phys-bits, and a larger MMIO window for OVMF (role pve_gpu_vm)."


def _xid(number: int, xid: Xid) -> Signature:
    role = {AFTERMATH: CONSEQUENCE, RECOVERY: CONSEQUENCE, NOTICE: WARNING}.get(xid.kind, CAUSE)
    return Signature(
        name=f"xid.{number}",
        role=role,
        layer="gpu",
        needle=b"Xid",
        pattern=re.compile(rb"Xid \([^)]*\): %d\b" % number),
        meaning=f"Xid {number}. {xid.meaning}",
        advice=xid.advice,
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
        needle=b"NVIDIA-SMI has failed",
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
    Signature(
        name="xid.154_over",
        role=WARNING,
        layer="gpu",
        needle=b"Xid",
        pattern=re.compile(rb"Xid \([^)]*\): 154\b.* to 0x0 \(None\)"),
        meaning="Xid 154. The GPU needs no recovery action any more.",
        advice="Nothing for this line; look for the Xid before it.",
    ),
    *(_xid(number, xid) for number, xid in XIDS.items()),
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
        advice=XIDS[79].advice,
        fatal=True,
    ),
    Signature(
        name="pcie.bar",
        role=CAUSE,
        layer="pcie",
        needle=b"BAR",
        pattern=re.compile(rb"(?i)BAR\d? is 0M|BAR \d+.*(?:can't assign|no space|failed to assign)"),
        meaning=_BAR_MEANING,
        advice=_BAR_ADVICE,
        fatal=True,
    ),
    Signature(
        name="pcie.bar",
        role=CAUSE,
        layer="pcie",
        needle=b"This PCI I/O region assigned to your NVIDIA device is invalid",
        meaning=_BAR_MEANING,
        advice=_BAR_ADVICE,
        fatal=True,
    ),
    Signature(
        name="pcie.error",
        role=WARNING,
        layer="pcie",
        needle=b"AER:",
        pattern=re.compile(rb"AER:.*(?:Uncorrect|Fatal)|AER:.*Multiple Correct"),
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
