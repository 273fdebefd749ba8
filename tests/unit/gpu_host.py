"""Hosts with GPUs as nvidia-smi, /proc and /sys show them: a folder and recorded or documented answers.

`nvidia-smi-*-h200-x2.txt` were recorded on a machine with two H200 (serial numbers and UUIDs blanked). Other cards are
the first of that record with NVIDIA's names and values of the other card in it: the form is the same for all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ansible.module_utils.sm120.gpu_facts import SMI_QUERIES, Host

DATA = Path(__file__).parent / "data"
RECORD = (DATA / "nvidia-smi-q-h200-x2.txt").read_text()
TABLES = (DATA / "nvidia-smi-tables-h200-x2.txt").read_text()
FIRST, SECOND = (match.start() for match in re.finditer(r"^GPU 0", RECORD, re.MULTILINE))
HEAD, CARD = RECORD[:FIRST], RECORD[FIRST:SECOND]

RTX_PRO_6000 = {
    "Product Name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "Product Architecture": "Blackwell",
    "FB Memory Usage/Total": "97887 MiB",
    "FB Memory Usage/Free": "97250 MiB",
    "BAR1 Memory Usage/Total": "131072 MiB",
    "GPU Power Readings/Current Power Limit": "600.00 W",
    "GPU Power Readings/Default Power Limit": "600.00 W",
    "GPU Power Readings/Min Power Limit": "300.00 W",
    "GPU Power Readings/Max Power Limit": "600.00 W",
}
MODULE = (
    "NVRM version: NVIDIA UNIX {}x86_64{}  580.159.04  Release Build  (dvs-builder@U22)  Mon Nov  3 2025\n"
)
OPEN, PROPRIETARY = MODULE.format("Open Kernel Module for ", ""), MODULE.format("", " Kernel Module")


def edited(card: str, changes: dict[str, str]) -> str:
    """A card's section with other values: {`Name` or `Section/Name`: value}."""
    for path, value in changes.items():
        *sections, name = path.split("/")
        start = 0
        for section in sections:
            start = re.compile(rf"^ +{re.escape(section)} *$", re.MULTILINE).search(card, start).end()  # type: ignore[union-attr]
        line = re.compile(rf"^( +{re.escape(name)} +: ).*$", re.MULTILINE)
        found = line.search(card, start)
        assert found, path
        card = card[: found.start()] + found[1] + value + card[found.end() :]
    return card


@dataclass
class Machine:
    """What a test wants of a machine; `build` lays it down."""

    gpus: int = 2
    card: dict[str, str] = field(default_factory=dict)
    changes: dict[int, dict[str, str]] = field(default_factory=dict)  # {index: of that card alone}
    capability: str = "9.0"
    module: str = OPEN
    uvm_disable_hmm: str = "Y"
    p2p: str = "OK"
    kernel_log: str | None = "Linux version 6.8\n"
    processes: str = ""
    answers: dict[str, tuple[int, str]] = field(
        default_factory=dict
    )  # instead of what follows from the above
    bound: str = "nvidia"
    on_bus: int | None = None

    def address(self, index: int) -> str:
        return f"0000:00:{index + 6:02x}.0"

    def query(self) -> str:
        text = HEAD
        for index in range(self.gpus):
            card = edited(CARD, self.card | self.changes.get(index, {}))
            text += card.replace("00000000:00:06.0", "0000" + self.address(index).upper()) + "\n"
        return text

    def matrix(self, cell: str) -> str:
        names = [f"GPU{index}" for index in range(self.gpus)]
        rows = ["\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\x1b[0m"]
        for row in names:
            rows.append("\t".join([row, *(" X " if row == each else cell for each in names), "0-31"]))
        return "\n".join(rows) + "\n\nLegend:\n\n  X    = Self\n  NS   = Not supported\n"

    @classmethod
    def recorded(cls) -> Machine:
        """The two H200 with every answer as it was recorded."""
        parts = re.split(r"^== nvidia-smi (.*)\n", TABLES, flags=re.MULTILINE)[1:]
        tables = dict(zip(parts[::2], parts[1::2], strict=True))
        answers = {
            name: (0, re.sub(r"^== rc 0\n", "", tables[" ".join(argv)], flags=re.MULTILINE))
            for name, argv in SMI_QUERIES.items()
            if name != "query"
        }
        return cls(answers={**answers, "query": (0, RECORD)})

    def said(self, argv: list[str]) -> tuple[int, str]:
        if argv[0] in ("journalctl", "dmesg"):
            return (1, "not permitted") if self.kernel_log is None else (0, self.kernel_log)
        name = next(name for name, arguments in SMI_QUERIES.items() if arguments == argv[1:])
        indices = range(self.gpus)
        normal = {
            "query": self.query(),
            "capabilities": "".join(f"0000{self.address(i)}, {i}, {self.capability}\n" for i in indices),
            "processes": self.processes,
            "topology": self.matrix("PHB"),
            "p2p": self.matrix(self.p2p),
        }
        return self.answers.get(name, (0, normal[name]))

    def build(self, root: Path) -> Host:
        files = {
            "proc/driver/nvidia/version": self.module,
            "proc/driver/nvidia/params": 'ResmanDebugLevel: 4294967295\nRegistryDwords: "ForceP2P=0x11"\n',
            "sys/module/nvidia_uvm/parameters/uvm_disable_hmm": self.uvm_disable_hmm,
            "proc/meminfo": "MemTotal:       527971000 kB\nMemAvailable:   500000000 kB\nSwapTotal:             0 kB\n",
            "proc/sys/vm/swappiness": "60\n",
            "proc/sys/kernel/numa_balancing": "0\n",
            "proc/1/limits": "Limit                     Soft Limit           Hard Limit           Units     \n"
            "Max open files            1048576              1048576              files     \n"
            "Max locked memory         unlimited            unlimited            bytes     \n",
        }
        for index in range(self.gpus if self.on_bus is None else self.on_bus):
            device = f"sys/bus/pci/devices/{self.address(index)}"
            files |= {
                f"{device}/vendor": "0x10de\n",
                f"{device}/class": "0x030200\n",
                f"{device}/device": "0x2bb5\n",
                f"{device}/numa_node": f"{index // 4}\n",
            }
        for path, text in files.items():
            if text:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
        for device in (root / "sys/bus/pci/devices").glob("*"):
            driver = root / "sys/bus/pci/drivers" / self.bound
            driver.mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(driver)
        (root / "dev/shm").mkdir(parents=True)
        return Host(root, self.said)
