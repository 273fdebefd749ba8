#!/usr/bin/env python3
"""Run these tests on a lab host, once for each release of SGLang, installed by the role that installs it anywhere.

    on_lab.py [--keep] [--pytest ARGUMENTS] RELEASE ...

--keep leaves the host, so that the next call finds what this one has installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from hosts import LAB, ROOT, VENV, Host  # noqa: E402

NAME, SSH_PORT, SERVER_PORT = "faults", 22122, 30230
BAKED = "0.5.9"
COPY, TESTER, MODEL = "/srv/sm120", "/srv/pytest", "/srv/models/demo"
TESTS = "tests/integration/real_server"


def install(host: Host, release: str) -> str:
    """The release's Python on the host."""
    venv = VENV if release == BAKED else f"{VENV}-{release}"
    run = host.play(
        playbook="playbooks/runtime.yml", sglang_runtime_release=release, sglang_runtime_venv=venv
    )
    if run.rc:
        sys.exit(run.stdout)
    return f"{venv}/bin/python"


def lay_down_tests(host: Host) -> None:
    host.sh(
        f"test -x {TESTER}/bin/pytest || (python3 -m venv {TESTER} && {TESTER}/bin/pip install --quiet 'pytest>=8.3')"
    )
    host.sh(f"mkdir -p {COPY}/module_utils/sm120 {COPY}/{TESTS}")
    with host.ssh.open_sftp() as sftp:
        for path in [*ROOT.glob("module_utils/sm120/*.py"), *HERE.glob("*.py")]:
            sftp.put(str(path), f"{COPY}/{path.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="+")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS")
    given = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        host = Host(NAME, SSH_PORT, SERVER_PORT, Path(folder), anew=not given.keep)
        try:
            lay_down_tests(host)
            for release in given.releases:
                python = install(host, release)
                print(f"SGLang {release}", flush=True)
                # A run of its own over ssh: what it prints is seen as it comes.
                command = (
                    f"cd {COPY} && SGLANG_TEST_PYTHON={python} SGLANG_TEST_MODEL={MODEL} {TESTER}/bin/pytest -v "
                    f"--durations=0 --durations-min=1 -p no:cacheprovider {TESTS} {given.pytest}"
                )
                ssh = ["ssh", "-p", str(SSH_PORT), "-i", str(LAB / "id_ed25519")]
                ssh += ["-o", f"UserKnownHostsFile={LAB / 'known_hosts'}", "root@127.0.0.1", command]
                if subprocess.run(ssh, check=False).returncode:
                    failed.append(release)
        finally:
            host.ssh.close() if given.keep else host.remove()
    if failed:
        sys.exit(f"failed with SGLang {', '.join(failed)}")


if __name__ == "__main__":
    main()
