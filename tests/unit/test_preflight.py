"""What preflight says about bad values: all of it in one message, each by its variable; nothing about good ones."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sglang_host_info
import yaml
from conftest import RunModule
from local_play import play

Look = Callable[..., dict[str, Any]]
ANY = "0.0.0.0"  # noqa: S104 - a value of the inventory
PLAY = """
- hosts: localhost
  gather_facts: false
  roles: [preflight]
"""


def complaints(place: Path, **given: Any) -> list[str]:
    # Whether this machine's ports are free, and models there, are tests of their own.
    given.setdefault("preflight_serves", False)
    given.setdefault("sglang_model_path", str(place))
    (place / "config.json").write_text("{}")
    _, output = play(place, PLAY, **given)
    lines = dict.fromkeys(line.strip() for line in output.splitlines())  # Ansible prints a message twice
    # A machine that runs unit tests need not be a GPU host.
    return [line for line in lines if line.startswith("- ") and "x86-64 Linux host" not in line]


def test_each_bad_value_is_named_once(tmp_path: Path) -> None:
    found = complaints(
        tmp_path,
        sm120_gates_policy=False,
        sglang_promote_repeats=2,
        sglang_promote_concurrency=[8, 0],
        sglang_promote_min_effect=3,
        sglang_verify_repeats=0,
        pve_gpu_vm_coers=8,
        sglang_server_instances=[
            {"instance": "a", "port": 1, "max_running_requests": "many", "home": "/one"},
            {"instance": "b", "port": 2, "allreduce_fusion": False, "extra_arguments": {"api_key": "x"}},
            {"instance": "c", "port": 3, "stop_timeout_seconds": 0, "prot": 1},
        ],
    )
    wanted = {
        "words in quotes": ["sm120_gates_policy: False", "allreduce_fusion of an instance: False"],
        "five repeats of each side": ["off 4, on 4"],
        "whole numbers of at least 1": [
            "sglang_promote_concurrency: 0",
            "sglang_verify_repeats: 0",
            "sglang_server_stop_timeout_seconds: 0",
        ],
        "as a share": ["found: 3;"],
        "variables that the roles know": ["pve_gpu_vm_coers (did you mean pve_gpu_vm_cores?)"],
        "one home for each user": ["sglang: /one, sglang: /var/lib/sglang"],
        "has a variable of its own": ["api-key"],
        "argument 'max_running_requests'": ["many", "sglang_server_instances"],
        "sglang_server_instances.prot": ["sglang_server_instances"],
    }
    for key, named in wanted.items():
        (line,) = [each for each in found if key in each]
        assert [name for name in named if name not in line] == []
    assert len(found) == len(wanted), found


def test_a_port_that_is_no_number_is_told_once(tmp_path: Path) -> None:
    found = complaints(tmp_path, sglang_server_instances=[{"instance": "a", "port": "many"}])
    assert len(found) == 1, found
    assert "argument 'port'" in found[0]
    assert "many" in found[0]


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("sglang_server_port", False, "from 1 to 65535"),
        ("sglang_server_max_running_requests", -4, "no negative numbers"),
        ("sglang_runtime_venv", "/", "a folder of its own"),
        ("sglang_runtime_venv", "//usr/", "a folder of its own"),
        ("sglang_server_port", None, "nothing after sglang_server_port;"),
        ("sglang_server_instances", [{"instance": "a", "user": None}], "nothing after user of instance a;"),
        ("sglang_server_instances", None, "nothing after sglang_server_instances;"),
        ("sglang_server_extra_environment", {"HF_TOKEN": None}, "nothing after HF_TOKEN in"),
        ("fusion_probe_environment", {"NCCL_DEBUG": None}, "nothing after NCCL_DEBUG in"),
        (
            "sglang_server_instances",
            [{"instance": "a", "extra_arguments": {"context-length": None}}],
            "nothing after context-length in",
        ),
        ("sglang_server_extra_environment", {"MY VAR": "1"}, "names of environment variables"),
        ("sglang_server_api_key", ["s3cret-key"], "sglang_server_api_key as one text"),
        ("sglang_server_model_path", "", "model_path as a text"),
        ("sglang_server_instances", [{"instance": "a", "model_path": " /m"}], "model_path as a text"),
        ("sglang_server_instances", [{"instance": "a", "model_path": 5}], "found: 5;"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path: Path, name: str, value: Any, wanted: str) -> None:
    (found,) = complaints(tmp_path, **{name: value})
    assert wanted in found


@pytest.mark.parametrize("begun", [True, False])
def test_room_is_wanted_for_a_model_of_which_nothing_is_there(
    look: Look, tmp_path: Path, begun: bool
) -> None:
    (tmp_path / "models/another").mkdir(parents=True)
    (tmp_path / "models/another/config.json").write_text("{}")
    (tmp_path / "models/mine").mkdir()
    if begun:
        (tmp_path / "models/mine/config.json").write_text("{}")
    for folder, there in (("mine", begun), ("none", False)):
        assert look(tmp_path / "models" / folder)["model_begun"] is there


@pytest.fixture
def look(run_module: RunModule) -> Look:
    """The module, as the role calls it; returns what it found."""

    def run(
        model: Path, *listeners: tuple[str, Any, Any], deployed: Path | None = None, check: bool = False
    ) -> dict[str, Any]:
        code, found = run_module(
            sglang_host_info.main,
            check=check,
            model_path=str(model),
            listeners=[dict(zip(("instance", "host", "port"), each, strict=True)) for each in listeners],
            state_dir=str(deployed or model),
        )
        assert (code, found["changed"]) == (0, False)
        return found

    return run


@pytest.mark.parametrize(("host", "held"), [("127.0.0.1", "127.0.0.1"), (ANY, "127.0.0.1")])
def test_a_port_that_another_holds_is_told_with_its_holder(
    look: Look, tmp_path: Path, host: str, held: str
) -> None:
    with socket.create_server((held, 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = look(tmp_path, ("main", host, port))["unable_to_listen"]
        assert (found["why"], found["port"]) == ("taken", port)
        assert f"(pid {os.getpid()}" in found["by"]
        assert found["units"] == [Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2]]
        # Of an address that nobody listens on the same port is free.
        assert look(tmp_path, ("main", "127.0.0.2", port))["unable_to_listen"] == []
    assert look(tmp_path, ("main", host, port))["unable_to_listen"] == []


def test_a_port_that_our_own_unit_holds_is_ours(look: Look, tmp_path: Path) -> None:
    unit = Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2]
    (tmp_path / "main").mkdir()
    (tmp_path / "main/instance.json").write_text(json.dumps({"unit": unit}))
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        main, other = ("main", "127.0.0.1", port), ("other", "127.0.0.1", port)
        for listed in ([main], [other], [main, other]):
            assert look(tmp_path, *listed, deployed=tmp_path)["unable_to_listen"] == []
        # Instances are deployed in turn: main still has its port when the one before it is started.
        (found,) = look(tmp_path, other, ("main", "127.0.0.2", port), deployed=tmp_path)["unable_to_listen"]
        assert (found["instance"], found["why"]) == ("other", "taken")


def test_who_listens_on_another_address_is_not_in_the_way(look: Look, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = f"""
import socket
server = socket.create_server(("127.0.0.2", {port}))
print("listens", flush=True)
input()
"""
        with subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "listens\n"
            (found,) = look(tmp_path, ("main", "127.0.0.1", port))["unable_to_listen"]
            other.communicate("\n")
    assert f"(pid {os.getpid()}" in found["by"]
    assert f"(pid {other.pid}" not in found["by"]


def test_a_port_that_only_root_may_listen_on_is_told(look: Look, tmp_path: Path) -> None:
    (found,) = look(tmp_path, ("main", "127.0.0.1", 443))["unable_to_listen"]
    assert found["why"] == "privileged"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no such name", "host.invalid", "a..b"])
def test_an_address_that_is_not_the_hosts_is_told(look: Look, tmp_path: Path, host: str) -> None:
    (found,) = look(tmp_path, ("main", host, 30000))["unable_to_listen"]
    assert found["why"] == "address"


@pytest.mark.parametrize("port", ["many", "", "-1", 0, 65536, True, None, 1.5, [443], {"a": 443}, "\u00b2"])
def test_a_port_that_is_none_is_passed_over(look: Look, tmp_path: Path, port: Any) -> None:
    (found,) = look(tmp_path, ("main", "127.0.0.1", port), ("second", ["::1"], "443"))["unable_to_listen"]
    assert (found["instance"], found["port"]) == ("second", 443)


def test_the_module_returns_what_it_promises(look: Look, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    found = look(tmp_path, ("main", "127.0.0.1", 443), check=True)
    assert set(yaml.safe_load(sglang_host_info.RETURN)) == set(found) - {"changed", "invocation"}
    assert found["machine"] == os.uname().machine
    assert found["systemd"] is Path("/run/systemd/system").is_dir()
    assert (found["vocab_size"], found["model_begun"]) == (8, True)


def test_a_folder_that_may_not_be_looked_into_counts_as_begun(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(folder)

    monkeypatch.setattr(Path, "iterdir", refused)
    assert look(tmp_path / "model", deployed=tmp_path)["model_begun"] is True


@pytest.mark.parametrize("record", ["", "[]", "{}", "null"])
def test_a_record_that_is_none_is_named(run_module: RunModule, tmp_path: Path, record: str) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "main/instance.json").write_text(record)
    code, found = run_module(sglang_host_info.main, state_dir=str(tmp_path))
    assert code == 1
    assert str(tmp_path / "main/instance.json") in found["msg"]


def test_what_cannot_be_listened_on_is_refused_where_a_server_follows(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"sglang_server_port": taken.getsockname()[1], "sglang_server_host": ANY}
        (found,) = complaints(tmp_path, preflight_serves=True, **given)
        assert f"port {given['sglang_server_port']} (instance main)" in found
        assert complaints(tmp_path, preflight_serves=False, **given) == []


def test_a_model_that_is_not_there_is_refused_where_a_server_follows_and_nothing_brings_it(
    tmp_path: Path,
) -> None:
    gone, brought = str(tmp_path / "gone"), str(tmp_path / "brought")
    (tmp_path / "gone").mkdir()  # a folder that is no model
    listed = [{"instance": "a", "port": 2001}, {"instance": "b", "port": 2002, "model_path": gone}]
    named = [{"instance": "a", "port": 2001, "model_path": "owner/name"}]
    serving = {"preflight_serves": True, "sglang_server_instances": listed}
    (found,) = complaints(tmp_path, **serving)
    assert f"none at {gone} (instance b);" in found
    (found,) = complaints(tmp_path, **serving, sglang_model_path=gone)
    assert f"none at {gone} (instance a), none at {gone} (instance b);" in found
    (found,) = complaints(tmp_path, **serving, sglang_model_path=brought, sglang_model_source="dummy")
    assert brought not in found
    inside = [{"instance": "a", "port": 2001, "model_path": f"{gone}/sub/"}]
    filled = {"sglang_model_path": gone, "sglang_model_source": "dummy"}
    assert complaints(tmp_path, preflight_serves=True, sglang_server_instances=inside, **filled) == []
    assert complaints(tmp_path, sglang_server_instances=listed) == []
    assert complaints(tmp_path, preflight_serves=True, sglang_server_instances=named) == []


def test_good_values_pass(tmp_path: Path) -> None:
    found = complaints(
        tmp_path,
        sm120_gates_policy="off",
        sglang_promote_blocks=["off", "on", "off"],
        sglang_promote_repeats=5,
        sglang_verify_text_check="off",
        pve_gpu_vm_hugepages="off",
        sglang_server_user="own",
        sglang_server_home="/data/own",
        sglang_server_instances=[
            {
                "instance": "a",
                "port": "1",
                "allreduce_fusion": "off",
                "user": "own",
                "pcie_ipc_allreduce": "yes",
            },
            {"instance": "b", "port": 2, "max_running_requests": "8", "extra_arguments": {"x": 1}},
            {"instance": "c", "port": 3, "user": "other", "extra_environment": {"A": "1"}, "insist": []},
        ],
    )
    assert found == []


@pytest.mark.parametrize(
    ("config", "size"),
    [({"thinker_config": {"text_config": {"vocab_size": 32}}}, "32"), ([1], "")],
)
def test_misspelt_names_keys_and_vocabularies(tmp_path: Path, config: Any, size: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    said = "\n".join(
        complaints(
            tmp_path,
            sglang_runtime_device="cpu",
            sglang_server_prot=30001,
            sglang_zzz=1,
            sglang_server_instances=[{"instance": "chat", "api_key": "s3cret-key\n"}],
            sglang_model_path=str(tmp_path / "model"),
            sglang_verify_vocab_size=2048,
        )
    )
    assert "sglang_server_prot (did you mean sglang_server_port?)" in said
    assert "sglang_zzz" in said
    assert "sglang_zzz (did" not in said
    assert "wanted: sglang_server_api_key as one line" in said
    assert "s3cret-key" not in said
    assert (f"of at most the model's vocabulary ({size})" in said) is bool(size)
