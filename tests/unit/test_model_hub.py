"""A model brought from a hub: the module with the real client, against a hub of our own."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hub import COMMIT, REPOSITORY, Hub

TOKEN = "hf_" + "a1B2" * 8
CHANCE = random.Random(120)  # noqa: S311 - made-up weights
FILES = {
    "config.json": b'{"vocab_size": 2048}\n',
    "tokenizer/tokenizer.json": b"{}\n",
    "model-00001-of-00002.safetensors": CHANCE.randbytes(3_000_000),
    "model-00002-of-00002.safetensors": CHANCE.randbytes(200_000),
}
LARGE = "model-00001-of-00002.safetensors"
# As Ansible runs a module: a process of its own, whose arguments are not on its command line.
RUNNER = """
import json, sys
import ansible.module_utils
from ansible.module_utils.testing import patch_module_args
given = json.load(sys.stdin)
ansible.module_utils.__path__.append(given["root"] + "/module_utils")
sys.path.insert(0, given["root"] + "/library")
import sglang_model_hub
with patch_module_args(given["arguments"]):
    sglang_model_hub.main()
"""

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(dict(FILES)).running() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


@pytest.fixture
def ask(hub: Hub, folder: Path) -> Ask:
    def run(action: str = "plan", *, check: bool = False, **given: Any) -> dict[str, Any]:
        arguments = {
            "action": action,
            "repository": REPOSITORY,
            "revision": COMMIT,
            "path": str(folder),
            "endpoint": hub.url,
            "_ansible_check_mode": check,
            **given,
        }
        asked = json.dumps({"root": str(ROOT), "arguments": arguments})
        environment = {**os.environ, "HF_TOKEN": "hf_of_somebody_else", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", RUNNER], input=asked, capture_output=True, text=True, env=environment
        )
        assert done.stdout, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        answer["said"] = done.stdout + done.stderr
        return answer

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".sm120-model.json"
    }


def fetch_all(ask: Ask, **given: Any) -> dict[str, Any]:
    return ask("fetch", files=list(FILES), **given)


def dead_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_plan_changes_nothing_and_tells_the_way(ask: Ask, hub: Hub, folder: Path) -> None:
    plan = ask(at_a_time=3)
    assert not plan["changed"]
    assert sorted(plan["missing"]) == sorted(FILES)
    assert plan["total_bytes"] == plan["missing_bytes"] == sum(map(len, FILES.values()))
    assert [len(batch["files"]) for batch in plan["batches"]] == [3, 1]
    assert plan["batches"][1]["label"].startswith("files 4 to 4 of 4, 3.2 MB of 3.2 MB")
    assert not folder.exists()
    assert all("/resolve/" not in path for _, path, _ in hub.requests)


def test_every_file_is_brought_and_a_second_run_does_not_even_ask(ask: Ask, hub: Hub, folder: Path) -> None:
    assert fetch_all(ask, check=True)["changed"]
    assert not folder.exists()
    done = fetch_all(ask)
    assert (done["changed"], done["missing"]) == (True, [])
    assert contents(folder) == FILES
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o644}
    assert sorted(path.name for path in folder.glob(".*")) == [".sm120-model.json"]
    asked = len(hub.requests)
    again = ask(endpoint=dead_url())
    assert (again["changed"], again["missing"], again["batches"]) == (False, [], [])
    assert len(hub.requests) == asked


def test_a_changed_file_is_brought_again_and_no_other(ask: Ask, hub: Hub, folder: Path) -> None:
    fetch_all(ask)
    hub.requests.clear()
    (folder / LARGE).write_bytes(FILES[LARGE][:-1] + b"!")
    assert ask()["missing"] == [LARGE]
    assert fetch_all(ask)["missing"] == []
    assert contents(folder) == FILES
    assert {path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET"} == {LARGE}


def test_another_commit_takes_the_place_of_the_first(ask: Ask, hub: Hub, folder: Path) -> None:
    fetch_all(ask)
    (folder / "notes.txt").write_text("not of the hub")
    hub.requests.clear()
    hub.commit, new = "f" * 40, CHANCE.randbytes(200_000)
    del hub.files["model-00002-of-00002.safetensors"]
    hub.files["config.json"], hub.files["model.safetensors"] = b"{}\n", new
    assert sorted(ask(revision=hub.commit)["missing"]) == sorted(hub.files)
    assert ask("fetch", files=list(hub.files), revision=hub.commit)["missing"] == []
    assert contents(folder) == {**hub.files, "notes.txt": b"not of the hub"}
    assert hub.gets(LARGE) == []


def test_what_was_cut_off_is_continued(ask: Ask, hub: Hub, folder: Path) -> None:
    hub.files[LARGE] = CHANCE.randbytes(25_000_000)
    hub.cut_at[LARGE] = 12_000_000  # the client writes 10 MiB at a time
    cut = fetch_all(ask)
    assert cut["failed"]
    assert not (folder / LARGE).exists()
    held = {name: data for name, data in contents(folder).items() if not name.startswith(".sm120-")}
    assert held == {name: data for name, data in hub.files.items() if name != LARGE}
    hub.cut_at.clear()
    hub.requests.clear()
    assert ask()["missing"] == [LARGE]
    assert fetch_all(ask)["missing"] == []
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for _, _, asked in hub.gets(LARGE) if asked]
    assert starts
    assert min(starts) >= 10 * 2**20
    assert contents(folder) == hub.files


def test_other_bytes_are_refused_and_removed(ask: Ask, hub: Hub, folder: Path) -> None:
    hub.served[LARGE] = FILES[LARGE][:-1] + b"!"
    done = fetch_all(ask)
    assert done["failed"]
    assert hub.sibling(LARGE)["lfs"]["sha256"] in done["msg"]
    assert not (folder / LARGE).exists()
    assert sorted(contents(folder)) == sorted(set(FILES) - {LARGE})
    assert ask()["missing"] == [LARGE]


@pytest.mark.parametrize("mode", [0o644, 0o640, None])
def test_a_token_that_others_can_read_is_not_used(
    ask: Ask, hub: Hub, tmp_path: Path, mode: int | None
) -> None:
    file = tmp_path / "token"
    if mode is not None:
        file.write_text(TOKEN)
        file.chmod(mode)
    done = ask(token_file=str(file))
    assert done["failed"]
    assert str(file) in done["msg"]
    assert hub.requests == []


def test_a_private_repository(ask: Ask, hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.token = TOKEN
    file = tmp_path / "token"
    stranger = ask()
    assert stranger["failed"]
    assert "sglang_model_token_file" in stranger["msg"]
    assert len(stranger["msg"].splitlines()) == 1
    file.write_text("hf_wrong\n")
    file.chmod(0o600)
    assert "none for this token" in ask(token_file=str(file))["msg"]
    file.write_text(f"{TOKEN}\n")
    done = fetch_all(ask, token_file=str(file))
    assert done["missing"] == []
    assert contents(folder) == FILES
    assert TOKEN not in done["said"] + stranger["said"]
    assert [
        path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ] == []


def test_a_disk_that_is_too_small_is_refused_before_the_download(ask: Ask, hub: Hub, folder: Path) -> None:
    hub.sizes[LARGE] = 10**16
    done = ask()
    assert done["failed"]
    assert "10000.0 TB" in done["msg"]
    assert not folder.exists()
    assert all("/resolve/" not in path for _, path, _ in hub.requests)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"revision": "main"}, "40"),
        ({"revision": "f" * 40}, "sglang_model_revision"),
        ({"repository": "lab/none"}, "sglang_model_repository"),
    ],
)
def test_what_is_not_there_is_one_message(ask: Ask, given: dict[str, str], named: str) -> None:
    done = ask(**given)
    assert done["failed"]
    assert named in done["msg"]
    assert len(done["msg"].splitlines()) == 1


def test_no_hub_is_one_message(ask: Ask, folder: Path) -> None:
    done = ask(endpoint=dead_url())
    assert done["failed"]
    assert "sglang_model_endpoint" in done["msg"]
    assert not folder.exists()


def test_a_name_that_leads_out_of_the_folder_is_refused(ask: Ask, hub: Hub) -> None:
    hub.files["../outside"] = b"x"
    assert ask()["failed"]


def test_a_mark_that_leads_out_of_the_folder_deletes_nothing_there(
    ask: Ask, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    fetch_all(ask)
    precious = tmp_path / "precious"
    precious.write_text("theirs")
    mark = folder / ".sm120-model.json"
    told = json.loads(mark.read_text())
    told["files"] += [{**told["files"][0], "path": path} for path in ("../../precious", str(precious))]
    mark.write_text(json.dumps(told))
    hub.commit = "f" * 40
    del hub.files["model-00002-of-00002.safetensors"]
    assert ask("fetch", files=list(FILES), revision=hub.commit)["missing"] == []
    assert precious.read_text() == "theirs"
    assert contents(folder) == hub.files  # what it lists inside the folder goes


def test_check_mode_leaves_what_was_begun(ask: Ask, folder: Path) -> None:
    fetch_all(ask)
    begun = folder / ".sm120-partial" / "begun"
    begun.parent.mkdir()
    begun.write_bytes(b"x")
    assert fetch_all(ask, check=True)["changed"] is False
    assert begun.exists()
    fetch_all(ask)
    assert not begun.exists()


def test_a_disk_that_cannot_be_written_is_not_the_hubs_fault(ask: Ask, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder belongs")
    done = fetch_all(ask)
    assert done["failed"]
    assert f"below {folder}. Found:" in done["msg"]
    assert "sglang_model_endpoint" not in done["msg"]


def test_files_may_be_left_out(ask: Ask, folder: Path) -> None:
    assert sorted(ask(exclude=["*.safetensors"])["missing"]) == ["config.json", "tokenizer/tokenizer.json"]


def test_without_a_network_a_folder_is_the_source(ask: Ask, hub: Hub, folder: Path, tmp_path: Path) -> None:
    assert ask(source_folder=str(tmp_path / "usb"))["failed"]
    fetch_all(ask)
    folder.rename(tmp_path / "usb")
    asked = len(hub.requests)
    given = {"source_folder": str(tmp_path / "usb"), "endpoint": dead_url()}
    assert sorted(ask(**given)["missing"]) == sorted(FILES)
    assert fetch_all(ask, **given)["missing"] == []
    assert contents(folder) == FILES

    shutil.rmtree(folder)
    (tmp_path / "usb" / LARGE).write_bytes(FILES[LARGE][:-1] + b"!")
    broken = fetch_all(ask, **given)
    assert broken["failed"]
    assert LARGE in broken["msg"]
    assert len(hub.requests) == asked


def test_a_folder_that_was_carried_here_proves_itself(
    ask: Ask, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    fetch_all(ask)
    shutil.copytree(folder, tmp_path / "carried", copy_function=shutil.copyfile)
    shutil.rmtree(folder)
    (tmp_path / "carried").rename(folder)
    asked = len(hub.requests)
    plan = ask(endpoint=dead_url())
    assert sorted(plan["missing"]) == sorted(FILES)
    assert plan["missing_bytes"] == 0
    assert fetch_all(ask, endpoint=dead_url())["missing"] == []
    assert len(hub.requests) == asked
