"""A package repository with NVIDIA's names, versions and dependencies, and next to nothing in the packages.

Built with dpkg-deb, indexed as a flat repository and signed with a key made for it, as NVIDIA's is with theirs. Names
and dependencies follow NVIDIA's packaging for Debian (https://github.com/NVIDIA/debian-packaging-nvidia-driver), the
driver installation guide and Ubuntu's archive. Programs in them answer from what `gpu_machine.py` laid down there.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DRIVER, NEWER = "580.159.04-1", "590.48.01-1"
NOBODY = "nobody <nobody@example.com>"
KEYRING = "cuda-keyring_1.1-1_all.deb"

NVIDIA_SMI = r"""#!/bin/sh
# Answers as nvidia-smi does: recorded text when library and module agree, its complaints when they do not.
library=VERSION
module=$(sed -n 's/^NVRM version:.*  \([0-9.]*\)  Release.*/\1/p' /proc/driver/nvidia/version 2>/dev/null)
if [ -z "$module" ]; then
  echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
  exit 9
fi
if [ "$module" != "$library" ]; then
  echo "Failed to initialize NVML: Driver/library version mismatch"
  echo "NVML library version: ${library%.*}"
  exit 18
fi
if grep -q 'x86_64 Kernel Module' /proc/driver/nvidia/version; then # Blackwell with proprietary modules
  echo "No devices were found"
  exit 6
fi
state=/run/made-up-gpus
mkdir -p $state
case "$*" in
  -q)
    persistence=$(cat $state/persistence 2>/dev/null || echo Disabled)
    watts=$(cat $state/watts 2>/dev/null || echo 700)
    sed "s/^\(Driver Version  *: \).*/\1$library/
         s/^\( *Persistence Mode  *: \).*/\1$persistence/
         s/^\( *Current Power Limit  *: \)[0-9].*/\1$watts.00 W/" /srv/made-up/smi-q ;;
  "-pm 1") echo Enabled > $state/persistence ;;
  "-pl "*) echo "$2" > $state/watts ;;
  "-i "*" -pl "*) echo "${4%.*}" > $state/watts ;;
  --query-gpu=index,power.default_limit*) printf '0, 700.00\n1, 700.00\n' ;;
  --query-gpu=pci.bus_id*) printf '00000000:00:06.0, 0, 12.0\n00000000:00:07.0, 1, 12.0\n' ;;
  topo*) awk -v head="== nvidia-smi $*" '/^== nvidia-smi/ {on = $0 == head} on && !/^==/' /srv/made-up/smi-tables ;;
  --query-compute-apps*) cat $state/processes 2>/dev/null || true ;;
  *) ;;
esac
"""
# What DKMS does, as far as anything here can tell: no headers, no module.
DKMS = r"""#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
kernel=$(uname -r)
if [ -e /srv/made-up/dkms-fails ]; then
  echo "Error! Bad return status for module build on kernel: $kernel (x86_64)"
  exit 10
fi
[ -e /lib/modules/$kernel/build ] || exit 0
mkdir -p /lib/modules/$kernel/updates/dkms
printf 'version=VERSION\nlicense=LICENSE\n' > /lib/modules/$kernel/updates/dkms/nvidia.ko
"""
UNDKMS = r"""#!/bin/sh
kernel=$(uname -r)
rm -f /lib/modules/$kernel/updates/dkms/nvidia.ko
rmdir --ignore-fail-on-non-empty -p /lib/modules/$kernel/updates/dkms 2>/dev/null || true
"""
# As Ubuntu's unit is: without persistence, and stopped when nothing wants it.
PERSISTENCED = """[Unit]
Description=NVIDIA Persistence Daemon
StopWhenUnneeded=true

[Service]
ExecStart=/usr/bin/nvidia-persistenced --no-persistence-mode
"""
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
  --list-gpu-arch) printf 'compute_90\\ncompute_100\\ncompute_120\\ncompute_121\\n' ;;
esac
"""


@dataclass
class Deb:
    name: str
    version: str
    depends: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[str, int]] = field(default_factory=dict)  # {path: (text, mode)}
    scripts: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return f"{self.name}_{self.version}_amd64.deb"


def of_programs(version: str) -> dict[str, dict[str, tuple[str, int]]]:
    """Files of the packages that have programs, wherever a distribution puts them."""
    return {
        "smi": {"usr/bin/nvidia-smi": (NVIDIA_SMI.replace("VERSION", version), 0o755)},
        "persistenced": {
            "usr/bin/nvidia-persistenced": ("#!/bin/sh\nexec sleep infinity\n", 0o755),
            "lib/systemd/system/nvidia-persistenced.service": (PERSISTENCED, 0o644),
        },
    }


def of_modules(version: str, licence: str = "Dual MIT/GPL") -> dict[str, str]:
    return {"postinst": DKMS.replace("VERSION", version).replace("LICENSE", licence), "prerm": UNDKMS}


def debian(version: str) -> list[Deb]:
    """One release of the driver, with Debian's names: they are the same for every branch."""
    plain = version.partition("-")[0]
    same = f"(= {version})"
    files = of_programs(plain)
    module = f"nvidia-kernel-support {same}, dkms (>= 3)"
    return [
        Deb("libcuda1", version),
        Deb("libnvidia-ml1", version),
        Deb("nvidia-modprobe", version),
        Deb("nvidia-kernel-support", version, "nvidia-modprobe (>= 352)"),
        Deb("nvidia-driver-cuda", version, f"libcuda1 {same}, libnvidia-ml1 {same}", files=files["smi"]),
        Deb("nvidia-persistenced", version, f"libnvidia-ml1 {same}", files=files["persistenced"]),
        Deb(
            "nvidia-kernel-open-dkms",
            version,
            module,
            {"Conflicts": "nvidia-kernel-dkms"},
            scripts=of_modules(plain),
        ),
        Deb(
            "nvidia-kernel-dkms",
            version,
            module,
            {"Conflicts": "nvidia-kernel-open-dkms"},
            scripts=of_modules(plain, "NVIDIA"),
        ),
    ]


def ubuntu(version: str) -> list[Deb]:
    """One release with Ubuntu's names and dependencies, read in noble-updates (580.178.04-0ubuntu0.24.04.1).

    The branch is in every name, and the release in the firmware's: a new release brings a package of another name.
    """
    plain = version.partition("-")[0]
    branch = plain.partition(".")[0]
    files = of_programs(plain)
    common = f"nvidia-kernel-common-{branch}"

    def only(*names: str, **more: str) -> dict[str, str]:
        every = ", ".join(names)
        provided = ", ".join([*names, *more.values()])
        return {"Conflicts": every, "Replaces": every, "Provides": provided}

    def dkms(flavour: str, licence: str) -> list[Deb]:
        source = f"nvidia-kernel-source-{branch}{flavour}"
        near = ", ".join(
            f"{name} ({limit})" for name in (source, common) for limit in (f"<= {plain}-1", f">= {plain}")
        )
        return [
            Deb(source, version, fields=only("nvidia-kernel-source")),
            Deb(
                f"nvidia-dkms-{branch}{flavour}",
                version,
                f"dkms, {near}",
                only("nvidia-dkms-kernel"),
                scripts=of_modules(plain, licence),
            ),
        ]

    return [
        Deb(f"nvidia-firmware-{branch}-{plain}", version),
        Deb(
            common,
            version,
            f"libpciaccess0 (>= 0.10.7), nvidia-firmware-{branch}-{plain}",
            only("nvidia-kernel-common", release=f"{common}-{plain}"),
        ),
        Deb(
            f"libnvidia-compute-{branch}",
            version,
            f"{common}-{plain}, ocl-icd-libopencl1",
            only(
                "libnvidia-compute",
                "nvidia-opencl-icd",
                cuda=f"libcuda1 (= {version})",
                ml=f"libnvidia-ml1 (= {version})",
            ),
        ),
        Deb(
            f"nvidia-utils-{branch}",
            version,
            f"{common}-{plain}, libnvidia-compute-{branch} (>= {plain})",
            only("nvidia-smi", "nvidia-utils"),
            files["smi"],
        ),
        Deb(
            f"nvidia-compute-utils-{branch}",
            version,
            f"libnvidia-compute-{branch}",
            only("nvidia-compute-utils", "nvidia-persistenced"),
            files["persistenced"],
        ),
        *dkms("-open", "Dual MIT/GPL"),
        *dkms("", "NVIDIA"),
    ]


@dataclass(frozen=True)
class Distribution:
    """What differs between distributions, as far as tests know."""

    release: Callable[[str], list[Deb]]
    others: tuple[Deb, ...]  # the distribution's own packages that the driver's depend on
    driver: frozenset[str]  # what a driver is made of, at least
    modules: str
    too_old: Deb  # a dependency of a version that the driver does not take
    foreign: tuple[
        str, ...
    ]  # a driver of the newer branch in the order of dependencies, with what it depends on

    def debs(self) -> list[Deb]:
        return [*self.release(DRIVER), *self.release(NEWER), *self.others, self.too_old]

    def by_hand(self) -> list[Deb]:
        """A driver that somebody installs by dpkg alone."""
        known = {deb.name: deb for deb in (*self.release(NEWER), *self.others)}
        return [known[name] for name in self.foreign]


DISTRIBUTIONS = {
    "debian": Distribution(
        debian,
        (Deb("dkms", "3.2.2-1"),),
        frozenset({"nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced", "libcuda1"}),
        "nvidia-kernel-open-dkms",
        Deb("dkms", "2.8-1"),
        ("libcuda1", "libnvidia-ml1", "nvidia-driver-cuda"),
    ),
    "ubuntu": Distribution(
        ubuntu,
        (Deb("dkms", "3.0.11-1"), Deb("libpciaccess0", "0.17-3"), Deb("ocl-icd-libopencl1", "2.3.2-1")),
        frozenset(
            {
                "libnvidia-compute-580",
                "nvidia-dkms-580-open",
                "nvidia-utils-580",
                "nvidia-compute-utils-580",
                "nvidia-firmware-580-580.159.04",
            }
        ),
        "nvidia-dkms-580-open",
        Deb("libpciaccess0", "0.9-1"),
        (
            "libpciaccess0",
            "ocl-icd-libopencl1",
            "nvidia-firmware-590-590.48.01",
            "nvidia-kernel-common-590",
            "libnvidia-compute-590",
            "nvidia-utils-590",
        ),
    ),
}


def toolkit() -> list[Deb]:
    release = "13.0.88-1"
    return [
        Deb("cuda-nvcc-13-0", release, files={"usr/local/cuda-13.0/bin/nvcc": (NVCC, 0o755)}),
        Deb("cuda-cudart-13-0", release),
        Deb("cuda-cudart-dev-13-0", release, "cuda-cudart-13-0 (= 13.0.88-1)"),
        Deb("cuda-nvrtc-dev-13-0", release),
        Deb("libcublas-dev-13-0", "13.1.0.3-1"),
        Deb("libcurand-dev-13-0", "10.4.0.35-1"),
        Deb("lab-compiler", "1", files={"usr/bin/c++": ("#!/bin/sh\n", 0o755)}),
    ]


def build(deb: Deb, folder: Path) -> Path:
    tree = folder / "tree"
    control = {
        "Package": deb.name,
        "Version": deb.version,
        "Architecture": "amd64",
        "Maintainer": NOBODY,
        "Installed-Size": "64",
        **({"Depends": deb.depends} if deb.depends else {}),
        **deb.fields,
        "Description": "stands in for the package of this name in tests",
    }
    for path, (text, mode) in {
        "DEBIAN/control": ("".join(f"{name}: {value}\n" for name, value in control.items()), 0o644),
        **{f"DEBIAN/{name}": (text, 0o755) for name, text in deb.scripts.items()},
        **deb.files,
    }.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        (tree / path).chmod(mode)
    target = folder / deb.file
    command = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(target)]
    subprocess.run(command, check=True, capture_output=True)
    shutil.rmtree(tree)
    return target


def index(folder: Path) -> None:
    """Packages, Release and InRelease of a flat repository."""
    stanzas = []
    for path in sorted(folder.glob("*_amd64.deb")):
        control = subprocess.check_output(["dpkg-deb", "-f", str(path)], text=True).strip()
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        stanzas.append(f"{control}\nFilename: ./{path.name}\nSize: {len(data)}\nSHA256: {digest}\n")
    (folder / "Packages").write_text("\n".join(stanzas))
    (folder / "Packages.gz").write_bytes(gzip.compress((folder / "Packages").read_bytes()))
    lines = ["Origin: NVIDIA", "Label: NVIDIA CUDA", "Date: Thu, 01 Jan 2026 00:00:00 UTC", "SHA256:"]
    for name in ("Packages", "Packages.gz"):
        data = (folder / name).read_bytes()
        lines.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}")
    (folder / "Release").write_text("\n".join(lines) + "\n")


class Key:
    """A signing key for one repository, kept outside the folder that is served."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        self.gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback"]
        make = [
            "--passphrase",
            "",
            "--quick-generate-key",
            "packages@example.com",
            "rsa3072",
            "sign",
            "never",
        ]
        subprocess.run([*self.gpg, *make], check=True, capture_output=True)

    def public(self) -> bytes:
        return subprocess.check_output([*self.gpg, "--export"])

    def sign(self, folder: Path) -> None:
        (folder / "InRelease").unlink(missing_ok=True)
        command = ["--digest-algo", "SHA256", "--clearsign", "--output", "InRelease", "Release"]
        subprocess.run([*self.gpg, *command], check=True, capture_output=True, cwd=folder)

    def close(self) -> None:
        """gpg leaves an agent behind."""
        home = self.gpg[self.gpg.index("--homedir") + 1]
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=True)

    def keyring(self, folder: Path) -> str:
        """NVIDIA's keyring package around this key; its SHA-256."""
        tree = folder / "tree"
        (tree / "DEBIAN").mkdir(parents=True)
        lines = [
            "Package: cuda-keyring",
            "Version: 1.1-1",
            "Architecture: all",
            "Maintainer: nobody <nobody@example.com>",
        ]
        (tree / "DEBIAN/control").write_text("\n".join([*lines, "Description: a key"]) + "\n")
        key = tree / "usr/share/keyrings/cuda-archive-keyring.gpg"
        key.parent.mkdir(parents=True)
        key.write_bytes(self.public())
        source = tree / "etc/apt/sources.list.d/cuda-debian12-x86_64.list"
        source.parent.mkdir(parents=True)
        source.write_text("# the real one brings its own source; ours is used instead\n")
        command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(folder / KEYRING)]
        subprocess.run(command, check=True, capture_output=True)
        shutil.rmtree(tree)
        return hashlib.sha256((folder / KEYRING).read_bytes()).hexdigest()


def make(folder: Path, kernel: str) -> str:
    """A repository for each distribution, for hosts with this kernel; SHA-256 of the keyring package of them all."""
    headers = Deb(f"linux-headers-{kernel}", "1", files={f"lib/modules/{kernel}/build/Makefile": ("", 0o644)})
    folder.mkdir(parents=True, exist_ok=True)
    key = Key(folder / "gnupg")
    sha256 = key.keyring(folder)
    for name, distribution in DISTRIBUTIONS.items():
        served = folder / "repository" / name
        served.mkdir(parents=True)
        for deb in [*distribution.debs(), *toolkit(), headers]:
            build(deb, served)
        index(served)
        key.sign(served)
        shutil.copy(folder / KEYRING, served)
    key.close()
    return sha256
