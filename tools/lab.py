#!/usr/bin/env python3
"""Systemd containers that stand in for GPU hosts: the demo and every test that needs a machine use these.

A lab host is a Debian container that boots systemd and is reached over ssh, exactly as a real host is. Nothing
is pulled from a registry: the base image is made here with mmdebstrap. State lives in .cache/lab; the ssh key,
the host key and known_hosts are made there, so that host keys are checked as on real hosts.

Environment:
  SM120_LAB_ENGINE   podman | docker (default: podman, docker if that is what there is)
  SM120_LAB_IMAGE    an image to use instead of the one made here (needs systemd, sshd, python3)
  SM120_LAB_SUITE    Debian release of the image made here (default: bookworm)
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".cache" / "lab"
SUITE = os.environ.get("SM120_LAB_SUITE", "bookworm")
PREFIX = "sm120-lab-"  # only containers and images of this name are ever touched
PACKAGES = [
    "systemd",
    "systemd-sysv",
    "dbus",
    "openssh-server",
    "sudo",
    "python3",
    "python3-venv",
    "python3-apt",
    "iproute2",
    "ca-certificates",
    "procps",
]
TOOLS = {"podman": "podman runc netavark", "mmdebstrap": "mmdebstrap debian-archive-keyring"}
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
BOOT_TIMEOUT_SECONDS = 60


class LabError(RuntimeError):
    """Something the user has to act on; the text is all that is shown."""


def say(text: str) -> None:
    print(f"lab: {text}", flush=True)


def root_prefix() -> list[str]:
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        raise LabError(
            "the lab needs root to make images and start systemd containers: run as root or install sudo"
        )
    return ["sudo"]


def call(*argv: str, quiet: bool = True, as_root: bool = False, stdin: str | None = None) -> str:
    """Run a program, return its output; on failure show what it said."""
    command = [*(root_prefix() if as_root else []), *argv]
    done = subprocess.run(
        command,
        input=stdin,
        text=True,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.PIPE if quiet else None,
    )
    if done.returncode:
        raise LabError(
            f"failed ({done.returncode}): {' '.join(argv)}\n{done.stdout or ''}{done.stderr or ''}".rstrip()
        )
    return done.stdout or ""


@functools.cache
def engine_argv() -> tuple[str, ...]:
    """The container engine with the settings that it needs on this machine."""
    wanted = os.environ.get("SM120_LAB_ENGINE", "")
    engine = wanted or next((name for name in ("podman", "docker") if shutil.which(name)), "podman")
    if engine not in ("podman", "docker"):
        raise LabError(f"SM120_LAB_ENGINE: wanted podman or docker, found {engine!r}")
    if engine == "docker":
        return (*root_prefix(), "docker")
    STATE.mkdir(parents=True, exist_ok=True)
    # Where nobody may raise limits, podman's defaults start nothing. What is asked for here is what this process
    # has, and of processes no more than podman leaves itself.
    hard = {name: resource.getrlimit(kind)[1] for name, kind in LIMITS.items()}
    asked = {"nofile": hard["nofile"], "nproc": min(hard["nproc"] % 2**63, 32768)}
    ulimits = ", ".join(f'"{name}={value}:{value}"' for name, value in asked.items() if value > 0)
    lines = ["[containers]", f"default_ulimits = [{ulimits}]", "[engine]"]
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        lines.append('runtime = "runc"')  # crun refuses hybrid cgroups
    conf = STATE / "containers.conf"
    conf.write_text("\n".join(lines) + "\n")
    return (*root_prefix(), "env", f"CONTAINERS_CONF={conf}", "podman")


def engine(*argv: str, **options: bool | str | None) -> str:
    return call(*engine_argv(), *argv, **options)  # type: ignore[arg-type]


def bootstrap() -> None:
    """Install the programs the lab needs, or say which are missing."""
    wanted = os.environ.get("SM120_LAB_ENGINE", "podman")
    missing = [
        name for name in TOOLS if shutil.which(name) is None and not (name == "podman" and wanted == "docker")
    ]
    if not missing:
        return
    packages = " ".join(TOOLS[name] for name in missing)
    if shutil.which("apt-get") is None:
        raise LabError(
            f"wanted: {', '.join(missing)}; found: neither them nor apt-get. Install them, then run this again."
        )
    say(f"installing {packages} (apt)")
    call("apt-get", "update", "-qq", as_root=True)
    call(
        "env",
        "DEBIAN_FRONTEND=noninteractive",
        "apt-get",
        "install",
        "-y",
        "-qq",
        "--no-install-recommends",
        *packages.split(),
        as_root=True,
    )


def image_exists(name: str) -> bool:
    return subprocess.run([*engine_argv(), "image", "inspect", name], capture_output=True).returncode == 0


def base_image() -> str:
    """The base image's name; made when it is not there."""
    given = os.environ.get("SM120_LAB_IMAGE")
    if given:
        return given
    recipe = hashlib.sha256(" ".join([SUITE, *PACKAGES]).encode()).hexdigest()[:12]
    name = f"localhost/{PREFIX}base:{SUITE}-{recipe}"
    if image_exists(name):
        return name
    say(f"making the base image {name} with mmdebstrap (about half a minute)")
    tarball = STATE / f"base-{recipe}.tar"
    STATE.mkdir(parents=True, exist_ok=True)
    try:
        call(
            "mmdebstrap",
            "--variant=minbase",
            f"--include={','.join(PACKAGES)}",
            SUITE,
            str(tarball),
            as_root=True,
        )
        engine("import", str(tarball), name)
    finally:
        call("rm", "-f", str(tarball), as_root=True)
    return name


def keys() -> tuple[Path, Path]:
    """(operator's key, host key): made once."""
    STATE.mkdir(parents=True, exist_ok=True)
    STATE.chmod(0o700)
    paths = STATE / "id_ed25519", STATE / "host_ed25519"
    for path in paths:
        if not path.exists():
            if shutil.which("ssh-keygen") is None:
                raise LabError(
                    "wanted: ssh-keygen; found: none. Install openssh-client, then run this again."
                )
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "sm120-lab", "-f", str(path))
    return paths


def pip_settings(python: str = sys.executable) -> tuple[str, list[tuple[str, str]]]:
    """The controller's pip settings as (pip.conf, [(path here, path there)]): a host that installs what the
    controller can install needs its index, its local folders and its certificates."""
    keep = {
        "index-url",
        "extra-index-url",
        "find-links",
        "no-index",
        "cert",
        "trusted-host",
        "constraint",
        "timeout",
        "proxy",
    }
    settings: dict[str, str] = {}
    for line in call(python, "-m", "pip", "config", "list").splitlines():
        match = re.fullmatch(r"(?::env:|global|install)\.([\w-]+)='(.*)'", line.strip())
        if match and match[1].removeprefix("default-") in keep:
            settings[match[1].removeprefix("default-")] = match[2]
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

    conf = ["[global]", "disable-pip-version-check = 1"]
    for key, value in settings.items():
        words = [there(word) for word in re.split(r"\s+|\\n", value)]
        conf.append(f"{key} = " + "\n    ".join(words))
    return "\n".join(conf) + "\n", list(mounts.items())


def container_exists(name: str) -> bool:
    return (
        subprocess.run(
            [*engine_argv(), "container", "inspect", PREFIX + name], capture_output=True
        ).returncode
        == 0
    )


def known_hosts_line(port: int, host_key: Path) -> str:
    return f"[127.0.0.1]:{port} {host_key.with_suffix('.pub').read_text().split(' sm120')[0]}\n"


def copy_in(container: str, files: dict[str, tuple[str, int]]) -> None:
    """Lay files into a container that is not running yet, as root's."""
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path, (text, mode) in files.items():
                if path.startswith("root/"):
                    folder = tarfile.TarInfo(str(Path(path).parent))
                    folder.type, folder.mode = tarfile.DIRTYPE, 0o700
                    archive.addfile(folder)
                entry = tarfile.TarInfo(path)
                entry.mode, entry.size = mode, len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))
        subprocess.run([*engine_argv(), "cp", "-", f"{container}:/"], input=buffer.getvalue(), check=True)


def up(name: str, port: int, image: str | None, volumes: list[str]) -> None:
    """Start a lab host; an existing one of that name is started again, not replaced."""
    operator_key, host_key = keys()
    known = STATE / "known_hosts"
    lines = set(known.read_text().splitlines(keepends=True)) if known.exists() else set()
    known.write_text("".join(sorted(lines | {known_hosts_line(port, host_key)})))
    container = PREFIX + name
    if container_exists(name):
        engine("start", container)
    else:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise LabError(
                    f"port {port} for ssh to {name} is taken on this machine ({error}); choose another"
                ) from error
        pip_conf, mounts = pip_settings()
        # Host networking: in many sandboxes it is all there is. sshd listens on loopback only.
        options = ["--privileged", "--network=host"]
        options += (
            ["--systemd=always"]
            if engine_argv()[-1] == "podman"
            else ["--cgroupns=host", "--tmpfs=/run", "-v", "/sys/fs/cgroup:/sys/fs/cgroup:rw"]
        )
        for here, there in mounts:
            options += ["-v", f"{here}:{there}:ro"]
        for volume in volumes:
            options += ["-v", volume]
        engine(
            "create", "--name", container, "--hostname", name, *options, image or base_image(), "/sbin/init"
        )
        copy_in(
            container,
            {
                "etc/pip.conf": (pip_conf, 0o644),
                "etc/default/ssh": (
                    f'SSHD_OPTS="-p {port} -o ListenAddress=127.0.0.1 -o HostKey=/etc/ssh/lab_host_key"\n',
                    0o644,
                ),
                "etc/ssh/lab_host_key": (host_key.read_text(), 0o600),
                "root/.ssh/authorized_keys": (operator_key.with_suffix(".pub").read_text(), 0o600),
            },
        )
        engine("start", container)
    wait_for_boot(name)
    say(f"{name} is up: ssh -p {port} -i {operator_key} -o UserKnownHostsFile={known} root@127.0.0.1")


def wait_for_boot(name: str) -> None:
    end = time.monotonic() + BOOT_TIMEOUT_SECONDS
    state = ""
    while time.monotonic() < end:
        argv = [*engine_argv(), "exec", PREFIX + name, "systemctl", "is-system-running"]
        state = subprocess.run(argv, capture_output=True, text=True).stdout.strip()
        if state in ("running", "degraded"):
            return
        time.sleep(0.3)
    raise LabError(
        f"{name} did not boot within {BOOT_TIMEOUT_SECONDS} s (systemd says {state or 'nothing'}); look at: {' '.join(engine_argv())} logs {PREFIX}{name}"
    )


def down(name: str) -> None:
    if container_exists(name):
        engine("rm", "-f", "-t", "2", PREFIX + name) if engine_argv()[-1] == "podman" else engine(
            "rm", "-f", PREFIX + name
        )
        say(f"{name} removed")


def commit(name: str, image: str) -> None:
    """Keep a host's files as an image for later hosts."""
    engine("stop", "-t", "10", PREFIX + name)
    engine("commit", "-q", PREFIX + name, image)
    say(f"{name} kept as {image}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("bootstrap", help="install the engine and mmdebstrap if they are missing")
    actions.add_parser("image", help="make the base image if it is missing")
    start = actions.add_parser("up", help="start a host")
    start.add_argument("name")
    start.add_argument("--port", type=int, required=True, help="its ssh port on 127.0.0.1")
    start.add_argument("--image")
    start.add_argument("--volume", action="append", default=[], metavar="HERE:THERE[:ro]")
    for action, text in (("down", "remove a host"), ("shell", "a root shell on a host")):
        actions.add_parser(action, help=text).add_argument("name")
    keep = actions.add_parser("commit", help="stop a host and keep its files as an image")
    keep.add_argument("name")
    keep.add_argument("image")
    arguments = parser.parse_args()
    try:
        match arguments.action:
            case "bootstrap":
                bootstrap()
            case "image":
                base_image()
            case "up":
                up(arguments.name, arguments.port, arguments.image, arguments.volume)
            case "down":
                down(arguments.name)
            case "commit":
                commit(arguments.name, arguments.image)
            case "shell":
                argv = [*engine_argv(), "exec", "-it", PREFIX + arguments.name, "bash", "-l"]
                os.execvp(argv[0], argv)
    except LabError as error:
        sys.exit(f"lab: {error}")


if __name__ == "__main__":
    main()
