"""The role stopped wherever it can be: the same run again converges, and a revert is exact, from each place.

The disk is copied before each task starts, and that is all that `kill -9` of ansible-playbook leaves there, as one
real kill shows. Of each copy that differs from the one before, one host goes on from there and another one goes back.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import fleet
import pytest
from conftest import wheels

# A mixed pair: every kind of edit, in both packages, and of the fewest steps that have all of that.
SGLANG, FLASHINFER, EDITS = "0.5.23", "0.6.12", 7
KILLED_AT = "Compare every file with the planned hash"
CACHE = f"home/.cache/flashinfer/{FLASHINFER}/120f/cached_ops/trtllm_comm/trtllm_comm.so"
OPEN = {"allreduce_fusion": "open", "moe_autotune": "open"}


def contents(folder: Path, home: Path | None = None) -> dict[str, str]:
    """Hashes of all files, less what tells two runs apart: where the host lies (`home`), and who holds the lock."""

    def text(path: Path) -> bytes:
        return (
            b"" if path.name == "lock.json" else path.read_bytes().replace(str(home or folder).encode(), b"")
        )

    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(text(path)).hexdigest() for path in files}


def fresh(folder: Path) -> Path:
    """Packages as delivered, with bytecode of every file, and a kernel compiled for them."""
    wheels.unpack("sglang", SGLANG, folder / "site")
    wheels.unpack("flashinfer", FLASHINFER, folder / "site")
    for source in list((folder / "site").rglob("*.py")):
        compiled = source.parent / "__pycache__" / f"{source.stem}.cpython-312.pyc"
        compiled.parent.mkdir(exist_ok=True)
        compiled.write_bytes(b"compiled")
    (folder / CACHE).parent.mkdir(parents=True)
    (folder / CACHE).write_bytes(b"compiled")
    return folder


def moved(copy: Path, origin: Path, folder: Path) -> Path:
    """A copy of a host as a host of its own: its manifest says where its files are."""
    shutil.copytree(copy, folder)
    manifest = folder / "state/manifest.json"
    if manifest.exists():
        manifest.write_text(manifest.read_text().replace(f"{origin}/", f"{folder}/"))
    return folder


@dataclass
class Seen:
    """What the disk held after a run that nothing stopped, at each place of it, after a kill, and what came of it."""

    whole: dict[str, str]
    places: dict[str, dict[str, str]]
    killed: dict[str, str]
    on: dict[str, Path]
    back: dict[str, Path]
    facts: dict[str, dict[str, object]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    base = tmp_path_factory.mktemp("stopped")
    origin, killed, copies = fresh(base / "origin"), fresh(base / "killed"), base / "copies"

    def alone(folder: Path, **environment: str) -> fleet.Play:
        host = {folder.name: {**fleet.variables(folder), "entry": "main"}}
        return fleet.play(base, host, ANSIBLE_STRATEGY="linear", **environment)

    whole = alone(origin, EVERY_FROM=str(origin), EVERY_TO=str(copies))
    assert whole.rc == 0, whole.output
    dead = alone(killed, AT_TASK=KILLED_AT, AT_DO="kill")
    assert dead.rc < 0, dead.output

    places = {copy.name: contents(copy, origin) for copy in sorted(copies.iterdir())}
    distinct = {json.dumps(places[name], sort_keys=True): name for name in reversed(places)}
    hosts = {
        entry: {name: moved(copies / name, origin, base / entry / name) for name in distinct.values()}
        for entry in ("main", "revert")
    }
    told = {
        f"{entry}-{name[:2]}": {**fleet.variables(folder), "entry": entry}
        for entry, folders in hosts.items()
        for name, folder in folders.items()
    }
    play = fleet.play(base, told)
    assert play.rc == 0, play.output
    return Seen(contents(origin), places, contents(killed), hosts["main"], hosts["revert"], play.facts)


def test_every_place_was_seen(seen: Seen) -> None:
    """Before the first change, kept, after each edit, kernels gone, bytecode gone and recorded."""
    assert len(seen.on) == 1 + 1 + EDITS + 1 + 1


def test_a_copy_is_what_a_kill_leaves(seen: Seen) -> None:
    (at,) = [places for name, places in seen.places.items() if name.endswith(KILLED_AT)]
    assert seen.killed == at != seen.whole


def test_the_same_run_again_converges(seen: Seen) -> None:
    for name, folder in seen.on.items():
        assert seen.facts[f"main-{name[:2]}"]["features"] == OPEN
        assert contents(folder) == seen.whole, name
        assert not (folder / CACHE).exists()


def test_a_revert_is_exact(seen: Seen) -> None:
    assert [(folder / "state").exists() for folder in seen.back.values()].count(False) == 1
    for name, folder in seen.back.items():
        assert seen.facts[f"revert-{name[:2]}"]["digest"] == "pristine"
        assert wheels.differing(folder / "site") == set(), name
        begun = (folder / "state").exists()
        assert (folder / CACHE).exists() is not begun
        if begun:
            assert json.loads((folder / "state/manifest.json").read_text())["entries"] == {}
            assert list((folder / "state/pristine").iterdir()) == []
            assert not (folder / "state/lock.json").exists()
