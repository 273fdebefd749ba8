"""Packages are found wherever they live, without being imported, and what they were is proved."""

from __future__ import annotations

import base64
import hashlib
import json
import pwd
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.sm120 import defeats, packages, units, versions
from ansible.module_utils.sm120.planning import compare_command
from ansible.module_utils.sm120.survey import FileState
from gates_driver import Gates, RunModule

BOOBY_TRAP = "raise SystemExit('imported')\n"


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """What pip leaves of a wheel."""
    rows = []
    for relative, text in files.items():
        (site / relative).parent.mkdir(parents=True, exist_ok=True)
        (site / relative).write_text(text)
        digest = hashlib.sha256(text.encode()).digest()
        rows.append(f"{relative},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},1")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: decoy\n"
    )
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with both packages, neither of which can be imported."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    install(site, "sglang", "0.5.9", {"sglang/__init__.py": BOOBY_TRAP, "sglang/a.py": "1"})
    install(site, "flashinfer-python", "0.6.3+cu130", {"flashinfer/__init__.py": BOOBY_TRAP})
    return folder


def test_found_from_the_interpreter(environment: Path) -> None:
    path = packages.search_path(str(environment / "bin/python"))
    sglang, flashinfer = (packages.by_interpreter(name, path) for name in ("sglang", "flashinfer"))
    assert sglang is not None
    assert flashinfer is not None
    assert (sglang.version, sglang.source, sglang.root.name) == ("0.5.9", "wheel", "sglang")
    assert flashinfer.version == "0.6.3+cu130"
    assert packages.delivered(sglang, "sglang/a.py") == (hashlib.sha256(b"1").hexdigest(), None)
    assert packages.delivered(sglang, "sglang/b.py") is None


def test_missing_twice_and_damaged(environment: Path) -> None:
    site = next((environment / "lib").glob("python*/site-packages"))
    assert packages.by_interpreter("sglang", (site.parent,)) is None
    (site / "sglang-0.5.9.dist-info/RECORD").write_text("")
    with pytest.raises(packages.PackageProblem, match="RECORD"):
        packages.by_interpreter("sglang", (site,))
    install(site, "SGLang", "0.5.8", {})
    with pytest.raises(packages.PackageProblem, match="twice"):
        packages.by_interpreter("sglang", (site,))


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout in SGLang's layout."""
    project = tmp_path / "checkout"
    package = project / "python/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BOOBY_TRAP)
    (package / "version.py").write_text('__version__ = "0.5.9"\n')
    (package / "a.py").write_text("1\n")
    git(tmp_path, "init", "-q", str(project))
    git(project, "add", ".")
    git(project, "commit", "-qm", "x")
    return project


def test_editable_checkout_is_followed_and_git_tells_what_was_delivered(
    environment: Path, checkout: Path
) -> None:
    site = next((environment / "lib").glob("python*/site-packages"))
    info = site / "sglang-0.5.9.dist-info"
    url = f"file://{checkout}/python"
    (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": url}))
    found = packages.by_interpreter("sglang", (site,))
    assert found is not None
    assert (found.root, found.source) == (checkout / "python/sglang", "git")
    (checkout / "python/sglang/a.py").write_text("dirty\n")
    assert packages.delivered(found, "sglang/a.py") == (hashlib.sha256(b"1\n").hexdigest(), b"1\n")
    assert packages.delivered(found, "sglang/b.py") is None


def test_a_root_in_a_checkout_tells_its_version(checkout: Path) -> None:
    found = packages.by_root("sglang", checkout / "python/sglang")
    assert (found.version, found.source) == ("0.5.9", "git")


@pytest.mark.parametrize("root", ["missing/sglang", "checkout/python"])
def test_a_root_that_is_no_package_is_named(checkout: Path, root: str) -> None:
    with pytest.raises(packages.PackageProblem, match=root):
        packages.by_root("sglang", checkout.parent / root)


def test_a_root_that_nothing_vouches_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("")
    with pytest.raises(packages.PackageProblem, match="nothing proves"):
        packages.by_root("sglang", tmp_path / "sglang")


def test_gates_of_a_checkout(make_site: Any, run_module: RunModule) -> None:
    gates = Gates(run_module, make_site("0.5.9", "0.6.3"))
    for info in gates.site.glob("sglang-*.dist-info"):
        info.rename(gates.site / "unused")
    (gates.site / "sglang/version.py").write_text('__version__ = "0.5.9"\n')
    git(gates.site, "init", "-q", ".")
    git(gates.site, "add", "-A")
    git(gates.site, "commit", "-qm", "x")
    gates.apply()
    assert gates.info()["packages"]["sglang"]["source"] == "git"
    assert gates.states()["fusion.runtime"] == "open"
    gates.apply("absent")
    status = subprocess.run(
        ["git", "-C", str(gates.site), "status", "--porcelain"], check=True, capture_output=True, text=True
    )
    assert status.stdout == ""
    (gates.site / "sglang/srt/server_args.py").write_text("")
    assert gates.states()["fusion.auto_enable"] == "drifted"
    assert "git -C" in gates.info()["problems"][0]


@pytest.mark.parametrize("vendored", [False, True])
def test_packaging_is_taken_from_the_examined_environment(tmp_path: Path, vendored: bool) -> None:
    import packaging

    home = tmp_path / "site" / ("pip/_vendor/packaging" if vendored else "packaging")
    home.parent.mkdir(parents=True)
    home.symlink_to(Path(packaging.__file__).parent)
    root = Path(versions.__file__).parents[2]
    program = f"""
import sys
sys.path = [{str(root)!r}] + [each for each in sys.path if "site-packages" not in each]
from pathlib import Path
from module_utils.sm120.versions import PackagingMissing, Ranges
try:
    Ranges()
except PackagingMissing as error:
    assert "python3-packaging" in str(error)
else:
    raise SystemExit("packaging came from somewhere else")
ranges = Ranges([Path({str(tmp_path / "empty")!r}), Path({str(tmp_path / "site")!r})])
print(ranges.contains(">=0.6.0,<0.6.17", "0.6.16.post4"), ranges.contains(">=0.6.17", "0.6.3+cu130"))
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.parametrize(
    ("versions_", "version", "inside"),
    [
        (">=0.6.0,<0.6.10", "0.6.9", True),
        (">=0.6.0,<0.6.10", "0.6.9.post1", True),
        (">=0.6.0,<0.6.10", "0.6.10", False),
        (">=0.6.0,<0.6.17", "0.6.16.post4+cu130", True),
        (">=0.6.0,<0.6.17", "0.6.17rc1", False),
        (">=0.6.17", "0.6.17rc1", False),
        (">=0.5.8,<0.5.19", "0.5.10.dev12+gabc", True),
    ],
)
def test_ranges(versions_: str, version: str, inside: bool) -> None:
    assert versions.Ranges().contains(versions_, version) is inside


def test_units_that_start_from_the_environment(tmp_path: Path) -> None:
    venv_ = tmp_path / "venv"
    system = tmp_path / "system"
    texts = {
        "a.service": f"[Service]\nExecStart={venv_}/bin/python -m x\n",
        "b.service": f'[Service]\nExecStart=-"{venv_}/bin/python" x\n',
        "c.service": f"[Service]\nExecStart={venv_}2/bin/python x\nEnvironment=A={venv_}/\n",
        "d.service": "[Service]\nExecStart=/bin/true\n",
        "d.service.d/x.conf": f"[Service]\nExecStart=\nExecStart={venv_}/bin/python\n",
        "e@.service": f"[Service]\nExecStart={venv_}/bin/python %i\n",
        "multi-user.target.wants/e@one.service": "",
        "f.timer": f"ExecStart={venv_}/bin/python\n",
    }
    packaged = tmp_path / "packaged"
    here = {
        "g.service": f"[Service]\nExecStart={tmp_path}/link/python -m x\n",
        "h.service": f"[Service]\nExecStart={tmp_path}/bin/serve\n",
        "i.service": f"[Service]\nExecStart=/usr/bin/numactl -N 0 \\\n  {venv_}/bin/python -m x\n",
        "j.service": f"[Service]\nExecStart={tmp_path}/loop\n",
        # Another unit of this name comes first.
        "d2.service": f"[Service]\nExecStart={venv_}/bin/python\n",
        "k@.service": f"[Service]\nExecStart={venv_}/bin/python %i\n",
    }
    texts |= {"d2.service": "[Service]\nExecStart=/bin/true\n", "x.target.wants/k@two.service": ""}
    (venv_ / "bin").mkdir(parents=True)
    (venv_ / "pyvenv.cfg").touch()
    (venv_ / "bin/python").symlink_to("/usr/bin/python3")
    (tmp_path / "link").symlink_to(venv_ / "bin")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/serve").symlink_to("../link/python")
    (tmp_path / "loop").symlink_to("loop")
    packaged.mkdir()
    for name, text in here.items():
        (packaged / name).write_text(text)
    for name, text in texts.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text)
    found = units.units_of(venv_, [system, tmp_path / "missing"])
    assert found == ["a.service", "b.service", "d.service", "e@one.service"]
    found += ["g.service", "h.service", "i.service", "k@two.service"]
    assert units.units_of(venv_, [system, packaged]) == found
    (tmp_path / "other").symlink_to(venv_)
    assert units.units_of(tmp_path / "other", [system, packaged]) == found


def test_a_python_without_an_environment_of_its_own_has_only_servers_as_units(tmp_path: Path) -> None:
    texts = {
        "a.service": "[Service]\nExecStart=/usr/sbin/sshd -D\n",
        "b.service": "[Service]\nExecStart=/usr/bin/python3 -m sglang.launch_server\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert units.units_of(Path("/usr"), [tmp_path]) == ["b.service"]


@pytest.mark.parametrize("text", ["import time; time.sleep(9)", "print('hello')"])
def test_a_python_that_hangs_or_chatters_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    python, run = tmp_path / "python", subprocess.run
    python.write_text(f"#!{sys.executable}\n{text}\n")
    python.chmod(0o755)
    if "sleep" in text:
        monkeypatch.setattr(subprocess, "run", lambda *words, **given: run(*words, **{**given, "timeout": 1}))
    with pytest.raises(packages.PackageProblem, match=re.escape(str(python))):
        packages.search_path(str(python))
    with pytest.raises(packages.PackageProblem, match="does not run"):
        packages.search_path(str(tmp_path / "none"))
    if "sleep" in text:
        assert defeats.cuda_release(python) is None


def test_what_differs_from_the_package_is_shown_by_one_command_as_often_as_it_is_run(tmp_path: Path) -> None:
    """A pip that, like the real one, leaves a target alone in which the package is already."""
    python = tmp_path / "a python"
    python.write_text(
        '#!/bin/sh\n[ -e "$7/sglang" ] || { mkdir "$7/sglang"; echo delivered > "$7/sglang/a b.py"; }\n'
    )
    python.chmod(0o755)
    package = packages.Package("sglang", "0.5.9", tmp_path / "sglang", "wheel")
    file = FileState(package, "sglang/a b.py", None, None, None, None, None)
    command = compare_command(package, file, str(python))
    assert "\n" not in command
    file.path.parent.mkdir()
    for text, code in (("delivered\n", 0), ("mine\n", 1)):
        file.path.write_text(text)
        done = subprocess.run(
            ["sh", "-c", command],
            env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, "mine" in done.stdout) == (code, bool(code)), done.stderr


def test_where_the_units_of_an_environment_keep_kernels(tmp_path: Path) -> None:
    venv_, system = tmp_path / "venv", tmp_path / "system"
    venv_.mkdir()
    (venv_ / "pyvenv.cfg").touch()
    (system / "plain.service.d").mkdir(parents=True)
    (tmp_path / "environment").write_text(
        '# ours\nHOME="/var/lib/a"\n;it\'s theirs\nFLASHINFER_WORKSPACE_BASE="/srv/a b"\nPATH="/bin"\n'
    )
    start = f"ExecStart={venv_}/bin/python -m x\n"
    (system / "file.service").write_text(f"[Service]\n{start}EnvironmentFile=-{tmp_path}/environment\n")
    (system / "plain.service").write_text(f"[Service]\n{start}User=root\n")
    (system / "plain.service.d/own.conf").write_text(
        '[Service]\nEnvironment="A=b" FLASHINFER_WORKSPACE_BASE=/srv/c\n'
    )
    (system / "long.service").write_text(
        f"[Service]\n{start}Environment=A=b#1 HOME=/ \\\n  # ours\n  FLASHINFER_WORKSPACE_BASE=/srv/d#1\n"
    )
    (system / "odd.service").write_text(f'[Service]\n{start}Environment="open\nEnvironment=HOME=%h\n')
    (system / "other.service").write_text("[Service]\nExecStart=/bin/x\nEnvironment=HOME=/home/other\n")
    root = pwd.getpwnam("root").pw_dir
    assert units.cache_bases(venv_, [system]) == sorted(
        {root, "/srv/a b", "/srv/c", "/srv/d#1", "/var/lib/a"}
    )
