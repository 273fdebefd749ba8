"""CUDA release sets by real pip and real uv without a network: wheels of their names and versions, and all but empty.

Of SGLang and FlashInfer they hold the files that gates live in, as released, so that gates can be opened between sets.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import ROOT, SUPPORT, Host, Run
from processes import watched_processes

sys.path.insert(0, str(SUPPORT))

sys.path.insert(0, str(ROOT / "tests"))

import wheels
import wheels_of_lock

LOCKS = {
    release: ROOT / f"roles/sglang_runtime/files/locks/{release}-cuda.txt" for release in ("0.5.9", "0.5.23")
}
PINS = {
    release: dict(line.split("==") for line in lock.read_text().splitlines() if not line.startswith("#"))
    for release, lock in LOCKS.items()
}
RELEASE = "0.5.23"
LOCKED = PINS[RELEASE]
FLASHINFER = {release: pins["flashinfer-python"] for release, pins in PINS.items()}
WHEELS, INDEX = "/srv/wheels", "/srv/index"
VENV = "/opt/air-gap/venv"
BROKEN = "raise ImportError('undefined symbol: _ZN3c1017RegisterOperatorsD1Ev')\n"
UV_VERSION = "0.13.9"


def put(host: Host, folder: Path, to: str) -> None:
    """Copy a folder's files to the host."""
    archive = folder.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(folder), "-cf", str(archive), "."], check=True)
    with host.ssh.open_sftp() as files:
        files.put(str(archive), "/srv/wheels.tar")
    host.sh(f"mkdir -p {to} && tar -C {to} -xf /srv/wheels.tar && rm /srv/wheels.tar")


def deliver(release: str, work: Path, folder: Path) -> None:
    """Wheels of SGLang and FlashInfer with their gated files; what the role imports of them are stand-ins."""
    # A module that is in sys.modules when its package has been imported is not loaded from its file.
    stub = "import sys, types\nsys.modules['sglang.srt.server_args'] = types.ModuleType('server_args')\n"
    empty = {
        "sglang": {"sglang/__init__.py": stub, "sglang/srt/__init__.py": ""},
        "flashinfer": {"flashinfer/__init__.py": ""},
    }
    for package, distribution in wheels.DISTRIBUTIONS.items():
        version = PINS[release][distribution]
        site = work / f"{package}-{version}"
        wheels.unpack(package, version, site)
        real = {
            str(path.relative_to(site)): path.read_text()
            for path in (site / package).rglob("*")
            if path.is_file()
        }
        wheels_of_lock.make(folder, distribution, version, {**real, **empty[package]})


@pytest.fixture(scope="module")
def host(make_host: Any, tmp_path_factory: pytest.TempPathFactory) -> Host:
    made: Host = make_host("runtime", 8, baked=False)
    folder = tmp_path_factory.mktemp("wheels")
    for release, lock in LOCKS.items():
        subprocess.run([sys.executable, SUPPORT / "wheels_of_lock.py", lock, folder], check=True)
        deliver(release, tmp_path_factory.mktemp("delivered"), folder)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder]
    subprocess.run([*command, "pip>=25,<27", f"uv=={UV_VERSION}"], check=True)
    put(made, folder, WHEELS)
    # The same as an index: PEP 503, a folder for each name.
    made.sh(
        f"cd {WHEELS} && for each in *.whl; do name=$(echo ${{each%%-*}} | tr A-Z_. a-z--); "
        f"mkdir -p {INDEX}/$name && ln $each {INDEX}/$name/; done"
    )
    made.sh(f"systemd-run --unit=index python3 -m http.server --bind 127.0.0.1 30195 --directory {INDEX}")
    made.variables = {"sglang_runtime_device": "cuda", "sglang_runtime_release": RELEASE}
    return made


def install(host: Host, venv: str = VENV, **given: Any) -> Run:
    options = {"sglang_runtime_venv": venv, **given}
    return host.play("--tags", "runtime", playbook="playbooks/runtime.yml", **options)


def packages(host: Host, venv: str) -> dict[str, str]:
    lines = host.sh(f"{venv}/bin/pip list --format freeze --disable-pip-version-check").splitlines()
    return dict(line.split("==") for line in lines)


def installed(host: Host, venv: str) -> dict[str, str]:
    return {name: version for name, version in packages(host, venv).items() if name in LOCKED}


def test_a_python_that_is_not_there_is_named(host: Host) -> None:
    run = install(host, sglang_runtime_python="python3.99")
    assert (run.rc, run.changed) == (2, 0), run.stdout
    assert "sglang_runtime_python=python3.99" in run.failures()[0]


def test_what_was_not_made_here_is_refused_and_outlives_a_teardown(host: Host) -> None:
    host.sh("mkdir /opt/mine && touch /opt/mine/pyvenv.cfg && echo precious > /opt/mine/notes.txt")
    run = install(host, "/opt/mine", sglang_runtime_wheel_dir=WHEELS)
    assert (run.rc, run.changed) == (2, 0), run.stdout
    assert "/opt/mine holds something else" in run.failures()[0]
    run = host.play(
        playbook="playbooks/teardown.yml", teardown_confirm=host.name, sglang_runtime_venv="/opt/mine"
    )
    assert run.rc == 0, run.stdout
    assert host.read("/opt/mine/notes.txt") == "precious\n"
    assert host.sh("ls /opt/mine").split() == ["notes.txt", "pyvenv.cfg"]


def test_a_disk_that_is_too_small_is_refused_before_anything(host: Host) -> None:
    host.sh("mkdir -p /opt/small && mount -t tmpfs -o size=200m none /opt/small")
    run = install(host, "/opt/small/venv", sglang_runtime_wheel_dir=WHEELS)
    assert (run.rc, run.changed) == (2, 0), run.stdout
    assert "200 MiB" in run.failures()[0]
    assert not host.exists("/opt/small/venv")


def test_sources_without_the_set_are_refused_with_nothing_installed(host: Host) -> None:
    host.sh(f"mkdir -p /srv/empty && ln {WHEELS}/pip-*.whl /srv/empty/")
    run = install(host, "/opt/none/venv", sglang_runtime_wheel_dir="/srv/empty")
    assert run.rc == 2, run.stdout
    assert len(run.failures()) == 1
    assert "torch==" in run.failures()[0]
    assert "torch" not in installed(host, "/opt/none/venv")


def test_kernels_for_another_torch_are_refused(host: Host, tmp_path: Path) -> None:
    wheels_of_lock.make(
        tmp_path, "sglang-kernel", LOCKED["sglang-kernel"], {"sgl_kernel/__init__.py": BROKEN}
    )
    good = f"{WHEELS}/sglang_kernel-{LOCKED['sglang-kernel']}-py3-none-any.whl"
    host.sh(f"cp {good} /srv/good.whl")
    try:
        put(host, tmp_path, WHEELS)
        run = install(host, sglang_runtime_wheel_dir=WHEELS)
        assert run.rc == 2, run.stdout
        assert len(run.failures()) == 1
        assert "undefined symbol: _ZN3c10" in run.failures()[0]
        assert "nobody" in run.failures()[0]
        run = install(host, sglang_runtime_wheel_dir=WHEELS)  # it does not pass by being there
        assert (run.rc, run.changed) == (2, 0), run.stdout
    finally:
        host.sh(f"rm -rf {VENV} && cp /srv/good.whl {good}")


def test_pip_from_a_folder(host: Host) -> None:
    """What another run began, and a kill of Ansible did not end, is waited for."""
    host.sh(
        "systemd-run --unit=begun flock /run/sglang-sm120-install.lock sh -c 'sleep 20; date +%s > /srv/ended'"
    )
    run = install(host, sglang_runtime_wheel_dir=WHEELS)
    assert run.rc == 0, run.stdout
    records = host.sh(f"stat -c %Y {VENV}/lib/python3.*/site-packages/torch-*.dist-info/RECORD").split()
    assert [int(written) >= int(host.read("/srv/ended")) for written in records] == [True]
    assert installed(host, VENV) == LOCKED
    names = [each["event_data"]["task"] for each in run.events if each["event"] == "runner_on_ok"]
    torch, rest = (
        next(i for i, name in enumerate(names) if word in name) for word in ("torch first", "(minutes")
    )
    assert torch < rest
    # Of the Python that was named: what Triton compiles against.
    assert host.exists("/usr/include/python3.11/Python.h")
    run = install(host, sglang_runtime_wheel_dir=WHEELS)
    assert (run.rc, run.changed) == (0, 0), run.stdout


def test_a_package_that_would_spoil_it_is_refused(host: Host, tmp_path: Path) -> None:
    wheels_of_lock.make(tmp_path, "flashinfer-jit-cache", "0.7.1")
    put(host, tmp_path, "/srv/stray")
    pip = f"{VENV}/bin/pip --disable-pip-version-check --quiet"
    host.sh(f"{pip} install --no-index --no-deps /srv/stray/*.whl")
    run = install(host, sglang_runtime_wheel_dir=WHEELS)
    assert (run.rc, run.changed) == (2, 0), run.stdout
    assert "flashinfer-jit-cache 0.7.1" in run.failures()[0]
    host.sh(f"{pip} uninstall --yes flashinfer-jit-cache")


def test_uv_from_a_mirror_whose_password_nobody_sees(host: Host) -> None:
    """uv itself is installed by pip, from the same URL."""
    venv, password = "/opt/mirror/venv", f"pass-{secrets.token_hex(12)}"
    url = f"http://ann:{password}@127.0.0.1:30195"
    given = {"sglang_runtime_installer": "uv", "sglang_runtime_index_url": url}
    with watched_processes(password, where=("cmdline", "environ")) as caught:
        run = install(host, venv, **given)
    assert run.rc == 0, run.stdout
    assert caught == set()
    holding = [
        path for path in run.folder.rglob("*") if path.is_file() and password.encode() in path.read_bytes()
    ]
    assert holding == []
    assert host.sh(f"grep -rlF {password} {venv} /root /var/log || true").split() == [f"{venv}/sources.txt"]
    assert host.sh(f"stat -c %a:%U {venv}/sources.txt").strip() == "600:root"
    assert installed(host, venv) == LOCKED
    assert UV_VERSION in host.sh(f"{venv}/uv/bin/uv --version")
    assert not host.exists("/root/.cache/uv")
    run = install(host, venv, **given)
    assert (run.rc, run.changed) == (0, 0), run.stdout


UPGRADED = "/opt/upgraded/venv"
UNIT = "sglang-old.service"
SERVER = f"[Service]\nExecStart={UPGRADED}/bin/python -c 'import time; time.sleep(100000)'\n"
KERNELS = {"0.5.9": "sgl-kernel", "0.5.23": "sglang-kernel"}
LIBRARY = {"0.5.9": "nvidia-cudnn-cu12", "0.5.23": "nvidia-cudnn-cu13"}
GATES = {"sglang_runtime_venv": UPGRADED}


def to(host: Host, release: str, *options: str) -> Run:
    given = {**GATES, "sglang_runtime_release": release, "sglang_runtime_wheel_dir": WHEELS}
    return host.play("--tags", "runtime", *options, playbook="playbooks/runtime.yml", **given)


def messages(run: Run) -> str:
    return "\n".join(str(told.get("msg", "")) for told in run.results("ansible.builtin.debug"))


def state(host: Host) -> tuple[str, str]:
    """Whether the server runs, and since which start."""
    shown = host.sh(f"systemctl show -P ActiveState -P InvocationID {UNIT}").split()
    return shown[0], "".join(shown[1:])


def open_gates(host: Host, release: str) -> set[str]:
    """Open the gates, with a server that runs; the files that differ from their wheels then."""
    host.sh(f"systemctl start {UNIT}")
    run = host.play(playbook="playbooks/gates.yml", sglang_runtime_release=release, **GATES)
    assert run.rc == 0, run.stdout
    assert state(host)[0] == "active"
    told = host.script("differing.py", UPGRADED)
    assert told["seen"] > 10
    return set(told["differing"])


def assert_whole(host: Host, release: str) -> None:
    """The set and nothing of the other one, every file as its RECORD has it."""
    found = packages(host, UPGRADED)
    assert found.items() >= PINS[release].items()
    other = "0.5.23" if release == "0.5.9" else "0.5.9"
    assert {KERNELS[other], LIBRARY[other]}.isdisjoint(found)
    assert ("flashinfer-cubin" in found) == ("flashinfer-cubin" in PINS[release])
    site = f"{UPGRADED}/lib/python3.11/site-packages"
    assert host.read(f"{site}/sgl_kernel/of") == KERNELS[release]
    assert host.read(f"{site}/nvidia/cudnn/lib/of") == LIBRARY[release]
    told = host.script("intact.py", UPGRADED)
    assert told["wrong"] == []
    assert told["seen"] > 500


def test_up_and_down_again_with_gates_open_and_a_server_running(host: Host, tmp_path: Path) -> None:
    run = to(host, "0.5.9")
    assert run.rc == 0, run.stdout
    assert_whole(host, "0.5.9")
    host.sh(f"cat > /etc/systemd/system/{UNIT} && systemctl daemon-reload", SERVER)
    assert len(open_gates(host, "0.5.9")) == 6

    # What does not fit is refused while everything is as it was.
    running = state(host)
    pip = f"{UPGRADED}/bin/pip --disable-pip-version-check --quiet"
    wheels_of_lock.make(tmp_path, "flashinfer-jit-cache", "0.6.3")
    put(host, tmp_path, "/srv/jit-cache")
    host.sh(f"{pip} install --no-index --no-deps /srv/jit-cache/*.whl")
    snapshot = host.snapshot()
    run = to(host, "0.5.23")
    assert (run.rc, run.changed) == (2, 0), run.stdout
    assert "flashinfer-jit-cache 0.6.3" in run.failures()[0]
    assert (host.snapshot(), state(host)) == (snapshot, running)
    host.sh(f"{pip} uninstall --yes flashinfer-jit-cache")

    run = to(host, "0.5.23", "--check", "--diff")
    assert run.rc == 0, run.stdout
    assert run.changed > 0
    for name in ("flashinfer-cubin", "sgl-kernel", "nvidia-cudnn-cu12"):
        assert name in messages(run)
    assert UNIT in run.stdout
    assert state(host) == running
    assert len(set(host.script("differing.py", UPGRADED)["differing"])) == 6

    run = to(host, "0.5.23")
    assert run.rc == 0, run.stdout
    assert_whole(host, "0.5.23")
    assert state(host)[0] == "inactive"
    assert UNIT in messages(run)
    assert host.script("differing.py", UPGRADED)["differing"] == {}
    assert to(host, "0.5.23").changed == 0
    edited = open_gates(host, "0.5.23")
    assert {path.partition("/")[0] for path in edited} == {"sglang"}
    assert {entry["version"] for entry in host.manifest()["entries"].values()} == {"0.5.23"}

    run = to(host, "0.5.9")
    assert run.rc == 0, run.stdout
    assert_whole(host, "0.5.9")
    assert state(host)[0] == "inactive"
    assert len(open_gates(host, "0.5.9")) == 6
    versions = {entry["version"] for entry in host.manifest()["entries"].values()}
    assert versions == {"0.5.9", FLASHINFER["0.5.9"]}

    run = host.play(playbook="playbooks/revert.yml", sglang_runtime_release="0.5.9", **GATES)
    assert run.rc == 0, run.stdout
    assert host.script("differing.py", UPGRADED)["differing"] == {}
    assert host.manifest()["entries"] == {}
    assert_whole(host, "0.5.9")


def test_what_an_older_upgrade_left_is_taken_away(host: Host) -> None:
    """Kernels under both names, as pip alone leaves them: the files are the last one's, whatever the versions say."""
    pip = f"{UPGRADED}/bin/pip --disable-pip-version-check --quiet"
    host.sh(
        f"{pip} install --no-index --no-deps --find-links {WHEELS} sglang-kernel=={LOCKED['sglang-kernel']}"
    )
    site = f"{UPGRADED}/lib/python3.11/site-packages"
    assert host.read(f"{site}/sgl_kernel/of") == "sglang-kernel"
    assert packages(host, UPGRADED).items() >= PINS["0.5.9"].items()
    run = to(host, "0.5.9")
    assert run.rc == 0, run.stdout
    assert_whole(host, "0.5.9")
    assert to(host, "0.5.9").changed == 0
