#!/usr/bin/env python3
"""Systemd containers that stand in for GPU hosts: the demo and every test that needs a machine use these.

A lab host is a Debian or Ubuntu container that boots systemd and is reached over ssh, exactly as a real host is.
Nothing is pulled from a registry: the base image is made here with mmdebstrap. State lives in .cache/lab; the ssh key,
the host key and known_hosts are made there, so that host keys are checked as on real hosts. A container's name carries
a hash of this checkout's path: two checkouts do not meet.

Environment:
  SM120_LAB_ENGINE   podman | docker (default: podman)
  SM120_LAB_IMAGE    an image to use instead of the one made here (needs systemd, sshd, python3)
  SM120_LAB_SUITE    release of the image made here: bookworm (default), another of Debian's, or noble (Ubuntu 24.04)
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import io
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".cache" / "lab"
ENGINE = os.environ.get("SM120_LAB_ENGINE", "podman")
SUITE = os.environ.get("SM120_LAB_SUITE", "bookworm")
CHECKOUT = hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]
PACKAGES = (
    "systemd systemd-sysv dbus openssh-server sudo python3 python3-venv python3-apt iproute2 ca-certificates procps"
).split()
PORT_LABEL = "sm120.ssh-port"
UBUNTU = "noble"
UBUNTU_KEYRING = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
# What nobody asked for does not change a host in the middle of a test.
QUIET = [
    '--customize-hook=chroot "$1" systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer'
]
# Its sshd is started by a socket, which does not read the options that a lab host's port comes by.
UBUNTU_OPTIONS = [
    "--include=apt",
    '--customize-hook=chroot "$1" systemctl disable ssh.socket',
    '--customize-hook=chroot "$1" systemctl enable ssh.service',
]
UBUNTU_SOURCES = [
    f"deb [signed-by={UBUNTU_KEYRING}] http://archive.ubuntu.com/ubuntu {suite} main universe restricted"
    for suite in (UBUNTU, f"{UBUNTU}-updates")
]
TOOLS = {
    "podman": "podman runc netavark",
    "mmdebstrap": "mmdebstrap debian-archive-keyring",
    "ssh-keygen": "openssh-client",
    "shellcheck": "shellcheck",
    "gpg": "gpg gpg-agent",  # signs the packages that tests make
}
# pip's settings that decide where packages come from and whether the way there is trusted.
PIP_SETTINGS = (
    "index-url extra-index-url find-links no-index cert trusted-host constraint timeout proxy".split()
)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
BOOT_TIMEOUT_SECONDS = 180


class LabError(RuntimeError):
    """Something the user has to act on; the text is all that is shown."""


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
    """One at a time of what is made once: hosts are started side by side."""
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(f"lab: {text}", flush=True)


def root_prefix() -> list[str]:
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        raise LabError("wanted: root, or sudo, to make images and start systemd containers; found: neither")
    return ["sudo"]


def call(*argv: str, as_root: bool = False, stdin: bytes | None = None) -> str:
    """Run a program and return its output; on failure show what it said."""
    command = [*(root_prefix() if as_root else []), *argv]
    done = subprocess.run(command, input=stdin, capture_output=True)
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").rstrip()
        raise LabError(f"failed ({done.returncode}): {' '.join(argv)}\n{said}")
    return done.stdout.decode()


def succeeds(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True).returncode == 0


@functools.cache
def engine_argv() -> tuple[str, ...]:
    """The container engine, with the settings that it needs on this machine."""
    if ENGINE == "docker":
        return (*root_prefix(), "docker")
    if ENGINE != "podman":
        raise LabError(f"SM120_LAB_ENGINE: wanted podman or docker, found {ENGINE!r}")
    STATE.mkdir(parents=True, exist_ok=True)
    # Where nobody may raise limits, podman's defaults start nothing. What is asked for here is what this process
    # has, and of processes no more than podman leaves itself.
    hard = {name: resource.getrlimit(kind)[1] % 2**63 for name, kind in LIMITS.items()}
    asked = {"nofile": min(hard["nofile"], 1048576), "nproc": min(hard["nproc"], 32768)}
    lines = [
        "[containers]",
        "default_ulimits = [" + ", ".join(f'"{name}={value}:{value}"' for name, value in asked.items()) + "]",
        "[engine]",
    ]
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        lines.append('runtime = "runc"')  # crun refuses hybrid cgroups
    conf, text = STATE / "containers.conf", "\n".join(lines) + "\n"
    if not conf.exists() or conf.read_text() != text:
        new = conf.with_suffix(f".{os.getpid()}")  # a podman beside this one reads it
        new.write_text(text)
        new.replace(conf)
    return (*root_prefix(), "env", f"CONTAINERS_CONF={conf}", "podman")


def engine(*argv: str, stdin: bytes | None = None) -> str:
    return call(*engine_argv(), *argv, stdin=stdin)


@alone("tools")
def bootstrap() -> None:
    """Install the programs that the lab needs, or say which are missing."""
    missing = [name for name in TOOLS if not shutil.which(name) and (name != "podman" or ENGINE == "podman")]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise LabError(
            f"wanted: {', '.join(missing)}; found: neither them nor apt-get. Install them and try again."
        )
    packages = " ".join(TOOLS[name] for name in missing).split()
    say(f"installing {' '.join(packages)} (apt)")
    call("apt-get", "update", "-qq", as_root=True)
    install = "env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends".split()
    call(*install, *packages, as_root=True)


def image_exists(name: str) -> bool:
    return succeeds(*engine_argv(), "image", "inspect", name)


@alone("base")
def base_image() -> str:
    """The base image's name; made when it is not there."""
    given = os.environ.get("SM120_LAB_IMAGE")
    if given:
        return given
    options, sources = (UBUNTU_OPTIONS, UBUNTU_SOURCES) if SUITE == UBUNTU else ([], [])
    options = [*options, *QUIET]
    recipe = hashlib.sha256(" ".join([SUITE, *PACKAGES, *options, *sources]).encode()).hexdigest()[:12]
    name = f"localhost/sm120-lab-base:{SUITE}-{recipe}"
    if not image_exists(name):
        if SUITE == UBUNTU and not UBUNTU_KEYRING.exists():
            raise LabError(
                f"wanted: {UBUNTU_KEYRING}, to check what the image is made of; found: none. Install the package "
                "ubuntu-keyring or ubuntu-archive-keyring, or set SM120_LAB_IMAGE to an image that is there."
            )
        say(f"making the base image {name} with mmdebstrap (about half a minute)")
        STATE.mkdir(parents=True, exist_ok=True)
        tarball = str(STATE / f"base-{recipe}.tar")
        try:
            command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", *options]
            call(*command, SUITE, tarball, *sources, as_root=True)
            engine("import", tarball, name)
        finally:
            call("rm", "-f", tarball, as_root=True)
    return name


@alone("keys")
def keys() -> tuple[Path, Path]:
    """(operator's key, host key): made once."""
    STATE.mkdir(parents=True, exist_ok=True)
    STATE.chmod(0o700)
    paths = STATE / "id_ed25519", STATE / "host_ed25519"
    for path in paths:
        if not path.exists():
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "sm120-lab", "-f", str(path))
    return paths


def trust_host_key(port: int, host_key: Path) -> None:
    kind, key, _comment = host_key.with_suffix(".pub").read_text().split()
    with (STATE / "known_hosts").open("a+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)  # hosts are started side by side
        known.seek(0)
        line = f"[127.0.0.1]:{port} {kind} {key}\n"
        if line not in known.readlines():
            known.write(line)


def pip_settings() -> tuple[str, dict[str, str]]:
    """The controller's pip settings as (pip.conf, {path here: path in the container}).

    A host that is to install what the controller can install needs its index, its local folders and certificates.
    """
    settings: dict[str, str] = {}
    for line in call(sys.executable, "-m", "pip", "config", "list").splitlines():
        match = re.fullmatch(r"(?::env:|global|install)\.(?:default-)?([\w-]+)='(.*)'", line.strip())
        if match and match[1] in PIP_SETTINGS:
            settings[match[1]] = match[2]
    # PyPI alone has no CPU build of torch, which the demo's release set names.
    if not settings.keys() & {"index-url", "extra-index-url", "find-links", "no-index"}:
        settings["extra-index-url"] = TORCH_CPU_INDEX
    mounts: dict[str, str] = {}

    def there(word: str) -> str:
        is_index = word.startswith(
            "file://"
        )  # its pages link to files beside it: the parent folder is needed
        path = Path(word.removeprefix("file://"))
        if not path.is_absolute() or not path.exists():
            return word
        source = path.parent if is_index else path
        target = mounts.setdefault(str(source), f"/mnt/controller-pip/{len(mounts)}/{source.name}")
        return f"file://{target}/{path.name}" if is_index else target

    lines = ["[global]", "disable-pip-version-check = 1"]
    for key, value in settings.items():
        lines.append(f"{key} = " + "\n    ".join(there(word) for word in re.split(r"\s+|\\n", value)))
    return "\n".join(lines) + "\n", mounts


def container(name: str) -> str:
    return f"sm120-lab-{CHECKOUT}-{name}"


def container_exists(name: str) -> bool:
    return succeeds(*engine_argv(), "container", "inspect", container(name))


def copy_in(name: str, files: dict[str, tuple[str, int]]) -> None:
    """Lay files {path: (text, mode)} into a container that is not running yet, as root's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        home = tarfile.TarInfo("root/.ssh")
        home.type, home.mode = tarfile.DIRTYPE, 0o700
        archive.addfile(home)
        for path, (text, mode) in files.items():
            entry = tarfile.TarInfo(path)
            entry.mode, entry.size = mode, len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    engine("cp", "-", f"{container(name)}:/", stdin=buffer.getvalue())


def port_number(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise LabError(
            f"wanted: a port from 1 to 65535 for ssh (SM120_DEMO_PORT for the demo); found: {text!r}. Correct it."
        )
    return int(text)


def refuse_taken_port(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LabError(
                f"wanted: port {port} on 127.0.0.1 for ssh to {name}; found: {error}. Choose another "
                "(SM120_DEMO_PORT for the demo) or stop what uses it."
            ) from error


def create(name: str, port: int, image: str, host_key: Path, operator_key: Path) -> None:
    refuse_taken_port(name, port)
    pip_conf, mounts = pip_settings()
    # Host networking: in many sandboxes it is all there is. sshd listens on loopback only.
    options = ["--name", container(name), "--hostname", name, "--privileged", "--network=host"]
    options += ["--label", f"{PORT_LABEL}={port}"]
    if ENGINE == "podman":
        options += ["--systemd=always"]
    else:
        options += ["--cgroupns=host", "--tmpfs=/run", "-v", "/sys/fs/cgroup:/sys/fs/cgroup:rw"]
    for here, there in mounts.items():
        options += ["-v", f"{here}:{there}:ro"]
    engine("create", *options, image, "/sbin/init")
    sshd = f"-p {port} -o ListenAddress=127.0.0.1 -o HostKey=/etc/ssh/lab_host_key"
    copy_in(
        name,
        {
            "etc/pip.conf": (pip_conf, 0o644),
            "etc/default/ssh": (f'SSHD_OPTS="{sshd}"\n', 0o644),
            "etc/ssh/lab_host_key": (host_key.read_text(), 0o600),
            "root/.ssh/authorized_keys": (operator_key.with_suffix(".pub").read_text(), 0o600),
        },
    )


def refuse_another_port(name: str, port: int) -> None:
    there = engine(
        "inspect", "--format", f'{{{{index .Config.Labels "{PORT_LABEL}"}}}}', container(name)
    ).strip()
    if there != str(port):
        raise LabError(
            f"wanted: {name} on port {port} (SM120_DEMO_PORT for the demo); found: it was made for port {there}. "
            f"Set that one, or remove it first: make {name}-clean"
        )


def up(name: str, port: int, image: str | None = None, baked: bool = False) -> None:
    """Start a host; one of that name that exists is started again, not replaced."""
    if baked and not container_exists(name):
        image = bake()
    operator_key, host_key = keys()
    trust_host_key(port, host_key)
    if not container_exists(name):
        create(name, port, image or base_image(), host_key, operator_key)
    else:
        refuse_another_port(name, port)
    engine("start", container(name))
    wait_for_boot(name)
    known = f"-o UserKnownHostsFile={STATE / 'known_hosts'}"
    say(f"{name} is up: ssh -p {port} -i {operator_key} {known} root@127.0.0.1")


def wait_for_boot(name: str) -> None:
    end = time.monotonic() + BOOT_TIMEOUT_SECONDS
    query = [*engine_argv(), "exec", container(name), "systemctl", "is-system-running"]
    state = ""
    while time.monotonic() < end:
        state = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        if state in ("running", "degraded"):
            return
        time.sleep(0.3)
    raise LabError(
        f"wanted: {name} booted within {BOOT_TIMEOUT_SECONDS} s; found: systemd says {state or 'nothing'}. "
        f"Look at: {' '.join(engine_argv())} logs {container(name)}"
    )


def down(name: str) -> None:
    if container_exists(name):
        engine("rm", "-f", container(name))
        say(f"{name} removed")


def commit(name: str, image: str) -> None:
    """Stop a host and keep its files as an image for later hosts."""
    engine("stop", "-t", "10", container(name))
    engine("commit", "-q", container(name), image)
    say(f"{name} kept as {image}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def runtime_image() -> str:
    """The name of the image that carries the demo's runtime and model: one per content."""
    recipe = hashlib.sha256(base_image().encode())
    sources = [ROOT / "playbooks/runtime.yml", *(ROOT / "inventories/demo/group_vars").rglob("*.yml")]
    for role in ("sglang_runtime", "sglang_model"):
        sources += [path for path in (ROOT / "roles" / role).rglob("*") if path.suffix not in (".md", ".pyc")]
    for path in sorted(sources):
        if path.is_file():
            recipe.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return f"localhost/sm120-lab-runtime:{recipe.hexdigest()[:12]}"


@alone("bake")
def bake() -> str:
    """Make that image, by the playbook that installs runtime and model on any host; its name."""
    image = runtime_image()
    if image_exists(image):
        return image
    say(f"making the image {image}: the runtime, installed once for all test hosts (a minute or two)")
    down("bake")
    port = free_port()
    up("bake", port)
    try:
        playbook = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "inventories/demo"]
        done = subprocess.run(
            [*playbook, "playbooks/runtime.yml"],
            cwd=ROOT,
            env={**os.environ, "SM120_DEMO_PORT": str(port)},
        )
        if done.returncode:
            raise LabError(f"wanted: {image}; found: playbooks/runtime.yml failed, as told above")
        engine(
            "exec", container("bake"), "rm", "-rf", "/root/.cache", "/root/.ansible", "/root/.ansible_async"
        )
        commit("bake", image)
    finally:
        down("bake")
    return image


def shell(name: str) -> None:
    if not container_exists(name):
        raise LabError(f"wanted: a host {name}; found: none. Run: make {name}")
    sys.exit(subprocess.call([*engine_argv(), "exec", "-it", container(name), "bash", "-l"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("bootstrap", help="install the engine and mmdebstrap if they are missing")
    actions.add_parser("bake", help="make the image that carries the demo's runtime and model")
    start = actions.add_parser("up", help="start a host")
    start.add_argument("name")
    start.add_argument("--port", type=port_number, required=True, help="its ssh port on 127.0.0.1")
    start.add_argument("--image")
    start.add_argument("--baked", action="store_true", help="on the image that has the runtime and model")
    for action, text in (("down", "remove a host"), ("shell", "a root shell on a host")):
        actions.add_parser(action, help=text).add_argument("name")
    keep = actions.add_parser("commit", help="stop a host and keep its files as an image")
    keep.add_argument("name")
    keep.add_argument("image")
    known = {
        "bootstrap": bootstrap,
        "bake": bake,
        "up": up,
        "down": down,
        "shell": shell,
        "commit": commit,
    }
    try:
        given = vars(parser.parse_args())
        known[given.pop("action")](**given)
    except LabError as error:
        sys.exit(f"lab: {error}")


if __name__ == "__main__":
    main()
