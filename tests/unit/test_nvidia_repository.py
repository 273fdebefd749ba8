"""NVIDIA's source and key: addresses, checksum, what is written, what is put back."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.sm120 import nvidia_repository as repository
from ansible.module_utils.sm120.apt_sources import Source
from ansible.module_utils.sm120.nvidia_repository import (
    Host,
    Refused,
    Repository,
    System,
    absent,
    present,
    resolve,
)

ARMOURED = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmQ==\n-----END PGP PUBLIC KEY BLOCK-----\n"
NOBLE = System("ubuntu2404", "noble")
BOOKWORM = System("debian12", "bookworm")
CONTRIB = Source("/etc/apt/sources.list", "http://deb.debian.org/debian", "bookworm", ("main", "contrib"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files go below a folder of the test's."""
    folder = tmp_path / "etc"
    (folder / "apt/sources.list.d").mkdir(parents=True)
    monkeypatch.setattr(repository, "SOURCES", str(folder / "apt/sources.list.d/nvidia-sm120.sources"))
    monkeypatch.setattr(repository, "KEY", str(folder / "apt/keyrings/nvidia-sm120"))
    return folder


def make_host(tmp_path: Path, key: bytes = ARMOURED, update: int = 0, system: System = NOBLE) -> Host:
    def run(argv: list[str]) -> tuple[int, str]:
        return (
            (update, "E: Failed to fetch http://mirror/InRelease  connect (111)\n")
            if "update" in argv
            else (0, "")
        )

    def fetch(url: str) -> bytes:
        if "gone" in url:
            raise OSError("HTTP Error 404")
        return key

    return Host(run, fetch, system, tmp_path / "sglang-sm120/repository/files.json")


def asked(key: bytes = ARMOURED, **given: str) -> Repository:
    return Repository(url="http://mirror/cuda", key_sha256=sha256(key), **given)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_addresses_of_each_distribution() -> None:
    for name, digest in repository.KEYRINGS.items():
        found = resolve(Repository(), System(name, "x"))
        assert found.url == f"https://developer.download.nvidia.com/compute/cuda/repos/{name}/x86_64"
        assert found.key_url == f"{found.url}/cuda-keyring_1.1-1_all.deb"
        assert (found.key_sha256, len(digest)) == (digest, 64)
    with pytest.raises(Refused, match="gentoo"):
        resolve(Repository(), System("gentoo", ""))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n', ("ubuntu2404", "noble")),
        ('NAME="Debian"\nVERSION_ID="12"\nID=debian\nVERSION_CODENAME=bookworm\n', ("debian12", "bookworm")),
        ("", ("", "")),
    ],
)
def test_distributions_are_spelled_as_nvidia_does(text: str, found: tuple[str, str]) -> None:
    assert repository.parse_os_release(text) == found


def test_written_kept_and_let_go_of(etc: Path, tmp_path: Path) -> None:
    host, before = make_host(tmp_path), files(etc)
    assert present(host, asked(), "driver", check=False).changed is True
    now = files(etc)
    assert now["apt/keyrings/nvidia-sm120.asc"] == ARMOURED
    text = now["apt/sources.list.d/nvidia-sm120.sources"].decode()
    assert "URIs: http://mirror/cuda/\nSuites: /\n" in text
    assert f"Signed-By: {etc}/apt/keyrings/nvidia-sm120.asc" in text
    gone = replace(asked(), key_url="http://gone")  # nothing is fetched again
    assert present(host, gone, "driver", check=False).changed is False
    assert (etc / "apt/keyrings").stat().st_mode & 0o777 == 0o755
    (etc / "apt/keyrings/nvidia-sm120.asc").write_bytes(b"another key")  # it is fetched and checked again
    assert present(host, asked(), "driver", check=False).changed is True
    assert files(etc) == now
    assert present(host, asked(), "toolkit", check=False).changed is True
    assert absent(host, "driver", check=False) is True
    assert files(etc) == now
    assert absent(host, "driver", check=False) is False
    assert absent(host, "toolkit", check=True) is True
    assert files(etc) == now
    assert absent(host, "toolkit", check=False) is True
    assert (files(etc), (etc / "apt/keyrings").exists()) == (before, False)


def test_check_mode_writes_nothing(etc: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    assert present(make_host(tmp_path), asked(key_url="http://gone"), "driver", check=True).changed is True
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("given", "update", "named"),
    [
        ({"key_sha256": "0" * 64}, 0, ("0" * 64, sha256(ARMOURED))),
        ({"key_url": "http://gone/key"}, 0, ("http://gone/key", "404")),
        ({}, 100, ("http://mirror/InRelease", "111")),
    ],
)
def test_what_fails_leaves_nothing(
    etc: Path, tmp_path: Path, given: dict[str, str], update: int, named: tuple[str, ...]
) -> None:
    before = files(tmp_path)
    with pytest.raises(Refused) as why:
        present(make_host(tmp_path, update=update), replace(asked(), **given), "driver", check=False)
    assert [text for text in named if text not in str(why.value)] == []
    assert files(tmp_path) == before
    assert not (etc / "apt/keyrings").exists()


def test_a_mirror_that_fails_is_put_back_to_the_one_before(etc: Path, tmp_path: Path) -> None:
    present(make_host(tmp_path), asked(), "driver", check=False)
    before = files(tmp_path)
    other = b"another key"
    with pytest.raises(Refused):
        present(make_host(tmp_path, other, 100), asked(other, suite="stable"), "driver", check=False)
    assert files(tmp_path) == before


def test_a_new_key_takes_the_place_of_the_old_one(etc: Path, tmp_path: Path) -> None:
    present(make_host(tmp_path), asked(), "driver", check=False)
    other = b"\x99binary"
    present(make_host(tmp_path, other), asked(other), "driver", check=False)
    assert sorted(files(etc / "apt/keyrings")) == ["nvidia-sm120.gpg"]


def test_a_mirror_with_components(etc: Path, tmp_path: Path) -> None:
    present(make_host(tmp_path), asked(suite="noble", components="main"), "driver", check=False)
    text = Path(repository.SOURCES).read_text()
    assert "URIs: http://mirror/cuda\nSuites: noble\nComponents: main\n" in text


def test_contrib_comes_along_on_debian_where_it_is_missing(etc: Path, tmp_path: Path) -> None:
    want = asked(contrib_url="http://deb.debian.org/debian")

    def text(system: System) -> str:
        present(make_host(tmp_path, system=system), want, "driver", check=False)
        return Path(repository.SOURCES).read_text()

    assert "Components" not in text(NOBLE)
    assert "Components" not in text(replace(BOOKWORM, sources=(CONTRIB,)))
    assert "Suites: bookworm\nComponents: contrib\n" in text(BOOKWORM)


def test_a_source_that_the_host_has_already_is_used_as_it_is(etc: Path, tmp_path: Path) -> None:
    theirs = Source("/etc/apt/sources.list.d/cuda-ubuntu2404-x86_64.list", "http://mirror/cuda", "/", ())
    before = files(tmp_path)
    host = make_host(tmp_path, update=100, system=replace(NOBLE, sources=(theirs,)))
    assert present(host, asked(), "driver", check=False).changed is False
    assert absent(host, "driver", check=False) is False
    assert files(tmp_path) == before
    # Ours was first: it makes room.
    present(make_host(tmp_path), asked(), "driver", check=False)
    assert present(host, asked(), "driver", check=False).changed is True
    assert files(tmp_path) == before


def test_the_sources_of_a_host_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "etc/apt/sources.list.d"
    folder.mkdir(parents=True)
    (tmp_path / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n')
    (tmp_path / "etc/apt/sources.list").write_text(
        "# deb http://commented/ out main\ndeb-src http://src/ bookworm main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://deb.debian.org/debian/ bookworm main contrib # note\n"
    )
    (folder / "cuda.list").write_text("deb [signed-by=/k] https://developer.download.nvidia.com/a/ /\n")
    (folder / "off.sources").write_text("Types: deb\nURIs: http://off/\nSuites: x\nEnabled: no\n")
    (folder / "two.sources").write_text(
        "# a note\nTypes: deb deb-src\nURIs: http://one/\n http://two\nSuites: x\nComponents: main\n extra\n"
    )
    (folder / "old.list.save").write_text("deb http://saved/ x main\n")
    Path(tmp_path, repository.SOURCES.lstrip("/")).write_text("Types: deb\nURIs: http://ours/\nSuites: /\n")
    system = repository.examine(tmp_path)
    assert system.distribution == "debian12"
    assert [(each.uri, each.suite, each.components) for each in system.sources] == [
        ("http://deb.debian.org/debian", "bookworm", ("main", "contrib")),
        ("https://developer.download.nvidia.com/a", "/", ()),
        ("http://one", "x", ("main", "extra")),
        ("http://two", "x", ("main", "extra")),
    ]


@pytest.fixture
def keyring(tmp_path: Path) -> Callable[[dict[str, bytes]], bytes]:
    def make(contents: dict[str, bytes]) -> bytes:
        tree = tmp_path / "tree"
        for path, data in {"DEBIAN/control": b"", **contents}.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
        control = (
            "Package: cuda-keyring\nVersion: 1.1-1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: a\n"
        )
        (tree / "DEBIAN/control").write_text(control)
        command = ["dpkg-deb", "--build", str(tree), str(tmp_path / "keyring.deb")]
        subprocess.run(command, check=True, capture_output=True)
        return (tmp_path / "keyring.deb").read_bytes()

    return make


def test_the_key_is_taken_out_of_its_package(keyring: Callable[[dict[str, bytes]], bytes]) -> None:
    key = {"usr/share/keyrings/cuda-archive-keyring.gpg": b"\x99key"}
    assert repository.unpack(keyring({**key, "etc/apt/sources.list.d/cuda.list": b"deb x"})) == b"\x99key"
    assert repository.unpack(ARMOURED) == ARMOURED
    with pytest.raises(Refused):
        repository.unpack(keyring({"usr/share/keyrings/two.gpg": b"2"}))
    with pytest.raises(Refused):
        repository.unpack(b"!<arch>\nbroken")
