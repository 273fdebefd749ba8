"""Makes a lab host look like a machine with two GPUs: what lies below /sys and /proc, and the kernel's own programs.

Lies on the host as /srv/made-up/machine.py and runs there as root. The argument says what to do: `set_up`, with the
recorded answer of `nvidia-smi -q` on standard input, `load` (what modprobe does), `reboot`, `driver VERSION
open|proprietary` (one that somebody else installed without packages), `nouveau`, `clear`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

MADE = Path("/srv/made-up")
KERNEL = os.uname().release
MODULE = Path(f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko")
ADDRESSES = ("0000:00:06.0", "0000:00:07.0")
COVERS = {
    "devices": "/sys/bus/pci/devices",
    "modules": "/sys/module",
    "driver": "/proc/driver",
    "boot_id": "/proc/sys/kernel/random/boot_id",
}
VERSION = "NVRM version: NVIDIA UNIX {}  {}  Release Build  (dvs-builder@U22)  Mon Nov  3 2025\n"
FLAVOURS = {"open": "Open Kernel Module for x86_64", "proprietary": "x86_64 Kernel Module"}
STAND_INS = {
    "modinfo": f"""#!/bin/sh
for field; do :; done
while [ $# -gt 0 ]; do [ "$1" = -F ] && wanted=$2; shift; done
[ -e {MODULE} ] || exit 1
sed -n "s/^$wanted=//p" {MODULE}
""",
    "modprobe": "#!/bin/sh\nexec python3 /srv/made-up/machine.py load\n",
    "update-initramfs": '#!/bin/sh\necho "$*" >> /srv/made-up/initramfs-calls\n',
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def bind(driver: str | None) -> None:
    for address in ADDRESSES:
        link = MADE / "devices" / address / "driver"
        link.unlink(missing_ok=True)
        if driver:
            (MADE / "devices" / ".drivers" / driver).mkdir(parents=True, exist_ok=True)
            link.symlink_to(MADE / "devices" / ".drivers" / driver)


def unload() -> None:
    subprocess.run(["rm", "-rf", *map(str, MADE.glob("modules/*")), str(MADE / "driver/nvidia")], check=True)
    bind(None)


def run_driver(version: str, flavour: str) -> None:
    """A loaded module, with the options that /etc/modprobe.d gives it."""
    options = "\n".join(path.read_text() for path in Path("/etc/modprobe.d").glob("*.conf"))
    words = re.search(r'NVreg_RegistryDwords="(.*)"', options)
    hmm = "Y" if re.search(r"^options nvidia_uvm uvm_disable_hmm=1", options, re.MULTILINE) else "N"
    write(MADE / "driver/nvidia/version", VERSION.format(FLAVOURS[flavour], version))
    write(MADE / "driver/nvidia/params", f'RegistryDwords: "{words[1] if words else ""}"\n')
    write(MADE / "modules/nvidia_uvm/parameters/uvm_disable_hmm", hmm + "\n")
    (MADE / "modules/nvidia").mkdir(exist_ok=True)
    bind("nvidia")


def load() -> None:
    if not MODULE.exists():
        sys.exit(f"modprobe: FATAL: Module nvidia not found in directory /lib/modules/{KERNEL}")
    if (MADE / "modules/nouveau").exists():
        sys.exit("modprobe: ERROR: could not insert 'nvidia': No such device")
    values = dict(line.split("=", 1) for line in MODULE.read_text().splitlines())
    run_driver(values["version"], "proprietary" if values["license"] == "NVIDIA" else "open")


def nouveau() -> None:
    unload()
    (MADE / "modules/nouveau").mkdir(parents=True)
    bind("nouveau")


def reboot() -> None:
    """Another boot: what is blocked does not come back, what is enabled is started."""
    blocked = any("blacklist nouveau" in path.read_text() for path in Path("/etc/modprobe.d").glob("*.conf"))
    rival = (MADE / "modules/nouveau").exists() and not blocked
    unload()
    subprocess.run(["rm", "-rf", "/run/made-up-gpus"], check=True)
    if rival:
        nouveau()
    elif MODULE.exists():
        load()
    write(MADE / "boot_id", f"{uuid.uuid4()}\n")
    if Path("/etc/systemd/system/multi-user.target.wants/sm120-gpus.service").exists():
        subprocess.run(["systemctl", "restart", "sm120-gpus.service"], check=False)


def set_up() -> None:
    for address in ADDRESSES:
        device = MADE / "devices" / address
        for name, text in {
            "vendor": "0x10de",
            "device": "0x2bb5",
            "class": "0x030200",
            "numa_node": "0",
        }.items():
            write(device / name, text + "\n")
    for name in ("modules", "driver"):
        (MADE / name).mkdir()
    write(MADE / "boot_id", f"{uuid.uuid4()}\n")
    write(MADE / "smi-q", sys.stdin.read())
    for name, text in STAND_INS.items():
        write(Path("/usr/local/sbin", name), text)
        Path("/usr/local/sbin", name).chmod(0o755)
    # The reboot module takes the first shutdown that it finds, and that one is systemctl by another name.
    shutdown = Path("/usr/sbin/shutdown")
    shutdown.unlink()
    write(shutdown, "#!/bin/sh\nexec python3 /srv/made-up/machine.py reboot\n")
    shutdown.chmod(0o755)
    for name, over in COVERS.items():
        subprocess.run(["mount", "--bind", str(MADE / name), over], check=True)


ACTIONS = {
    "load": load,
    "reboot": reboot,
    "driver": run_driver,
    "clear": unload,
    "nouveau": nouveau,
    "set_up": set_up,
}

if __name__ == "__main__":
    ACTIONS[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]
