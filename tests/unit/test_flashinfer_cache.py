"""The purge removes compiled code, and nothing that is not proved to be that."""

from __future__ import annotations

import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashinfer_cache
import pytest
from ansible.module_utils.sm120 import jit_cache
from conftest import RunModule

MARKER = "0.6.3/120a/cached_ops/trtllm_comm/trtllm_comm.so"


def fill(base: Path, *names: str) -> Path:
    cache = base / ".cache" / "flashinfer"
    for name in names:
        path = cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    return cache


def purge(run_module: RunModule, **args: Any) -> dict[str, Any]:
    code, answer = run_module(flashinfer_cache.main, **args)
    assert code == 0, answer
    return answer


def test_purges_every_version_and_says_how_much(run_module: RunModule, tmp_path: Path) -> None:
    cache = fill(tmp_path, MARKER, "0.6.16.post4/120f/generated/a.cu", "0.7.2+cu130/cached_ops/tmp/x.lock")
    answer = purge(run_module, home=str(tmp_path))
    assert answer["changed"]
    assert answer["bytes_freed"] == 15
    assert answer["paths"] == [str(cache / name) for name in ("0.6.16.post4", "0.6.3", "0.7.2+cu130")]
    assert not cache.exists()
    assert not purge(run_module, home=str(tmp_path))["changed"]


def test_check_mode_tells_the_same_and_removes_nothing(run_module: RunModule, tmp_path: Path) -> None:
    cache = fill(tmp_path, MARKER)
    _, told = run_module(flashinfer_cache.main, check=True, diff=True, home=str(tmp_path))
    assert (cache / MARKER).exists()
    assert told["diff"]["before"] == f"{cache / '0.6.3'}\n"
    done = purge(run_module, home=str(tmp_path))
    assert {key: told[key] for key in ("changed", "paths", "bytes_freed")} == {
        key: done[key] for key in ("changed", "paths", "bytes_freed")
    }


def test_the_log_alone_counts_as_purged(run_module: RunModule, tmp_path: Path) -> None:
    cache = fill(tmp_path, "0.6.3/120a/flashinfer_jit.log")
    (cache / "0.6.3/120a/cached_ops").mkdir()
    answer = purge(run_module, home=str(tmp_path))
    assert (answer["changed"], answer["bytes_freed"], answer["paths"]) == (False, 0, [])
    assert (cache / "0.6.3/120a/flashinfer_jit.log").exists()


def test_cubins_and_tuning_results_stay(run_module: RunModule, tmp_path: Path) -> None:
    cache = fill(tmp_path, MARKER, "cubins/a/b.cubin", "autotune/x.json")
    assert purge(run_module, home=str(tmp_path))["paths"] == [str(cache / "0.6.3")]
    assert sorted(path.name for path in cache.iterdir()) == ["autotune", "cubins"]


def test_workspace_base_goes_before_the_home_folder(run_module: RunModule, tmp_path: Path) -> None:
    for name in ("home", "base"):
        fill(tmp_path / name, MARKER)
    purge(run_module, home=str(tmp_path / "home"), workspace_base=str(tmp_path / "base"))
    assert (tmp_path / "home/.cache/flashinfer" / MARKER).exists()
    assert not (tmp_path / "base/.cache/flashinfer").exists()


def test_a_user_is_looked_up(run_module: RunModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, MARKER)
    entry = pwd.struct_passwd(("sglang", "x", 1, 1, "", str(tmp_path), "/bin/sh"))
    monkeypatch.setattr(flashinfer_cache.pwd, "getpwnam", {"sglang": entry}.__getitem__)
    answer = purge(run_module, user="nobody-of-that-name")
    assert (answer["changed"], answer["paths"], answer["bytes_freed"]) == (False, [], 0)
    assert purge(run_module, user="sglang")["changed"]


@pytest.mark.parametrize("home", ["/", "", "relative/folder"])
def test_refuses_bases_that_are_no_home(
    run_module: RunModule, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = fill(Path("relative/folder"), MARKER)
    assert run_module(flashinfer_cache.main, home=home)[0] == 1
    assert (cache / MARKER).exists()


@pytest.mark.parametrize("link", [".cache", ".cache/flashinfer", ".cache/flashinfer/0.6.3/120a"])
def test_refuses_symbolic_links(run_module: RunModule, tmp_path: Path, link: str) -> None:
    fill(tmp_path / "real", MARKER)
    path = tmp_path / "home" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "real" / link)
    code, answer = run_module(flashinfer_cache.main, home=str(tmp_path / "home"))
    assert code == 1
    assert str(path) in answer["msg"]
    assert (tmp_path / "real/.cache/flashinfer" / MARKER).exists()


@pytest.mark.parametrize("name", ["thesis.txt", "0.6.3/letters/a.txt", "photos/1.jpg"])
def test_refuses_what_flashinfer_did_not_fill(run_module: RunModule, tmp_path: Path, name: str) -> None:
    cache = fill(tmp_path, name)
    code, answer = run_module(flashinfer_cache.main, home=str(tmp_path))
    assert code == 1
    assert str(cache) in answer["msg"]
    assert (cache / name).exists()


@pytest.mark.parametrize("mapped", [False, True])
def test_refuses_under_a_running_process(run_module: RunModule, tmp_path: Path, mapped: bool) -> None:
    cache = fill(tmp_path, MARKER)
    program = f"""
import mmap
file = open({str(cache / MARKER)!r}, "rb")
if {mapped}:
    kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    file.close()
print("ready", flush=True)
input()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    expected = [
        {
            "pid": child.pid,
            "command": Path(f"/proc/{child.pid}/comm").read_text().strip(),
            "path": str(cache / MARKER),
        }
    ]
    code, answer = run_module(flashinfer_cache.main, home=str(tmp_path))
    _, told = run_module(flashinfer_cache.main, check=True, home=str(tmp_path))
    child.communicate(b"\n")
    assert code == 1
    assert answer["busy"] == told["busy"] == expected
    assert str(child.pid) in answer["msg"]
    assert (cache / MARKER).exists()
    assert purge(run_module, home=str(tmp_path))["changed"]


def test_a_descriptor_that_closes_meanwhile_hides_no_other(tmp_path: Path) -> None:
    cache = fill(tmp_path, MARKER)
    handles = tmp_path / "proc/42/fd"  # and no comm: the process is gone before it is asked for
    handles.mkdir(parents=True)
    for number in range(5):
        (handles / f"{number}").touch()  # what readlink fails on, as it does on a closed one
    (handles / "5").symlink_to(cache / MARKER)
    busy = jit_cache.users_of(cache, tmp_path / "proc")
    assert busy == [{"pid": 42, "command": "gone by now", "path": str(cache / MARKER)}]
