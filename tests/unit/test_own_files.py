"""Files of our own are written, followed and taken away without a trace."""

from __future__ import annotations

import stat
from pathlib import Path

import own_files as module
import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120 import own_files
from conftest import RunModule


def snapshot(root: Path) -> dict[str, tuple[str, bytes]]:
    return {
        str(path.relative_to(root)): (oct(path.stat().st_mode), path.read_bytes() if path.is_file() else b"")
        for path in root.rglob("*")
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    host = tmp_path / "host"
    (host / "etc").mkdir(parents=True)
    (host / "etc/theirs").write_text("theirs\n")
    return host


def record(root: Path) -> Path:
    return root / "var/lib/sglang-sm120/example/files.json"


def test_written_and_taken_away_with_the_folders_made_for_it(root: Path, run_module: RunModule) -> None:
    before = snapshot(root)
    files = {f"{root}/etc/modprobe.d/a.conf": "a\n", f"{root}/etc/b/c/d.conf": "d\n"}
    given = {"files": files, "record": str(record(root))}
    code, told = run_module(module.main, check=True, diff=True, **given)
    assert (code, told["changed"], len(told["diff"])) == (0, True, 2)
    assert snapshot(root) == before
    assert run_module(module.main, **given)[1]["changed"] is True
    assert (root / "etc/b/c/d.conf").read_text() == "d\n"
    assert stat.S_IMODE(record(root).stat().st_mode) == 0o600
    assert stat.S_IMODE(record(root).parent.stat().st_mode) == 0o700
    written = snapshot(root)
    assert run_module(module.main, **given)[1]["changed"] is False
    assert snapshot(root) == written
    assert run_module(module.main, state="absent", record=given["record"])[1]["changed"] is True
    left = {path: kept for path, kept in snapshot(root).items() if not path.startswith("var")}
    assert left == before
    assert not (root / "var/lib/sglang-sm120").exists()
    assert run_module(module.main, state="absent", record=given["record"])[1]["changed"] is False


def test_a_file_no_longer_wanted_goes_and_a_changed_one_is_put_right(
    root: Path, run_module: RunModule
) -> None:
    one, two = f"{root}/etc/one", f"{root}/etc/two"
    run_module(module.main, files={one: "1\n", two: "2\n"}, record=str(record(root)))
    Path(two).write_text("by hand\n")
    code, told = run_module(module.main, files={two: "2\n"}, record=str(record(root)))
    assert (code, told["written"], told["replaced"], told["removed"]) == (0, [two], [two], [one])
    assert (Path(one).exists(), Path(two).read_text()) == (False, "2\n")


@pytest.mark.parametrize("kind", ["file", "same bytes", "link", "folder"])
def test_what_is_not_ours_is_refused_and_nothing_written(
    root: Path, run_module: RunModule, kind: str
) -> None:
    path = root / "etc/theirs.conf"
    if kind in ("file", "same bytes"):
        path.write_text("theirs\n" if kind == "file" else "ours\n")
    elif kind == "link":
        path.symlink_to("theirs")
    else:
        path.mkdir()
    before = snapshot(root)
    code, told = run_module(
        module.main, files={f"{root}/etc/new": "1\n", str(path): "ours\n"}, record=str(record(root))
    )
    assert code == 1
    assert str(path) in told["msg"]
    assert "nothing was changed" in told["msg"]
    assert snapshot(root) == before


def test_a_run_broken_off_between_record_and_files_leaves_nothing_behind(root: Path) -> None:
    path = f"{root}/etc/new/file"
    change = own_files.plan({path: b"1\n"}, None)
    own_files.apply(change, record(root))
    Path(path).unlink()  # as if the power had gone before it was written
    known = own_files.load(record(root))
    assert known is not None
    own_files.take_away(known, record(root))
    assert sorted(path.name for path in (root / "etc").iterdir()) == ["theirs"]


def test_a_folder_that_others_use_by_now_stays(root: Path, run_module: RunModule) -> None:
    path = f"{root}/etc/shared/ours"
    run_module(module.main, files={path: "1\n"}, record=str(record(root)))
    (root / "etc/shared/theirs").write_text("2\n")
    run_module(module.main, state="absent", record=str(record(root)))
    assert [each.name for each in (root / "etc/shared").iterdir()] == ["theirs"]


@pytest.mark.parametrize("state", ["absent", "present"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_that_somebody_changed_since_stays_and_is_named(
    root: Path, run_module: RunModule, monkeypatch: pytest.MonkeyPatch, kind: str, state: str
) -> None:
    warned: list[
        str
    ] = []  # not read from the answer: beside tests of the controller's plugins they go to its display
    monkeypatch.setattr(AnsibleModule, "warn", lambda _, text: warned.append(text))
    one, two = root / "etc/new/one", root / "etc/new/two"
    run_module(module.main, files={str(one): "1\n", str(two): "2\n"}, record=str(record(root)))
    if kind == "link":
        two.unlink()
        two.symlink_to("../theirs")
    else:
        two.write_text("by hand\n")
    given = {"record": str(record(root)), "state": state}
    planned = run_module(module.main, check=True, **given)[1]
    assert (one.exists(), planned["left"]) == (True, [str(two)])
    code, told = run_module(module.main, **given)
    assert (code, told["removed"], told["left"]) == (0, [str(one)], [str(two)])
    assert f"rm {two}" in warned[-1]
    assert (one.exists(), two.read_text()) == (False, "theirs\n" if kind == "link" else "by hand\n")
    assert run_module(module.main, **given)[1]["changed"] is False


def test_a_run_broken_off_while_writing_anew_is_taken_away_whole(
    root: Path, run_module: RunModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(root)
    one, two, kept = f"{root}/etc/one", f"{root}/etc/two", str(record(root))
    run_module(module.main, files={one: "1\n", two: "2\n"}, record=kept)
    write = own_files.write_file

    def full_disk(path: Path, data: bytes, mode: int) -> None:
        if str(path) == two:
            raise OSError(28, "No space left on device")
        write(path, data, mode)

    monkeypatch.setattr(own_files, "write_file", full_disk)
    code, told = run_module(module.main, files={one: "new\n", two: "new\n"}, record=kept)
    assert (code, Path(one).read_text(), Path(two).read_text()) == (1, "new\n", "2\n")
    assert "nothing was changed" not in told["msg"]
    assert f"the record {kept}" in told["msg"]
    monkeypatch.undo()
    assert run_module(module.main, record=kept, state="absent")[1]["left"] == []
    assert {path: seen for path, seen in snapshot(root).items() if not path.startswith("var")} == before
