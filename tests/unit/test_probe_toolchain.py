"""The probe's toolchain stage with the compilers that hosts have: the shipped program, with a made-up nvcc."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.sm120.probe import Probe, Settings
from ansible.module_utils.sm120.probe_run import Account

ROOT = Path(__file__).resolve().parents[2]
# Answers as nvcc does: an architecture that it does not know ends the compilation, before anything is written.
NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo 'Cuda compilation tools, release {release}, V{release}.1'; exit 0 ;;
  *{unknown}*) echo "nvcc fatal   : Unsupported gpu architecture '{unknown}'" >&2; exit 1 ;;
esac
"""


def probe(folder: Path, flashinfer: str, release: str, unknown: str, **environment: str) -> dict[str, Any]:
    home, tools = folder / "cuda", folder / "tools"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include/cuda_runtime.h").touch()
    tools.mkdir()
    for path, text in (
        (home / "bin/nvcc", NVCC.format(release=release, unknown=unknown)),
        (tools / "ninja", "#!/bin/sh\necho 1.13.0\n"),
        (tools / "c++", "#!/bin/sh\necho c++ 12\n"),
        (tools / "nvidia-smi", "#!/bin/sh\nexit 1\n"),
    ):
        path.write_text(text)
        path.chmod(0o755)
    settings = Settings(
        python=sys.executable,
        program=ROOT / "roles/fusion_probe/files/program",
        work=folder,
        logs=folder,
        account=Account.of(getpass.getuser()),
        environment={
            "PATH": f"{tools}:/usr/bin:/bin",
            "HOME": str(folder),
            "CUDA_HOME": str(home),
            **environment,
        },
        ranks=1,
        stages=("toolchain",),
    )
    facts = {"packages": {"flashinfer-python": {"version": flashinfer, "root": ""}}}
    return Probe(settings, facts, lambda text: None).run()


@pytest.mark.parametrize(
    ("flashinfer", "release", "unknown"),
    [("0.6.3", "12.4", "compute_120a"), ("0.6.12", "12.8", "compute_120f")],
)
def test_a_compiler_that_does_not_know_sm120_is_refused(
    tmp_path: Path, flashinfer: str, release: str, unknown: str
) -> None:
    failure = probe(tmp_path, flashinfer, release, unknown)["failure"]
    assert (failure["stage"], failure["cause"]) == ("toolchain", "toolchain")
    for word in (f"{tmp_path}/cuda/bin/nvcc", f"CUDA {release}", unknown, "cuda_toolkit_method: pip"):
        assert word in failure["text"]


def test_no_compiler_names_the_variable_to_set(tmp_path: Path) -> None:
    failure = probe(tmp_path, "0.6.12", "12.9", "none", CUDA_HOME=f"{tmp_path}/none")["failure"]
    assert f"no compiler at {tmp_path}/none/bin/nvcc: set cuda_toolkit_path," in failure["text"]
    options = yaml.safe_load((ROOT / "roles/cuda_toolkit/meta/argument_specs.yml").read_text())
    assert "cuda_toolkit_path" in options["argument_specs"]["main"]["options"]


def test_one_that_knows_it_is_not(tmp_path: Path) -> None:
    report = probe(tmp_path, "0.6.12", "12.9", "compute_130f")
    assert report["failure"] is None
    (stage,) = (each for each in report["stages"] if each["name"] == "toolchain")
    assert (stage["status"], stage["facts"]["nvcc"]) == ("passed", "12.9")
