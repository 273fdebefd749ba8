"""What is added to NVIDIA's wheels, and taken away again, on a folder like the wheels make it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles" / "cuda_toolkit" / "files" / "toolkit.py"
PACKAGES = {"nvidia-cuda-nvcc": "13.0.88", "nvidia-cuda-runtime": "13.0.96"}
NVCC = """\
#!/bin/sh
case $1 in
--version) echo 'Cuda compilation tools, release 13.0, V13.0.88';;
--list-gpu-arch) printf 'compute_90\\ncompute_120\\n';;
*) exit 1;;
esac
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    home = site / "nvidia" / "cu13"
    for folder in ("bin", "include", "lib"):
        (home / folder).mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    for name in ("libcudart.so.13", "libcublas.so.13", "libcudadevrt.a"):
        (home / "lib" / name).touch()
    for name, version in (("nvidia_cuda_nvcc", "13.0.88"), ("nvidia_cuda_runtime", "13.5.37")):
        (site / f"{name}-{version}.dist-info").mkdir()
    return tmp_path


def ask(action: str, venv: Path, **given: Any) -> dict[str, Any]:
    asked = {
        "method": "pip",
        "venv": str(venv),
        "path": "",
        "folder": "cu13",
        "packages": PACKAGES,
        "names": [],
        **given,
    }
    command = [sys.executable, "-I", str(SCRIPT), action, json.dumps(asked)]
    answer: dict[str, Any] = json.loads(subprocess.check_output(command, text=True))
    return answer


def snapshot(venv: Path) -> set[str]:
    return {str(path) for path in venv.rglob("*")}


def test_looking_changes_nothing_and_names_what_is_wrong(venv: Path) -> None:
    before = snapshot(venv)
    found = ask("look", venv)
    assert snapshot(venv) == before
    assert found["home"] == str(venv / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13")
    assert found["nvcc"] == "13.0"
    assert found["wrong"] == {"nvidia-cuda-runtime": "13.5.37"}
    assert len(found["links"]) == 4


def test_completing_links_and_stripping_restores_the_folder(venv: Path) -> None:
    before = snapshot(venv)
    assert len(ask("complete", venv)["links"]) == 4
    home = Path(ask("look", venv)["home"])
    assert os.readlink(home / "lib64") == "lib"
    assert os.readlink(home / "lib" / "libcudart.so") == "libcudart.so.13"
    assert (home / "lib64" / "stubs" / "libcuda.so").is_file()
    assert ask("look", venv)["links"] == []
    assert ask("complete", venv)["links"] == []
    assert len(ask("strip", venv)["links"]) == 4
    assert snapshot(venv) == before


def test_a_dangling_link_is_made_again(venv: Path) -> None:
    home = Path(ask("look", venv)["home"])
    (home / "lib" / "libcudart.so").symlink_to("libcudart.so.12")
    ask("complete", venv)
    assert os.readlink(home / "lib" / "libcudart.so") == "libcudart.so.13"


def test_no_venv_is_no_toolkit(tmp_path: Path) -> None:
    found = ask("look", tmp_path / "nowhere")
    assert (found["venv"], found["home"], found["nvcc"]) == (False, "", "")
    assert found["wrong"] == dict.fromkeys(PACKAGES, "")


def test_an_existing_toolkit_is_handed_on_by_its_real_path(venv: Path, tmp_path: Path) -> None:
    real = Path(ask("look", venv)["home"])
    (tmp_path / "cuda").symlink_to(real)
    before = snapshot(venv)
    found = ask("look", venv, method="existing", path=str(tmp_path / "cuda"))
    assert found["home"] == str(real)
    assert ask("complete", venv, method="existing", path=str(tmp_path / "cuda"))["links"] == []
    assert snapshot(venv) == before
    assert ask("look", venv, method="existing", path=str(tmp_path / "none"))["home"] == ""


def test_architectures_are_asked_of_the_compiler_itself(venv: Path, tmp_path: Path) -> None:
    found = ask("look", venv)
    assert found["architectures"] == ["compute_90", "compute_120"]
    nvcc = Path(found["home"]) / "bin" / "nvcc"
    nvcc.write_text(NVCC.replace("--list-gpu-arch", "--none"))  # too old to know the option
    found = ask("look", venv)
    assert (found["nvcc"], found["architectures"]) == ("13.0", [])


def test_packages_of_the_method_apt_are_asked_of_dpkg(venv: Path, tmp_path: Path) -> None:
    home = ask("look", venv)["home"]
    found = ask("look", venv, method="apt", path=home, names=["dpkg", "cuda-nvcc-0-0"])
    assert (found["home"], found["links"]) == (home, [])
    assert found["wrong"] == {"cuda-nvcc-0-0": ""}


def test_a_compiler_that_hangs_is_none_that_can_be_used(venv: Path) -> None:
    nvcc = venv / "lib/python3.11/site-packages/nvidia/cu13/bin/nvcc"
    nvcc.write_text("#!/bin/sh\nexec sleep 60\n")
    script = venv / "toolkit.py"
    text = SCRIPT.read_text()
    assert text.count("TOOL_SECONDS = 120") == 1
    script.write_text(text.replace("TOOL_SECONDS = 120", "TOOL_SECONDS = 1"))
    asked = {"method": "pip", "venv": str(venv), "path": "", "folder": "cu13", "packages": {}, "names": []}
    command = [sys.executable, "-I", str(script), "look", json.dumps(asked)]
    told = json.loads(subprocess.check_output(command, text=True, timeout=30))
    assert (told["nvcc"], told["architectures"]) == ("", [])
