"""The role itself, by ansible-playbook on this machine, on files of real wheels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pip
import pytest
import wheels
from conftest import ROOT
from local_play import HOST_PYTHON

PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: sm120_gates, tasks_from: "{{ entry }}"}
"""
# Actions that run on the controller and start nothing on a host.
NO_MODULE = {"set_fact", "assert", "debug", "fail", "include_role", "include_tasks", "validate_argument_spec"}


class Role:
    """One host that is this machine, with its gates in a folder of its own."""

    def __init__(self, folder: Path, site: Path) -> None:
        self.folder, self.site = folder, site
        self.play = folder / "play.yml"
        self.play.write_text(PLAY)
        self.environment: dict[str, str] = {}
        self.settings = {
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_CALLBACK_PLUGINS": f"{ROOT}/playbooks/callback_plugins:{ROOT}/tests/plugins/callback",
            "RECORD_TO": str(folder / "record.jsonl"),
        }
        self.variables: dict[str, Any] = {
            "ansible_python_interpreter": HOST_PYTHON,
            "sm120_gates_sglang_root": str(site / "sglang"),
            "sm120_gates_flashinfer_root": str(site / "flashinfer"),
            "sm120_gates_state_dir": str(folder / "state"),
            "sm120_gates_cache_workspace_base": str(folder / "home"),
            "sm120_gates_cache_users": [],  # this machine may have a user sglang
        }

    def run(self, entry: str = "main", *options: str, **variables: Any) -> tuple[int, dict[str, int], str]:
        given = json.dumps({**self.variables, "entry": entry, **variables})
        program = Path(sys.executable).with_name("ansible-playbook")
        self.record.unlink(missing_ok=True)
        done = subprocess.run(
            [str(program), "-i", "localhost,", "-c", "local", "-e", given, *options, str(self.play)],
            cwd=ROOT,
            env={**os.environ, **self.settings, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        recap = re.findall(r"(\w+)=(\d+)", done.stdout.rpartition("PLAY RECAP")[2])
        return done.returncode, {name: int(count) for name, count in recap}, done.stdout + done.stderr

    @property
    def record(self) -> Path:
        return self.folder / "record.jsonl"

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def told(self) -> dict[str, Any]:
        """The facts that the role set last."""
        return [line["facts"] for line in self.results() if "facts" in line][-1]  # type: ignore[no-any-return]

    def modules(self) -> list[str]:
        """What ran on the host, in its order."""
        actions = [line["action"].rpartition(".")[2] for line in self.results()]
        return [action for action in actions if action not in NO_MODULE]

    def plant(self, base: str = "home") -> Path:
        marker = self.folder / base / ".cache/flashinfer/0.6.3/120a/cached_ops/trtllm_comm/marker"
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text("x")
        return marker


@pytest.fixture
def role(make_site: Any, tmp_path: Path) -> Role:
    site: Path = make_site("0.5.9", "0.6.3")
    (site / "pip").symlink_to(Path(pip.__file__).parent)  # every venv has one, and in it what reads versions
    return Role(tmp_path, site)


def test_teardown_without_the_packages_takes_the_records_away_and_purges(role: Role) -> None:
    assert role.run()[0] == 0
    marker, state = role.plant(), role.folder / "state"
    # Packages that are there, and that the variables do not lead to, keep their records.
    elsewhere = {f"sm120_gates_{name}_root": f"/nonexistent/{name}" for name in ("sglang", "flashinfer")}
    code, _, output = role.run("teardown", **elsewhere)
    assert (code, state.exists(), marker.exists()) == (2, True, True), output
    shutil.rmtree(role.site)
    code, _, output = role.run("teardown", "--check")
    assert (code, state.exists(), marker.exists()) == (0, True, True), output
    code, _, output = role.run("teardown")
    assert (code, state.exists(), marker.exists()) == (0, False, False), output
    code, recap, output = role.run("teardown")
    assert (code, recap["changed"]) == (0, 0), output


def test_check_apply_again_revert_again(role: Role) -> None:
    marker = role.plant()
    code, recap, output = role.run("main", "--check", "--diff")
    assert (code, recap["failed"]) == (0, 0), output
    assert "+_is_sm120_supported = _is_cuda and is_sm120_supported()" in output
    assert wheels.differing(role.site) == set()
    assert marker.exists()
    assert not (role.folder / "state").exists()

    code, recap, output = role.run()
    assert code == 0, output
    assert len(wheels.differing(role.site)) == 6
    assert not marker.exists()
    assert role.told()["sm120_gates_facts"]["features"] == {
        "allreduce_fusion": "open",
        "moe_autotune": "open",
    }
    assert role.told()["sm120_gates_facts"]["wanted"] == ["allreduce_fusion", "moe_autotune"]
    assert role.told()["sm120_gates_stopped_units"] == []
    assert not (role.folder / "state/lock.json").exists()

    code, recap, output = role.run()
    assert (code, recap["changed"]) == (0, 0), output
    assert role.modules() == ["sm120_gates_info"]

    marker = role.plant()
    code, recap, output = role.run("revert", "--check", "--diff")
    assert (code, marker.exists()) == (0, True), output
    assert "-_is_sm120_supported = _is_cuda and is_sm120_supported()" in output
    assert len(wheels.differing(role.site)) == 6
    code, recap, output = role.run("revert")
    assert (code, marker.exists()) == (0, False), output
    assert wheels.differing(role.site) == set()
    assert role.told()["sm120_gates_facts"]["digest"] == "pristine"
    code, recap, output = role.run("revert")
    assert (code, recap["changed"]) == (0, 0), output
    assert role.modules() == ["sm120_gates_info"]


def opened(output: str) -> bool:
    return (
        re.search(r"TASK \[sm120_gates : Remember that this play opens [^]]*\] \*+\nok:", output) is not None
    )


def test_what_an_earlier_play_opened_is_not_this_ones(role: Role) -> None:
    code, _, output = role.run(sm120_gates_features=["moe_autotune"])
    assert (code, opened(output)) == (0, False), output
    code, _, output = role.run()
    assert (code, opened(output)) == (0, True), output
    code, recap, output = role.run(sm120_gates_features=["allreduce_fusion"])  # closes the other
    assert (code, opened(output)) == (0, False), output
    assert recap["changed"] > 0


def test_every_cache_that_a_variable_names_is_purged(role: Role) -> None:
    bases = {
        name: str(role.folder / name)
        for name in ("home", "server", "probe", "own", "common", "extra", "lived")
    }
    named = {
        "sglang_server_flashinfer_workspace_base": bases["server"],
        "fusion_probe_environment": {"FLASHINFER_WORKSPACE_BASE": bases["probe"]},
        "sglang_server_home": bases["lived"],
        "sglang_server_extra_environment": {"FLASHINFER_WORKSPACE_BASE": bases["common"]},
        "sglang_server_instances": [
            {"instance": "a", "flashinfer_workspace_base": bases["own"]},
            {"instance": "b", "extra_environment": {"FLASHINFER_WORKSPACE_BASE": bases["extra"]}},
            {"instance": "c", "extra_environment": {"OMP_NUM_THREADS": "1"}},
        ],
    }
    for entry in ("main", "revert"):
        markers = [role.plant(base) for base in bases]
        foreign = role.plant("foreign")
        code, _, output = role.run(entry, **named)
        assert code == 0, output
        assert [marker for marker in markers if marker.exists()] == []
        assert foreign.exists()


def test_policy_off_closes(role: Role) -> None:
    assert role.run(sm120_gates_policy="forced")[0] == 0
    assert role.run(sm120_gates_policy="off")[0] == 0
    assert role.told()["sm120_gates_facts"]["wanted"] == []
    assert wheels.differing(role.site) == set()
    assert role.run(sm120_gates_state="absent")[0] == 0
    assert role.told()["sm120_gates_facts"]["wanted"] == []


def test_a_file_that_is_not_as_planned_puts_everything_back(role: Role) -> None:
    path = role.site / "sglang/srt/server_args.py"
    delivered = role.folder / "delivered.py"
    delivered.write_bytes(path.read_bytes())
    role.environment = {
        "AT_TASK": "Compare every file with the planned hash",
        "AT_DO": "copy",
        "AT_FROM": str(delivered),
        "AT_TO": str(path),
    }
    code, recap, output = role.run()
    assert (code, recap["rescued"], recap["failed"]) == (2, 1, 1), output
    assert "server_args.py: expected sha256" in output
    assert wheels.differing(role.site) == set()
    assert not (role.folder / "state/lock.json").exists()
    role.environment = {}
    assert role.run()[0] == 0
    assert len(wheels.differing(role.site)) == 6


def test_drift_refuses_with_nothing_touched(role: Role) -> None:
    path = role.site / "sglang/srt/layers/communicator.py"
    path.write_text(path.read_text() + "# a note\n")
    code, recap, output = role.run()
    assert (code, recap["changed"], recap["failed"]) == (2, 0, 1), output
    assert str(path) in output
    assert wheels.differing(role.site) == {"sglang/srt/layers/communicator.py"}
    assert not (role.folder / "state").exists()


def test_check_mode_before_there_is_a_runtime(role: Role) -> None:
    nowhere = {
        "sm120_gates_sglang_root": "",
        "sm120_gates_flashinfer_root": "",
        "sm120_gates_python": "/nowhere/python",
    }
    code, _, output = role.run("main", "--check", **nowhere)
    assert code == 0, output
    assert role.told()["sm120_gates_facts"]["packages"] == {}
    assert set(role.told()["sm120_gates_facts"]["features"].values()) == {"unknown"}
    code, _, output = role.run("main", **nowhere)
    assert code == 2
    assert "/nowhere/python" in output


def test_a_dead_lock_is_taken_over_and_a_foreign_one_is_not(role: Role, lookup: ModuleType) -> None:
    state = role.folder / "state"
    state.mkdir(mode=0o700)
    lock = {"id": "x1", "user": "ann", "host": os.uname().nodename, "since": "then"}
    lock |= {"pid": 2**22 - 1, "pid_started": "1", "where": lookup._where(os.uname().nodename)}
    (state / "lock.json").write_text(json.dumps(lock))
    code, _, output = role.run()
    assert code == 0, output
    assert not (state / "lock.json").exists()
    (state / "lock.json").write_text(json.dumps({**lock, "where": "elsewhere"}))
    code, _, output = role.run("revert")
    assert code == 2
    assert "sm120_gates_break_lock=x1" in output
    assert len(wheels.differing(role.site)) == 6
    code, _, output = role.run("revert", sm120_gates_break_lock="x1")
    assert code == 0, output
    assert wheels.differing(role.site) == set()


@pytest.mark.parametrize(
    ("given", "users"),
    [
        ({}, ["sglang"]),
        ({"sglang_server_user": "own"}, ["own"]),
        (
            {
                "sglang_server_user": "own",
                "sglang_server_instances": [
                    {"instance": "a"},
                    {"instance": "b", "user": "other"},
                    {"user": "own"},
                ],
            },
            ["own", "other"],
        ),
    ],
)
def test_the_cache_of_every_instances_user_is_purged(given: dict[str, Any], users: list[str]) -> None:
    program = [str(Path(sys.executable).with_name("ansible")), "localhost", "-m", "ansible.builtin.debug"]
    variables = ["-e", f"@{ROOT / 'roles/sm120_gates/defaults/main.yml'}", "-e", json.dumps(given)]
    done = subprocess.run(
        [*program, "-a", "var=sm120_gates_cache_users", *variables],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
        capture_output=True,
        text=True,
    )
    told = json.loads(done.stdout.partition("=>")[2])
    assert told["sm120_gates_cache_users"] == users
