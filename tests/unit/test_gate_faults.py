"""A full disk and a write cut short leave every file whole, and the next run goes on from there."""

from __future__ import annotations

import importlib
import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.sm120 import storage
from gates_driver import Gates, RunModule

wheels = importlib.import_module("wheels")


@contextmanager
def full_disk(bytes_left: int) -> Iterator[None]:
    """No file may grow beyond this size: the write fails where it would on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def gates(make_site: Any, run_module: RunModule) -> Gates:
    return Gates(run_module, make_site("0.5.9", "0.6.3"))


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.is_file()]


def test_no_room_to_keep_touches_nothing(gates: Gates) -> None:
    plan = gates.info()
    with full_disk(32 * 1024):
        code, answer = gates.state("keep", plan["plan"])
    assert code == 1
    assert str(gates.state_dir) in answer["msg"]
    assert wheels.differing(gates.site) == set()
    assert not (gates.state_dir / "manifest.json").exists()
    assert leftovers(gates.state_dir) == []
    gates.apply()
    assert gates.info()["features"]["allreduce_fusion"] == "open"


def test_no_room_to_restore_keeps_the_edited_file(gates: Gates) -> None:
    gates.apply()
    before = wheels.differing(gates.site)
    plan = gates.info("absent")["plan"]
    with full_disk(1024):
        assert gates.state("restore", plan)[0] == 1
    assert wheels.differing(gates.site) == before
    assert leftovers(gates.site) == []
    assert gates.info()["problems"] == []
    gates.apply("absent")
    assert wheels.differing(gates.site) == set()


def test_a_write_cut_short_leaves_the_old_file_and_its_leftover_goes_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text("old")
    leftover = tmp_path / ".file.py.sm120-abc"
    leftover.write_text("half a f")
    other = tmp_path / ".file.py.swp"
    other.write_text("an editor's")
    storage.write_file(path, b"new", 0o640)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    assert not leftover.exists()
    assert other.exists()


def test_a_lost_manifest_entry_is_not_guessed(gates: Gates) -> None:
    gates.apply()
    manifest = gates.state_dir / "manifest.json"
    manifest.write_text(manifest.read_text()[:-40])
    answer = gates.info()
    assert "manifest.json" in answer["problems"][0]
    assert answer["edits"] == []
    assert len(wheels.differing(gates.site)) == 6


# A builtin module of its own process, killed with the new file half written: in its own temporary folder, or, where
# that is on another file system, beside the file.
KILLED_IN_A_WRITE = """
import errno, importlib, json, os, signal, sys
from ansible.module_utils.testing import patch_module_args
module, args, apart = json.loads(sys.argv[1])
def rename(source, target, *_, **__):
    if apart and b".ansible_tmp" not in os.fsencode(source):
        raise OSError(errno.EXDEV, "Invalid cross-device link")
    os.truncate(source, os.path.getsize(source) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = rename
with patch_module_args(args):
    importlib.import_module(f"ansible.modules.{module}").main()
"""


@pytest.mark.parametrize("want", ["present", "absent"])
@pytest.mark.parametrize("apart", [False, True])
def test_killed_in_the_middle_of_a_write(gates: Gates, apart: bool, want: str) -> None:
    plan = gates.info()
    gates.must("keep", plan["plan"])
    middle = 5
    gates.edit(plan["edits"][:middle])
    before = wheels.differing(gates.site)
    edit = plan["edits"][middle]
    arguments = json.dumps([edit["module"], {"path": edit["path"], **edit["args"]}, apart])
    done = subprocess.run([sys.executable, "-c", KILLED_IN_A_WRITE, arguments], check=False)
    assert done.returncode == -signal.SIGKILL
    assert wheels.differing(gates.site) == before
    assert len(leftovers(gates.site)) == apart
    gates.apply(want)
    assert leftovers(gates.site) == []
    if want == "present":
        assert gates.info()["features"] == {"allreduce_fusion": "open", "moe_autotune": "open"}
    else:
        assert wheels.differing(gates.site) == set()


@pytest.mark.parametrize("want", ["present", "absent"])
def test_a_disk_that_fills_up_at_an_edit(gates: Gates, want: str) -> None:
    plan = gates.info()
    gates.must("keep", plan["plan"])
    big = [edit for edit in plan["edits"] if Path(edit["path"]).stat().st_size > 64 * 1024]
    with full_disk(64 * 1024), pytest.raises(OSError, match="File too large"):
        gates.edit(plan["edits"])
    left = wheels.differing(gates.site)
    assert str(Path(big[0]["path"]).relative_to(gates.site)) not in left
    assert leftovers(gates.site) == []
    gates.must("restore", plan["plan"])  # as the role's rescue does
    assert wheels.differing(gates.site) == set()
    gates.apply(want)
    opened = {"allreduce_fusion": "open", "moe_autotune": "open"}
    assert (gates.info()["features"] == opened) is (want == "present")
    assert (wheels.differing(gates.site) == set()) is (want == "absent")


OLD, NEW = ("0.5.9", "0.6.3"), ("0.5.23", "0.7.2")


@pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)], ids=["upgrade", "downgrade"])
def test_another_version_with_open_gates(
    make_site: Any, run_module: RunModule, first: tuple[str, str], second: tuple[str, str]
) -> None:
    gates = Gates(run_module, make_site(*first))
    gates.apply()
    shutil.rmtree(gates.site)
    make_site(*second)
    fresh = gates.info()
    assert fresh["problems"] == []
    assert (fresh["needed"], fresh["settled"], fresh["digest"]) == (True, False, "pristine")
    gates.apply()
    assert gates.info()["features"] == {"allreduce_fusion": "open", "moe_autotune": "open"}
    gates.apply("absent")
    assert wheels.differing(gates.site) == set()
    assert '"entries": {}' in (gates.state_dir / "manifest.json").read_text()
    assert list((gates.state_dir / "pristine").iterdir()) == []
