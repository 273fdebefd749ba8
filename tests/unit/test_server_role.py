"""The role sglang_server on this machine, in check mode: what it would write and what it tells other roles."""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_play import ROOT, play

KEY = "key-4f9a1c7e"
PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact:
        sglang_runtime_facts: {device: "{{ device }}", release: 0.5.23, versions: {sglang: 0.5.23}}
        sm120_gates_facts: {digest: pristine, features: {allreduce_fusion: closed}}
    - ansible.builtin.include_role: {name: sglang_server, tasks_from: "{{ entry }}", public: true}
    - ansible.builtin.copy:
        content: "{{ {'facts': sglang_server_facts, 'keys': sglang_server_api_keys} | to_json }}"
        dest: "{{ folder }}/told.json"
      diff: false
      check_mode: false
"""
# Nothing is listed, so that nothing is served.
SERVE = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact:
        sglang_runtime_facts: {device: "{{ device }}", release: 0.5.23, versions: {sglang: 0.5.23}}
    - ansible.builtin.include_role: {name: sglang_server}
      vars:
        __sglang_server_names: [main]
        __sglang_server_handled: []
        __sglang_server_users_left: []
"""
ADDRESS = """
    - ansible.builtin.copy: {content: "{{ __sglang_server_url }}", dest: "{{ folder }}/{{ number }}.url"}
      vars:
        server: {host: "{{ item }}", port: 30000}
      loop: "{{ hosts }}"
      loop_control: {index_var: number}
"""


def served(place: Path, entry: str, *options: str, **given: Any) -> str:
    """What a run printed."""
    places = {"__sglang_server_etc": str(place / "etc"), "__sglang_server_users_dir": str(place / "users")}
    user = {"sglang_server_user": "daemon", "sglang_server_home": "/usr/sbin"}  # is on every machine
    variables = {"folder": str(place), "entry": entry, "device": "cpu", **user, **places, **given}
    code, output = play(place, PLAY, *options, **variables)
    assert code == 0, output
    return output


def facts(place: Path, *options: str, **given: Any) -> dict[str, Any]:
    output = served(place, "facts", *options, **given)
    return {**json.loads((place / "told.json").read_text()), "output": output}


def record(place: Path, instance: str, user: str) -> None:
    (place / "etc" / instance).mkdir(parents=True)
    known = {"unit": f"sglang-{instance}.service", "user": user, "home": "/nonexistent"}
    (place / "etc" / instance / "instance.json").write_text(json.dumps(known))


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho release 13.0,\n")
    nvcc.chmod(0o755)
    return tmp_path / "cuda"


@pytest.mark.parametrize("entry", ["main", "revert"])
def test_the_toolkit_is_looked_for_wherever_a_server_is_written(
    tmp_path: Path, toolkit: Path, entry: str
) -> None:
    record(tmp_path, "main", "nobody")
    given = {"cuda_toolkit_method": "existing", "cuda_toolkit_path": str(toolkit)}
    output = served(tmp_path, entry, "--check", "--diff", device="cuda", **given)
    assert f'+CUDA_HOME="{toolkit}"' in output
    assert "Would start sglang-main.service" in output  # a preview tells what would follow


def test_what_sglang_refuses_is_refused_before_the_old_name_is_touched(tmp_path: Path) -> None:
    record(tmp_path, "old", "nobody")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {
        "systemctl": f'echo "$*" >> {tmp_path}/calls; [ "$1" != is-active ] || echo active',
        "python": "echo 'Found: --prot' >&2; exit 1",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    account = pwd.getpwuid(os.getuid())
    code, output = play(
        tmp_path,
        PLAY,
        stand_ins=programs,
        folder=str(tmp_path),
        entry="main",
        device="cpu",
        sglang_server_instance="new",
        sglang_server_python=str(programs / "python"),
        sglang_server_model_path=str(tmp_path),
        sglang_server_user=account.pw_name,
        sglang_server_home=account.pw_dir,
        **{
            f"__sglang_server_{name}": str(tmp_path / name)
            for name in ("etc", "lib", "users_dir", "verdicts_dir")
        },
    )
    assert code == 2, output
    assert "Instance new. Found: --prot" in output
    assert (tmp_path / "etc/old/instance.json").exists()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {"is-active"}


# Stands in for writing an instance's files and for running it, first one, then the other.
WORK = """
- ansible.builtin.shell: |
    echo {{ server.instance }} {{ server.port }} >> {{ folder }}/done
    [ $(grep -c "^{{ server.instance }} " {{ folder }}/done) != {{ server.fails_at }} ]
"""
LISTED = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: sglang_server, tasks_from: serve}
      vars:
        __sglang_server_served: "{{ __sglang_server_resolved | list }}"
        __sglang_server_changes: {port: "{{ 1 if __sglang_server_name == 'good' else 2 }}"}
        __sglang_server_unlisted: [{key: old, value: {unit: none}}]
"""


def test_who_is_refused_or_does_not_start_keeps_down_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "work.yml").write_text(WORK)
    (tmp_path / "etc/unwritten").mkdir(parents=True)
    record(tmp_path, "silent", "nobody")
    instances = {
        name: {"instance": name, "port": 0, "fails_at": place}
        for name, place in {"unwritten": 1, "silent": 2, "good": 0}.items()
    }
    code, output = play(
        tmp_path,
        LISTED,
        folder=str(tmp_path),
        __sglang_server_work=str(tmp_path / "work.yml"),
        __sglang_server_etc=str(tmp_path / "etc"),
        __sglang_server_resolved=instances,
    )
    assert code == 2, output
    done = (tmp_path / "done").read_text().splitlines()
    assert done == ["unwritten 2", "silent 2", "good 1", "silent 2", "good 1"]
    assert [path.name for path in (tmp_path / "etc").iterdir()] == ["silent"]
    told = output.rpartition("Say what is not served as wanted")[2]
    for sentence in (
        "Instance unwritten.",
        "Instance silent.",
        "Served as wanted: good.",
        ": old.",
    ):
        assert sentence in " ".join(told.split())


def test_the_address_that_an_instance_is_asked_at(tmp_path: Path) -> None:
    asked = {
        "127.0.0.1": "127.0.0.1",
        "0.0.0.0": "127.0.0.1",  # noqa: S104
        "::": "[::1]",
        "fd00::7": "[fd00::7]",
        "gpu1.example.com": "gpu1.example.com",
    }
    text = f"{PLAY}{ADDRESS}"
    places = {"folder": str(tmp_path), "entry": "facts", "device": "cpu", "hosts": list(asked)}
    code, output = play(tmp_path, text, **places)
    assert code == 0, output
    urls = [(tmp_path / f"{number}.url").read_text() for number in range(len(asked))]
    assert urls == [f"http://{address}:30000" for address in asked.values()]


JUDGED = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.copy: {content: "{{ CONDITION }}", dest: "{{ folder }}/{{ item.key }}"}
      vars: {__sglang_server_health: "{{ item.value }}"}
      loop: "{{ answers | dict2items }}"
      loop_control: {label: "{{ item.key }}"}
"""


def test_a_start_is_done_when_the_units_own_server_answers(tmp_path: Path) -> None:
    tasks = yaml.safe_load((ROOT / "roles/sglang_server/tasks/run.yml").read_text())
    (condition,) = [task["failed_when"] for task in tasks if "sglang_health" in task]
    answers: dict[str, Any] = {
        "right": {"status": "healthy", "evidence": {}},
        "wrong": {"status": "degraded", "evidence": {"generation": {}}},
        "another": {"status": "degraded", "evidence": {"stranger": {"pid": 77}}},
        "none": {"status": "crashed", "evidence": {}},
        "unasked": {"failed": True, "msg": "the server answers 401"},
    }
    text = JUDGED.replace("CONDITION", " ".join(condition.split()))
    code, output = play(tmp_path, text, folder=str(tmp_path), answers=answers)
    assert code == 0, output
    failed = {name for name in answers if (tmp_path / name).read_text() == "True"}
    assert failed == {"another", "none", "unasked"}


def test_what_other_roles_are_told(tmp_path: Path) -> None:
    record(tmp_path, "left", "sys")
    (tmp_path / "users").mkdir()
    for name in ("daemon", "nobody-knows"):
        (tmp_path / "users" / name).touch()
    both: list[dict[str, Any]] = [{"instance": "a"}, {"instance": "b", "api_key": f"{KEY}-b"}]
    given = {"sglang_server_api_key": KEY, "sglang_server_instances": both}
    told = facts(tmp_path, "-vvv", **given)
    # Only marked users are ours; a mark without a user is nothing.
    made = {name: each["made"] for name, each in told["facts"]["users"].items()}
    assert made == {"daemon": True, "sys": False}
    # A key is at hand, and shown nowhere.
    assert told["keys"] == {"a": KEY, "b": f"{KEY}-b", "left": KEY}
    assert KEY not in told["output"]
    # A verdict is about what would run now, not about what was deployed.
    keys = told["facts"]["verdict_keys"]
    both[1]["extra_arguments"] = {"schedule-policy": "fcfs"}
    changed = facts(tmp_path, **given)["facts"]["verdict_keys"]
    assert [changed[name] == keys[name] for name in ("a", "b")] == [True, False]


def test_what_reads_like_a_secret_is_not_in_a_difference(tmp_path: Path) -> None:
    given = {
        "sglang_server_extra_arguments": {"admin-api-key": KEY},
        "sglang_server_extra_environment": {"HF_TOKEN": KEY},
    }
    output = served(tmp_path, "main", "--check", "--diff", **given)
    assert KEY not in output
    assert "They hold admin-api-key" in " ".join(output.split())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_driver_that_does_not_answer_keeps_servers_untouched(tmp_path: Path, device: str) -> None:
    record(tmp_path, "main", "nobody")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho Driver/library version mismatch; exit 18\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    told = facts(tmp_path, stand_ins=tmp_path)["facts"]
    assert (told["gpus"], told["silence"]) == ([], "exit 18: Driver/library version mismatch")
    code, output = play(
        tmp_path,
        SERVE,
        stand_ins=tmp_path,
        device=device,
        __sglang_server_etc=str(tmp_path / "etc"),
        __sglang_server_users_dir=str(tmp_path / "users"),
    )
    assert code == (2 if device == "cuda" else 0), output
    assert ("Found: exit 18" in " ".join(output.split())) is (device == "cuda")
    assert "\nchanged:" not in output


@pytest.mark.parametrize(("action", "code"), [("look", 0), ("stop", 1)])
def test_a_stop_that_fails_is_one_sentence(tmp_path: Path, action: str, code: int) -> None:
    calls = tmp_path / "calls"
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f"#!/bin/sh\necho $* >> {calls}\n"
        '[ "$1" != stop ] || { echo "Job for it canceled." >&2; exit 1; }\n'
        '[ "$1" != is-active ] || echo active\n'
    )
    systemctl.chmod(0o755)
    program = (ROOT / "roles/sglang_server/files/stop.py").read_text()
    done = subprocess.run(
        [sys.executable, "-I", "-", '["sglang-a.service"]', action],
        input=program,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert ("stop sglang-a.service" in calls.read_text()) == (action == "stop")
    if action == "stop":
        (sentence,) = done.stderr.splitlines()
        assert sentence.startswith("Wanted: sglang-a.service stopped. Found: Job for it canceled. Look at:")
    else:
        assert json.loads(done.stdout) == ["sglang-a.service"]


def test_a_stop_does_not_wait_for_ever_for_a_tool_that_hangs(tmp_path: Path) -> None:
    for name, does in (
        ("systemctl", '[ "$1" != is-active ] || echo active'),
        ("nvidia-smi", "exec sleep 60"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    program = (ROOT / "roles/sglang_server/files/stop.py").read_text()
    assert "ANSWER_SECONDS = 60\n" in program
    done = subprocess.run(
        [sys.executable, "-I", "-", '["sglang-a.service"]', "stop"],
        input=program.replace("ANSWER_SECONDS = 60\n", "ANSWER_SECONDS = 5\n"),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    (sentence,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert sentence.startswith("Wanted: an answer of nvidia-smi --query-compute-apps=pid")


PROBE = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: fusion_probe, tasks_from: prepare}
"""


@pytest.mark.parametrize(("home", "code"), [("/usr/sbin", 0), ("/srv/other", 2)])
def test_the_probe_moves_no_home(tmp_path: Path, home: str, code: int) -> None:
    record(tmp_path, "main", "daemon")
    (tmp_path / "daemon").touch()  # made here: somebody else's is refused by its own words
    served = {"user": "daemon", "home": home, "python": sys.executable}
    places = {"__sglang_server_etc": str(tmp_path / "etc"), "__sglang_server_users_dir": str(tmp_path)}
    got, output = play(tmp_path, PROBE, "--check", __fusion_probe_server=served, **places)
    assert got == code, output
    assert "\nchanged:" not in output
    if code:
        told = " ".join(output.split())
        assert "Found: /usr/sbin." in told
        assert "playbooks/serve.yml" in told


def test_the_probe_marks_the_user_that_it_makes(tmp_path: Path) -> None:
    users = tmp_path / "users"
    served = {"user": "sm120-none", "home": "/nonexistent", "python": sys.executable}
    given = {"__fusion_probe_server": served, "__sglang_server_users_dir": str(users)}
    code, output = play(tmp_path, PROBE, "--check", **given)
    assert code == 0, output
    changed = re.findall(r"TASK \[(?:\w+ : )?([^]]+)\] \*+\nchanged:", output)
    assert changed == [
        "Make the folder of marks",
        "Mark the user as one that was made here",
        "Make the user",
    ]


OTHERS = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: sglang_server, tasks_from: others}
"""


def test_an_operators_own_unit_is_started_again(tmp_path: Path) -> None:
    """Whoever stopped it; an instance is for the role to start or to leave."""
    calls = tmp_path / "calls"
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f"#!/bin/sh\necho $* >> {calls}\n[ \"$1\" != show ] || printf 'LoadState=loaded\\nActiveState=inactive\\n'\n"
    )
    systemctl.chmod(0o755)
    given = {
        "sglang_server_facts": {"deployed": {"main": {"unit": "sglang-main.service"}}},
        "sglang_runtime_stopped_units": ["own.service", "sglang-main.service"],
        "sm120_gates_stopped_units": ["sglang-main.service", "other.service"],
    }
    code, output = play(tmp_path, OTHERS, stand_ins=tmp_path, **given)
    assert code == 0, output
    started = [line.split()[-1] for line in calls.read_text().splitlines() if line.startswith("start ")]
    assert started == ["other.service", "own.service"]
    calls.write_text("")
    play(tmp_path, OTHERS, stand_ins=tmp_path, sglang_server_facts=given["sglang_server_facts"])
    assert calls.read_text() == ""


ACCOUNT = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: sglang_server, tasks_from: "{{ part }}"}
      loop: [user, home]
      loop_control: {loop_var: part}
"""


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_an_account_that_was_not_made_here_is_left_as_it_is(tmp_path: Path, runs: bool, same: bool) -> None:
    """Also not in what a preview says; `daemon` is on every machine."""
    home = pwd.getpwnam("daemon").pw_dir if same else "/srv/another"
    known = {"daemon": {"home": pwd.getpwnam("daemon").pw_dir, "made": False}} if runs else {}
    given = {
        "sglang_server_account": {"name": "daemon", "home": home},
        "sglang_server_facts": {"users": known, "deployed": {}},
        "__sglang_server_users_dir": str(tmp_path / "users"),
    }
    code, output = play(tmp_path, ACCOUNT, "--check", **given)
    assert (code == 0) is same, output
    assert "\nchanged:" not in output
    if not same:
        assert f"Found: its home is {pwd.getpwnam('daemon').pw_dir}" in output
        assert "Set sglang_server_home" in output


@pytest.mark.parametrize("there", [True, False])
def test_the_old_home_of_a_user_made_here_goes_before_the_account_changes(
    tmp_path: Path, there: bool
) -> None:
    """One that an interrupted run has removed already does not stand in the way."""
    user = pwd.getpwuid(os.getuid()).pw_name
    if there:
        (tmp_path / "old").mkdir()
    given = {
        "sglang_server_account": {"name": user, "home": str(tmp_path / "new")},
        "sglang_server_facts": {
            "users": {user: {"home": str(tmp_path / "old"), "made": True}},
            "deployed": {},
        },
        "__sglang_server_users_dir": str(tmp_path / "users"),
    }
    code, output = play(tmp_path, ACCOUNT, "--check", **given)
    assert code == 0, output
    changed = re.findall(r"TASK \[(?:\w+ : )?([^]]+)\] \*+\nchanged:", output)
    removed = ["Remove the old home, where the user was made here and owns it"] if there else []
    assert changed == [*removed, "Give the user its new home"]


STOPPED = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: sglang_runtime, tasks_from: make_way}
    - ansible.builtin.debug: {msg: "to be served again: {{ sglang_runtime_stopped_units | join(', ') }}."}
"""


def test_what_a_new_release_set_stops_is_remembered(tmp_path: Path) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        '#!/bin/sh\ncase "$*" in *sglang-a*) echo ActiveState=active;; *) echo ActiveState=inactive;; esac\n'
        "echo LoadState=loaded\n"
    )
    systemctl.chmod(0o755)
    given = {
        "sglang_runtime_facts": {"exists": False, "leaving": [], "executable": ""},
        "sglang_runtime_venv": str(tmp_path),
        "__sglang_runtime_gates": {"units": ["sglang-a.service", "sglang-b.service"]},
    }
    code, output = play(tmp_path, STOPPED, "--check", stand_ins=tmp_path, **given)
    assert code == 0, output
    assert "to be served again: sglang-a.service." in output


PORT = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_vars: {file: "{{ root }}/roles/sglang_server/vars/main.yml"}
    - ansible.builtin.include_tasks: "{{ folder }}/ports.yml"
      vars:
        server: {instance: a, host: 127.0.0.1, port: "{{ port }}"}
        sglang_server_facts: {deployed: {}}
        __sglang_server_wanted_revisions: {a: new}
        __sglang_server_wanted_state: started
"""


def test_a_server_stays_as_it_is_where_another_has_its_port(tmp_path: Path) -> None:
    tasks = yaml.safe_load((ROOT / "roles/sglang_server/tasks/run.yml").read_text())
    (tmp_path / "ports.yml").write_text(yaml.safe_dump(tasks[:2]))  # before anything else
    unit = Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2]
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = {"root": str(ROOT), "folder": str(tmp_path), "port": other.getsockname()[1]}
        assert play(tmp_path, PORT, **given)[0] == 2
        assert play(tmp_path, PORT, **given, __sglang_server_unit=unit)[0] == 0
    assert play(tmp_path, PORT, **given)[0] == 0
