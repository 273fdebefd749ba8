"""The CUDA release set by real pip and real uv without a network: wheels of its names and versions, and empty."""

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

import wheels_of_lock

RELEASE = "0.5.23"
LOCK = ROOT / f"roles/sglang_runtime/files/locks/{RELEASE}-cuda.txt"
LOCKED = dict(line.split("==") for line in LOCK.read_text().splitlines() if not line.startswith("#"))
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


@pytest.fixture(scope="module")
def host(make_host: Any, tmp_path_factory: pytest.TempPathFactory) -> Host:
    made: Host = make_host("runtime", 8, baked=False)
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, SUPPORT / "wheels_of_lock.py", LOCK, folder], check=True)
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


def installed(host: Host, venv: str) -> dict[str, str]:
    lines = host.sh(f"{venv}/bin/pip list --format freeze --disable-pip-version-check").splitlines()
    found = dict(line.split("==") for line in lines)
    return {name: version for name, version in found.items() if name in LOCKED}


def test_a_python_that_is_not_there_is_named(host: Host) -> None:
    run = install(host, sglang_runtime_python="python3.99")
    assert (run.rc, run.changed) == (2, 0), run.stdout
    assert "sglang_runtime_python=python3.99" in run.failures()[0]


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
    put(host, tmp_path, WHEELS)
    run = install(host, sglang_runtime_wheel_dir=WHEELS)
    assert run.rc == 2, run.stdout
    assert len(run.failures()) == 1
    assert "undefined symbol: _ZN3c10" in run.failures()[0]
    assert "nobody" in run.failures()[0]
    run = install(host, sglang_runtime_wheel_dir=WHEELS)  # it does not pass by being there
    assert (run.rc, run.changed) == (2, 0), run.stdout
    host.sh(f"rm -r {VENV} && cp /srv/good.whl {good}")


def test_pip_from_a_folder(host: Host) -> None:
    run = install(host, sglang_runtime_wheel_dir=WHEELS)
    assert run.rc == 0, run.stdout
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
