"""What is wrong or remarkable about a host's GPUs: wanted, found, and what to do, from the facts alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import xids

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
Finding = dict[str, str]

OPEN_MODULES = (
    "run playbooks/driver.yml: it names the packages to take away, and installs the open modules after that"
)
# Blackwell runs on the open kernel modules alone (NVIDIA's README of the open modules, "supported GPUs").
OPEN_ONLY_FROM = (10, 0)
SM120 = (12, 0)
BAR1_SMALL_MIB = 1024  # 256 MiB without a resizable BAR: peers cannot see each other's memory
SHM_MIB = 1024
FREE_SHARE = 0.9  # of a card's memory, before a server of ours runs
OPEN_FILES = 65536
XID_SEVERITY = {
    xids.HARDWARE: ERROR,
    xids.CONTAINED: WARNING,
    xids.RECOVERY: WARNING,  # what is still to be done is the card's recovery_action, an error of its own
    xids.APPLICATION: NOTE,
    xids.NOTICE: NOTE,
    xids.AFTERMATH: NOTE,
}


@dataclass(frozen=True)
class Wanted:
    """What the caller expects of the host. A zero or an empty text expects nothing."""

    gpus: int = 0
    capability: str = ""
    model_mib: int = 0
    own_units: str = r"^sglang-.*\.service$"


def finding(severity: str, subject: str, wanted: str, found: str, fix: str) -> Finding:
    return {"severity": severity, "subject": subject, "wanted": wanted, "found": found, "fix": fix}


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def _name(gpu: dict[str, Any]) -> str:
    return f"GPU {gpu['index']} ({gpu['bus_id']})"


def driver_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    driver, pci = facts["driver"], facts["pci"]
    module, library = driver["module_version"], driver["library_version"]
    if not pci and not facts["gpus"]:
        yield finding(
            ERROR,
            "pci",
            "an NVIDIA GPU on the PCI bus",
            "none",
            "pass the cards through to this machine (playbooks/provision.yml), then look at: lspci -nn -d 10de:",
        )
        return
    for device in pci:
        if device["driver"] in ("nouveau", "NovaCore", "nova_core", "vfio-pci"):
            yield finding(
                ERROR,
                device["bus_id"],
                "the driver nvidia bound",
                f"{device['driver']}",
                "run playbooks/driver.yml, which blocks nouveau and nova, and reboot",
            )
    if driver["smi_exit"] == 127:
        yield finding(ERROR, "driver", "nvidia-smi", "not installed", "run playbooks/driver.yml")
    elif module is None:
        yield finding(
            ERROR,
            "driver",
            "the module nvidia loaded",
            driver["smi_error"] or "no /proc/driver/nvidia/version",
            "look at: modprobe nvidia; dkms status; dmesg | grep -i nvrm. A reboot may be due after an installation",
        )
    elif library is not None and library != module:
        yield finding(
            ERROR,
            "driver",
            f"library and module of one version (module: {module})",
            f"library {library}",
            "an upgrade went past the loaded module: reboot. playbooks/driver.yml holds the packages afterwards",
        )
    elif driver["smi_exit"] == 124:
        yield finding(
            ERROR,
            "driver",
            "an answer from nvidia-smi",
            "none in time",
            "look at: dmesg | grep -i xid; then reboot",
        )
    elif driver["smi_exit"] != 0:
        yield finding(
            ERROR, "driver", "nvidia-smi to succeed", driver["smi_error"], "look at: dmesg | grep -i nvrm"
        )
    newest = max((_version(gpu["compute_capability"]) for gpu in facts["gpus"]), default=())
    if driver["flavour"] == "proprietary" and (newest >= OPEN_ONLY_FROM or not facts["gpus"]):
        yield finding(
            ERROR,
            "driver",
            "NVIDIA's open kernel modules, the only ones that run Blackwell",
            f"the proprietary modules {module}",
            OPEN_MODULES,
        )
    if newest >= SM120 and len(facts["gpus"]) > 1 and driver["uvm_hmm_disabled"] is False:
        yield finding(
            WARNING,
            "driver",
            "uvm_disable_hmm=1: with several of these cards NCCL's peer transfers lock up without it",
            "uvm_disable_hmm=0",
            "run playbooks/driver.yml (with nvidia_driver_adopt: true when it did not install the driver) and reboot",
        )


def number_findings(facts: dict[str, Any], wanted: Wanted) -> Iterator[Finding]:
    gpus, pci = facts["gpus"], facts["pci"]
    if gpus and len(gpus) < len(pci):
        lost = sorted({device["bus_id"] for device in pci} - {gpu["bus_id"] for gpu in gpus})
        yield finding(
            ERROR,
            "gpus",
            f"all {len(pci)} GPUs of the PCI bus in nvidia-smi",
            f"{len(gpus)}; without {', '.join(lost)}",
            "look at: dmesg | grep -i -e xid -e nvrm; a card that fell off the bus comes back by a power cycle only",
        )
    if wanted.gpus and gpus and len(gpus) < wanted.gpus:
        yield finding(
            ERROR,
            "gpus",
            f"{wanted.gpus} GPUs (tensor parallel size times pipeline stages)",
            f"{len(gpus)}",
            "choose a profile for this number of GPUs, or pass the missing ones through (playbooks/provision.yml)",
        )
    names = sorted({str(gpu["name"]) for gpu in gpus})
    if len(names) > 1:
        yield finding(
            WARNING,
            "gpus",
            "GPUs of one model",
            ", ".join(names),
            "the slowest sets the pace: choose GPUs with CUDA_VISIBLE_DEVICES in sglang_server_extra_environment",
        )


def gpu_findings(gpu: dict[str, Any], wanted: Wanted, peers: bool) -> Iterator[Finding]:
    me = _name(gpu)
    if wanted.capability and gpu["compute_capability"] not in (wanted.capability, None):
        yield finding(
            WARNING,
            me,
            f"compute capability {wanted.capability}",
            str(gpu["compute_capability"]),
            "the gates are for that one: set sm120_gates_capability to this card's, or sm120_gates_policy: 'off'",
        )
    if gpu["recovery_action"]:
        yield finding(
            ERROR,
            me,
            "no recovery action pending",
            gpu["recovery_action"],
            "do that: `Reset` is nvidia-smi --gpu-reset with nothing running, else reboot or power-cycle the host",
        )
    if gpu["ecc_uncorrectable"]:
        yield finding(
            ERROR,
            me,
            "no uncorrectable memory errors since boot",
            f"{gpu['ecc_uncorrectable']}",
            "reboot, watch nvidia-smi -q -d ECC,ROW_REMAPPER; if it comes back, replace the card",
        )
    if gpu["row_remap_failed"]:
        yield finding(ERROR, me, "memory rows that can be remapped", "a remapping failed", "replace the card")
    if gpu["row_remap_pending"]:
        yield finding(
            WARNING, me, "no row remapping pending", "pending", "reset the card or reboot to let it happen"
        )
    if gpu["mig"]:
        yield finding(
            ERROR,
            me,
            "MIG off: slices have no peer access",
            "MIG on",
            f"nvidia-smi -i {gpu['index']} -mig 0, with nothing running",
        )
    if peers and (gpu["bar1_mib"] or 0) <= BAR1_SMALL_MIB:
        yield finding(
            WARNING,
            me,
            "BAR1 as large as the card's memory, which peer access needs",
            f"{gpu['bar1_mib']} MiB",
            "switch on Resizable BAR and Above 4G Decoding on the host; on workstation cards set the headless mode "
            "with NVIDIA's Display Mode Selector",
        )
    if gpu["pcie_width"] and gpu["pcie_width_max"] and gpu["pcie_width"] < gpu["pcie_width_max"]:
        yield finding(
            WARNING,
            me,
            f"a PCIe link of {gpu['pcie_width_max']} lanes",
            f"{gpu['pcie_width']} lanes",
            "reseat the card or its riser; look at the slot's lanes and the BIOS bifurcation setting",
        )
    slow = (gpu["pcie_generation"] or 0) < (gpu["pcie_generation_max"] or 0)
    if slow and gpu["performance_state"] == "P0":
        yield finding(
            WARNING,
            me,
            f"PCIe generation {gpu['pcie_generation_max']} at full clocks",
            f"generation {gpu['pcie_generation']}",
            "the link trained down: check riser, slot and the BIOS link speed (an idle card may lower it by itself)",
        )
    if not gpu["persistence"]:
        yield finding(
            WARNING,
            me,
            "persistence on",
            "off: the driver unloads the card between programs, and its power limit with it",
            "run playbooks/driver.yml (with nvidia_driver_adopt: true when it did not install the driver)",
        )
    limit, default = gpu["power_limit_watts"], gpu["power_limit_default_watts"]
    if limit and default and limit < default:
        yield finding(
            NOTE,
            me,
            f"{default:g} W, the card's default limit",
            f"{limit:g} W",
            "nothing, if meant: 300 of 600 W costs a decode-bound server a few percent",
        )


def p2p_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    bad = [pair for pair in facts["p2p"] if pair["status"] not in ("OK", "X")]
    if not bad:
        return
    kinds = ", ".join(sorted({pair["status"] for pair in bad}))
    virtual = any(gpu["virtualization"] == "Pass-Through" for gpu in facts["gpus"])
    yield finding(
        WARNING,
        "p2p",
        "every GPU able to read every other's memory (nvidia-smi topo -p2p r: OK)",
        f"{kinds} in {len(bad)} of {len(facts['p2p'])} directions",
        "in a virtual machine the hypervisor has to allow it: give the cards one GPUDirect clique and enough MMIO "
        "space (role pve_gpu_vm)"
        if virtual
        else "switch off ACS redirection on the bridges between the cards, switch on Resizable BAR",
    )


def xid_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    if facts["xids"] is None:
        yield finding(NOTE, "xid", "the kernel log", "not readable by this user", "run this with become")
        return
    seen: dict[tuple[str, int], int] = {}
    for xid in facts["xids"]:
        key = (xid["bus_id"], xid["xid"])
        seen[key] = seen.get(key, 0) + 1
    for (address, code), times in seen.items():
        known = xids.XIDS.get(code)
        yield finding(
            XID_SEVERITY[known.kind] if known else WARNING,
            address,
            "no Xid since boot",
            f"Xid {code}, {times} time{'s' if times > 1 else ''}: {known.meaning if known else 'not in our list'}",
            known.advice if known else f"look it up: {xids.CATALOGUE_URL} ; dmesg | grep -i xid",
        )


def process_findings(facts: dict[str, Any], wanted: Wanted) -> Iterator[Finding]:
    ours: list[dict[str, Any]] = []
    foreign: list[dict[str, Any]] = []
    for process in facts["processes"]:
        (ours if re.search(wanted.own_units, process["unit"] or "") else foreign).append(process)
    totals = {gpu["bus_id"]: gpu for gpu in facts["gpus"]}
    for process in foreign:
        gpu = totals.get(process["bus_id"])
        share = (
            (process["memory_mib"] or 0) / gpu["memory_total_mib"] if gpu and gpu["memory_total_mib"] else 0.0
        )
        yield finding(
            ERROR if share > 1 - FREE_SHARE else WARNING,
            _name(gpu) if gpu else process["bus_id"],
            "no process but those of our units on the GPU",
            f"{process['name']} (pid {process['pid']}, {process['unit'] or 'no unit'}, {process['memory_mib']} MiB)",
            f"look at: ps -fp {process['pid']}. An orphan of a stopped server is ended with kill {process['pid']}; "
            "another's work is theirs to stop",
        )
    busy = {process["bus_id"] for process in [*ours, *foreign]}
    for gpu in facts["gpus"]:
        free, total = gpu["memory_free_mib"], gpu["memory_total_mib"]
        if gpu["bus_id"] not in busy and free is not None and total and free < FREE_SHARE * total:
            yield finding(
                ERROR,
                _name(gpu),
                "its memory free",
                f"{free} of {total} MiB free and no process to be seen",
                "a process that was killed may leave it: reset the card or reboot",
            )


def host_findings(facts: dict[str, Any], wanted: Wanted) -> Iterator[Finding]:
    host, gpus = facts["host"], facts["gpus"]
    if wanted.model_mib and host["model_disk_free_mib"] < wanted.model_mib:
        yield finding(
            ERROR,
            "disk",
            f"{wanted.model_mib} MiB free for the model",
            f"{host['model_disk_free_mib']} MiB",
            "make room there, or set sglang_model_path to a larger disk",
        )
    if len(gpus) > 1 and host["shm_mib"] < SHM_MIB:
        yield finding(
            WARNING,
            "/dev/shm",  # noqa: S108 - a mount point to look at
            f"at least {SHM_MIB} MiB: NCCL falls back to it where peers cannot see each other",
            f"{host['shm_mib']} MiB",
            "mount it larger: size=50% in /etc/fstab, or --shm-size of a container",
        )
    files = host["limit_open_files"]
    if files.isdigit() and int(files) < OPEN_FILES:
        yield finding(
            WARNING,
            "limits",
            f"at least {OPEN_FILES} open files allowed to services",
            files,
            "raise DefaultLimitNOFILE in /etc/systemd/system.conf, or the limit of the container this runs in",
        )
    if gpus and host["limit_locked_memory"] not in ("unlimited", "") and len(gpus) > 1:
        yield finding(
            NOTE,
            "limits",
            "locked memory unlimited for services, as the unit asks",
            f"{host['limit_locked_memory']} bytes",
            "the unit sets LimitMEMLOCK=infinity; in a container its limit rules",
        )
    if host["swap_mib"] and (host["swappiness"] or 0) > 10:
        yield finding(
            NOTE,
            "swap",
            "vm.swappiness at most 10: pinned pages and page cache of weights push others out",
            f"{host['swappiness']} with {host['swap_mib']} MiB of swap",
            "run playbooks/driver.yml with guest_tuning_enabled: true",
        )
    if host["numa_balancing"] and host["numa_nodes"] > 1:
        yield finding(
            NOTE,
            "numa",
            "kernel.numa_balancing=0: page migration stalls the threads that feed GPUs",
            f"{host['numa_balancing']} on {host['numa_nodes']} nodes",
            "run playbooks/driver.yml with guest_tuning_enabled: true",
        )


def judge(facts: dict[str, Any], wanted: Wanted) -> list[Finding]:
    """All findings, errors first."""
    peers = len(facts["gpus"]) > 1
    found = [
        *driver_findings(facts),
        *number_findings(facts, wanted),
        *(each for gpu in facts["gpus"] for each in gpu_findings(gpu, wanted, peers)),
        *p2p_findings(facts),
        *(xid_findings(facts) if facts["gpus"] or facts["pci"] else ()),
        *process_findings(facts, wanted),
        *host_findings(facts, wanted),
    ]
    return sorted(found, key=lambda each: SEVERITIES.index(each["severity"]))
