"""GPUs, driver and the host around them, as facts. Reads; changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import smi

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controller: not the card's audio or USB functions
MIB = 2**20
SMI_TIMEOUT_SECONDS = 90  # a card that is gone makes nvidia-smi wait long before it answers

SMI_QUERIES: dict[str, list[str]] = {
    "query": ["-q"],
    "capabilities": ["--query-gpu=pci.bus_id,index,compute_cap", "--format=csv,noheader"],
    "processes": [
        "--query-compute-apps=gpu_bus_id,pid,process_name,used_memory",
        "--format=csv,noheader,nounits",
    ],
    "topology": ["topo", "-m"],
    "p2p": ["topo", "-p2p", "r"],
}

Run = Callable[[list[str]], tuple[int, str]]


def run_program(argv: list[str]) -> tuple[int, str]:
    """(exit code, output and errors); 127 when there is no such program, 124 when it took too long."""
    if shutil.which(argv[0]) is None:
        return 127, ""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SMI_TIMEOUT_SECONDS,
            env=os.environ | {"LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout.decode("utf-8", "replace")


@dataclass
class Host:
    """Where facts come from: the machine itself, or in tests a folder and recorded answers."""

    root: Path = Path("/")
    run: Run = run_program

    def read(self, path: str) -> str:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        text = self.read(path)
        return int(text, 0) if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", text) else None

    def kernel_log(self) -> str | None:
        """The kernel's messages since boot; None when they may not be read."""
        for argv in (["journalctl", "--dmesg", "--boot", "--quiet", "--no-pager", "--output=cat"], ["dmesg"]):
            code, text = self.run(argv)
            if code == 0 and text:
                return text
        return None


def pci_gpus(host: Host) -> list[dict[str, Any]]:
    """NVIDIA's display devices on the PCI bus, whatever drives them."""
    found = []
    for device in sorted((host.root / "sys/bus/pci/devices").glob("*")):
        base = f"sys/bus/pci/devices/{device.name}"
        if host.read(f"{base}/vendor") != NVIDIA_VENDOR:
            continue
        if not host.read(f"{base}/class").startswith(DISPLAY_CLASSES):
            continue
        driver = device / "driver"
        found.append(
            {
                "bus_id": device.name,
                "device": host.read(f"{base}/device"),
                "driver": driver.resolve().name if driver.exists() else None,
                "numa_node": host.number(f"{base}/numa_node"),
            }
        )
    return found


def gpu(index: int, address: str, section: smi.Section, capability: str | None) -> dict[str, Any]:
    link = ("PCI", "GPU Link Info")
    power = "GPU Power Readings"
    volatile = section.sections.get("ECC Errors", smi.Section()).sections.get("Volatile", smi.Section())
    return {
        "index": index,
        "bus_id": address,
        "name": section.text("Product Name"),
        "architecture": section.text("Product Architecture"),
        "compute_capability": capability,
        "uuid": section.text("GPU UUID"),
        "memory_total_mib": section.count("FB Memory Usage", "Total"),
        "memory_used_mib": section.count("FB Memory Usage", "Used"),
        "memory_free_mib": section.count("FB Memory Usage", "Free"),
        "bar1_mib": section.count("BAR1 Memory Usage", "Total"),
        "pcie_generation": section.count(*link, "PCIe Generation", "Current"),
        "pcie_generation_max": section.count(*link, "PCIe Generation", "Max"),
        "pcie_width": section.count(*link, "Link Width", "Current"),
        "pcie_width_max": section.count(*link, "Link Width", "Max"),
        "persistence": section.text("Persistence Mode") == "Enabled",
        "performance_state": section.text("Performance State"),
        "mig": section.text("MIG Mode", "Current") == "Enabled",
        "ecc": section.text("ECC Mode", "Current") == "Enabled",
        "ecc_uncorrectable": sum(
            volatile.count(name) or 0 for name in volatile.values if "Uncorrectable" in name
        ),
        "row_remap_pending": section.text("Remapped Rows", "Pending") == "Yes",
        "row_remap_failed": section.text("Remapped Rows", "Remapping Failure Occurred") == "Yes",
        "recovery_action": section.text("GPU Recovery Action"),
        "virtualization": section.text("GPU Virtualization Mode", "Virtualization Mode"),
        "temperature_celsius": section.number("Temperature", "GPU Current Temp"),
        "power_watts": section.number(power, "Average Power Draw")
        or section.number(power, "Instantaneous Power Draw"),
        "power_limit_watts": section.number(power, "Current Power Limit"),
        "power_limit_default_watts": section.number(power, "Default Power Limit"),
        "power_limit_min_watts": section.number(power, "Min Power Limit"),
        "power_limit_max_watts": section.number(power, "Max Power Limit"),
    }


def unit_of(host: Host, pid: int) -> str | None:
    """The systemd service that a process belongs to."""
    found = re.search(r"([^/\n]+\.service)(?:/|$)", host.read(f"proc/{pid}/cgroup"), re.MULTILINE)
    return found[1] if found else None


def processes(host: Host, text: str) -> list[dict[str, Any]]:
    return [
        {
            "bus_id": smi.bus_id(address),
            "pid": int(pid),
            "name": name,
            "memory_mib": int(used) if used.isdigit() else None,
            "unit": unit_of(host, int(pid)),
        }
        for address, pid, name, used in smi.parse_table(text, 4)
        if pid.isdigit()
    ]


def driver(host: Host, answers: dict[str, tuple[int, str]], query: smi.Query) -> dict[str, Any]:
    loaded, flavour = smi.parse_module_version(host.read("proc/driver/nvidia/version"))
    code, said = answers["query"]
    registry = re.search(r'^RegistryDwords: "?(.*?)"?$', host.read("proc/driver/nvidia/params"), re.MULTILINE)
    return {
        "module_version": loaded,
        "flavour": flavour,
        "library_version": query.common.text("Driver Version") or smi.parse_mismatch(said),
        "cuda_version": query.common.text("CUDA Version"),
        "registry": registry[1] if registry else "",
        "uvm_hmm_disabled": {"Y": True, "N": False}.get(
            host.read("sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
        ),
        "nouveau_or_nova": [
            name
            for name in ("nouveau", "nova_core", "nova_drm")
            if (host.root / "sys/module" / name).is_dir()
        ],
        "smi_exit": code,
        "smi_error": "" if code == 0 else " ".join(said.split())[-400:],
    }


def surroundings(host: Host, model_path: str | None) -> dict[str, Any]:
    memory = {
        name: int(value) // 1024
        for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", host.read("proc/meminfo"), re.MULTILINE)
    }
    shm = host.root / "dev/shm"
    folder = host.root / (model_path or "/").lstrip("/")
    folder = next(each for each in (folder, *folder.parents) if each.is_dir())
    limits = {
        name: (soft, hard)
        for name, soft, hard in re.findall(
            r"^(Max \w+(?: \w+)*?)\s{2,}(\S+)\s+(\S+)", host.read("proc/1/limits"), re.MULTILINE
        )
    }
    return {
        "memory_mib": memory.get("MemTotal"),
        "memory_available_mib": memory.get("MemAvailable"),
        "swap_mib": memory.get("SwapTotal"),
        "swappiness": host.number("proc/sys/vm/swappiness"),
        "numa_balancing": host.number("proc/sys/kernel/numa_balancing"),
        "numa_nodes": len(list((host.root / "sys/devices/system/node").glob("node[0-9]*"))),
        "shm_mib": shutil.disk_usage(shm).total // MIB if shm.is_dir() else 0,
        "model_disk_free_mib": shutil.disk_usage(folder).free // MIB,
        "limit_open_files": limits.get("Max open files", ("", ""))[1],
        "limit_locked_memory": limits.get("Max locked memory", ("", ""))[1],
    }


def gather(host: Host, model_path: str | None = None) -> dict[str, Any]:
    """All facts, without a judgement."""
    answers = {"query": host.run(["nvidia-smi", *SMI_QUERIES["query"]])}
    query = smi.parse_query(answers["query"][1])
    for name, argv in SMI_QUERIES.items():
        if name != "query":
            answers[name] = host.run(["nvidia-smi", *argv]) if query.gpus else (1, "")
    known = {
        smi.bus_id(address): (int(index), capability)
        for address, index, capability in smi.parse_table(answers["capabilities"][1], 3)
        if index.isdigit()
    }
    pci = pci_gpus(host)
    numa = {device["bus_id"]: device["numa_node"] for device in pci}
    gpus = []
    for order, (address, section) in enumerate(query.gpus.items()):
        index, capability = known.get(address, (order, None))
        gpus.append({**gpu(index, address, section, capability), "numa_node": numa.get(address)})
    log = host.kernel_log()
    return {
        "gpus": gpus,
        "driver": driver(host, answers, query),
        "p2p": smi.gpu_pairs(smi.parse_matrix(answers["p2p"][1])),
        "topology": smi.gpu_pairs(smi.parse_matrix(answers["topology"][1])),
        "pci": pci,
        "processes": processes(host, answers["processes"][1]),
        "xids": None if log is None else smi.parse_xids(log),
        "host": surroundings(host, model_path),
    }
