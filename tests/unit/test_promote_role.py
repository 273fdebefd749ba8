"""Parts of sglang_promote and sglang_server that no CPU shows: fusion that is not active, what a verdict holds for."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from fake_sglang import Fake, Reply, generated_by, page, serve, speaking, stream_reply
from local_play import play

ACTIVE = "[x TP0] FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0"
OLD_ACTIVE = "[x TP0] FlashInfer workspace initialized for rank 0, world_size 2, backend trtllm"
SKIPPED = "[x TP1] FlashInfer workspace preflight probe failed (x). Skipping allreduce fusion."
BLOCK = """
- hosts: localhost
  gather_facts: false
  vars: {sglang_server_facts: {deployed: {main: {unit: sglang-main.service}}}}
  tasks:
    - ansible.builtin.include_role: {name: sglang_promote, tasks_from: active}
"""


def programs(place: Path, **scripts: str) -> Path:
    """A folder of programs that stand in for the host's."""
    folder = place / "programs"
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("logged", "code", "said"),
    [
        (ACTIVE, 0, ""),
        (OLD_ACTIVE, 0, ""),
        (f"{ACTIVE}\n{SKIPPED}", 2, "Skipping allreduce fusion."),
        ("[x] ready to roll!", 2, "no word about it"),
    ],
    ids=["active", "active before 0.5.14", "skipped on a rank", "unsaid"],
)
def test_a_side_on_without_active_fusion_is_refused(
    tmp_path: Path, logged: str, code: int, said: str
) -> None:
    stand_ins = programs(
        tmp_path,
        systemctl="echo LoadState=loaded; echo ActiveState=active; echo InvocationID=0a0b",
        journalctl=f"case \"$*\" in *_SYSTEMD_INVOCATION_ID=0a0b*) echo '{logged}';; esac",
    )
    got, output = play(tmp_path, BLOCK, stand_ins=stand_ins)
    assert got == code, output
    assert said in output
    assert ("Wanted: all-reduce fusion active" in output) == (code != 0)


# --- what was decided does not run -----------------------------------------------------------------------------------
MEASURE = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: sglang_promote, tasks_from: measure}
"""


SHORT: dict[str, Any] = {
    "sglang_promote_concurrency": [2],
    "sglang_promote_requests_per_stream": 1,
    "sglang_verify_text_check": "count",
    "sglang_verify_vocab_size": 64,  # nothing else could tell it here
    "sglang_runtime_facts": {"device": "cpu", "versions": {}},
}


def measure(tmp_path: Path, fake: Fake, **given: Any) -> tuple[int, str]:
    """Run the task file over an instance that is the fake server: (exit status, output)."""
    return play(
        tmp_path,
        MEASURE,
        stand_ins=programs(
            tmp_path,
            systemctl="echo LoadState=loaded; echo ActiveState=active; echo SubState=running",
            journalctl="exit 0",
        ),
        sglang_promote_artifacts_dir=str(tmp_path / "artifacts"),
        sm120_gates_facts={"packages": {}, "gates": [], "digest": "ab"},
        sglang_server_api_keys={"main": ""},
        sglang_server_facts={
            "verdicts_dir": str(tmp_path / "verdicts"),
            "deployed": {"main": {"url": fake.url, "unit": "sglang-main.service"}},
            "verdict_keys": {"main": "k"},
        },
        **given,
    )


SERVES = "- ansible.builtin.debug: {msg: serves}\n"
DIES = "- {name: Serve, ansible.builtin.fail: {msg: no memory left}}\n"


@pytest.mark.parametrize(
    ("server", "said"),
    [(DIES, "(Serve): no memory left"), (SERVES, "(Wait until it answers)")],
    ids=["dies", "answers nonsense"],
)
def test_the_report_is_there_when_what_was_decided_does_not_run(
    tmp_path: Path, server: str, said: str
) -> None:
    tasks = tmp_path / "roles/sglang_server/tasks"  # a role beside the playbook is found first
    tasks.mkdir(parents=True)
    (tasks / "main.yml").write_text(server)

    def nonsense(_fake: Fake, sock: socket.socket, body: Any) -> None:
        told = generated_by("0.5.9", body["sampling_params"]["max_new_tokens"])
        sock.sendall(page(told | {"text": "\N{REPLACEMENT CHARACTER}" * 32}))

    with serve(speaking("0.5.9")) as fake:
        fake.routes["/generate"] = nonsense
        code, output = measure(
            tmp_path,
            fake,
            sglang_promote_blocks=[],  # nothing was measured: a verdict all the same
            sglang_promote_timeout_seconds=60,
        )
    assert code == 2, output
    assert "What was decided does not run as it should" in " ".join(output.split())
    (run,) = (tmp_path / "artifacts/localhost").glob("*/run.json")
    told = json.loads(run.read_text())
    assert told["verdict"]["bad"]
    assert said in told["verdict"]["reasons"][-1]
    assert run.with_name("report.html").exists()


CRASHES = """
- name: Serve
  ansible.builtin.fail: {msg: "memory.kv_pool: no room for the cache"}
  when: (sglang_server_trial | default({})).main.allreduce_fusion | default('off') == 'on'
"""


def streams_too(fake: Fake, streamed: Reply) -> None:
    whole = fake.routes["/generate"]

    def generate(it: Fake, sock: socket.socket, body: Any) -> None:
        reply = streamed if body.get("stream") else whole
        assert not isinstance(reply, bytes)
        reply(it, sock, body)

    fake.routes["/generate"] = generate


DIES_WITH_FUSION_KEPT = """
- name: Tell the fake which side this is
  ansible.builtin.copy:
    content: "{{ (sglang_server_trial | default({})).main.allreduce_fusion | default('off') }}"
    dest: "{{ playbook_dir }}/side"
    mode: "0600"
- name: Serve
  ansible.builtin.fail: {msg: no memory left}
  when: >-
    not (sglang_server_trial | default({})).main | default({})
    and (lookup('ansible.builtin.file', sglang_server_facts.verdicts_dir ~ '/main.json') | from_json).keep
"""


def test_fusion_that_was_kept_and_does_not_run_is_taken_back(tmp_path: Path) -> None:
    tasks = tmp_path / "roles/sglang_server/tasks"
    tasks.mkdir(parents=True)
    (tasks / "main.yml").write_text(DIES_WITH_FUSION_KEPT)
    fused, unfused = stream_reply(), stream_reply(delay=0.03)

    def faster_with_fusion(it: Fake, sock: socket.socket, body: Any) -> None:
        (fused if (tmp_path / "side").read_text() == "on" else unfused)(it, sock, body)

    with serve(speaking("0.5.9")) as fake:
        streams_too(fake, faster_with_fusion)
        code, output = measure(
            tmp_path,
            fake,
            sglang_promote_blocks=["off", "on"],
            sglang_promote_repeats=5,
            sglang_promote_output_tokens=16,
            **SHORT,
        )
    assert code == 2, output
    assert "The server runs with fusion off." in " ".join(output.split())
    verdict = json.loads((tmp_path / "verdicts/main.json").read_text())
    assert (verdict["verdict"], verdict["keep"]) == ("worse", False)
    assert "no memory left" in verdict["reasons"][0]
    (run,) = (tmp_path / "artifacts/localhost").glob("*/run.json")
    told = json.loads(run.read_text())
    assert told["verdict"]["bad"]
    assert [len(told["sides"][side]["rungs"]) for side in ("off", "on")] == [1, 1]


def test_a_side_on_that_crashes_is_worse_and_the_other_is_served(tmp_path: Path) -> None:
    tasks = tmp_path / "roles/sglang_server/tasks"
    tasks.mkdir(parents=True)
    (tasks / "main.yml").write_text(CRASHES)
    with serve(speaking("0.5.9")) as fake:
        streams_too(fake, stream_reply())
        code, output = measure(
            tmp_path,
            fake,
            sglang_promote_blocks=["off", "on", "off"],
            sglang_promote_repeats=2,
            **SHORT,
        )
        sent = [body["input_ids"] for body in fake.bodies("/generate") if body.get("stream")]
    assert code == 2, output
    said = " ".join(output.split())
    assert "with the change on the server failed: Serve: memory.kv_pool" in said
    assert "The server runs with fusion off." in said
    assert "msg: 'fusion off, 2 streams: " in output
    assert "fusion on, 2 streams" not in output
    assert max(token for ids in sent for token in ids) < 64
    verdict = json.loads((tmp_path / "verdicts/main.json").read_text())
    assert (verdict["verdict"], verdict["keep"], verdict["key"]) == ("worse", False, "k")
    (run,) = (tmp_path / "artifacts/localhost").glob("*/run.json")
    told = json.loads(run.read_text())
    # After the crash no block is measured any more.
    assert [len(told["sides"][side]["rungs"]) for side in ("off", "on")] == [1, 0]
    assert (told["method"]["seed"], told["method"]["vocab_size"]) == (1, 64)
    assert run.with_name("report.html").exists()


# --- what a verdict holds for ---------------------------------------------------------------------------------------
# Each case is templated as in the loop over instances, where `server` is the instance's values under a trial's.
KEYS = """
- hosts: localhost
  gather_facts: false
  vars_files: [role.yml]
  vars:
    sm120_gates_facts: {digest: ab, features: {allreduce_fusion: open}}
    sglang_runtime_facts: {release: 0.5.23, versions: {sglang: 0.5.23, torch: 2.11.0}}
    sglang_server_facts: {gpus: [GPU-1], verdicts: {}, verdict_keys: {main: k}, probe_failed: false, deployed: {}}
    __sglang_server_model_config: {stat: {checksum: "{{ case.model | default('c0') }}"}}
    __sglang_server_name: main
    __sglang_server_profiles: "{{ base_profiles | combine(case.profiles | default({}), recursive=true) }}"
    server: "{{ values | combine(case.server | default({})) }}"
  tasks:
    - ansible.builtin.set_fact: {values: "{{ __sglang_server_values }}"}
    - ansible.builtin.set_fact:
        keys: "{{ keys | default({}) | combine({case.name: [__sglang_server_verdict_key] + more}) }}"
      vars:
        more: "{{ [__sglang_server_tensor | int, __sglang_server_arguments] if case.all | default(false) else [] }}"
      loop: "{{ cases }}"
      loop_control: {loop_var: case, label: "{{ case.name }}"}
    - ansible.builtin.copy: {content: "{{ keys | to_json }}", dest: "{{ target }}/keys.json", mode: "0600"}
"""
SETTINGS = {"sglang_server_instances": [{"instance": "main"}], "sglang_server_profile": "dense"}
SAME = {
    "as it was": {},
    "fusion on": {"server": {"allreduce_fusion": "on"}},
    "a trial": {
        "server": {"allreduce_fusion": "on", "trial_arguments": {"max-running-requests": 1}},
        "all": True,
    },
    "another address": {
        "server": {"port": 31000, "host": "10.0.0.1", "api_key": "k3y", "served_model_name": "m"}
    },
    "another time limit": {"server": {"start_timeout_seconds": 60}},
}
OTHER = {
    "another argument": {"server": {"extra_arguments": {"chunked-prefill-size": 4096}}},
    "another profile value": {"profiles": {"dense": {"arguments": {"attention-backend": "triton"}}}},
    "another profile environment": {"profiles": {"dense": {"environment": {"NCCL_P2P_LEVEL": "PHB"}}}},
    "another model at the path": {"model": "c1"},
    "another rank": {"server": {"tensor_parallel_size": 4}, "all": True},
    "another toolkit": {"server": {"cuda_home": "/usr/local/cuda"}},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    place = tmp_path_factory.mktemp("keys")
    role = ROOT / "roles/sglang_server"
    defaults, variables, profiles = (
        yaml.safe_load((role / path).read_text())
        for path in ("defaults/main.yml", "vars/main.yml", "vars/profiles.yml")
    )
    text = defaults | SETTINGS | variables | {"base_profiles": profiles["__sglang_server_profiles"]}
    cases = [{"name": name, **case} for name, case in (SAME | OTHER).items()]
    (place / "role.yml").write_text(yaml.safe_dump(text))
    code, output = play(place, KEYS, root=str(ROOT), target=str(place), cases=cases)
    assert code == 0, output
    told: dict[str, list[Any]] = json.loads((place / "keys.json").read_text())
    return told


@pytest.mark.parametrize("name", SAME)
def test_a_verdict_holds_whatever_fusion_and_address_are(keys: dict[str, list[Any]], name: str) -> None:
    assert keys[name][0] == keys["as it was"][0]


@pytest.mark.parametrize("name", OTHER)
def test_a_change_of_what_reaches_sglang_asks_for_a_new_measurement(
    keys: dict[str, list[Any]], name: str
) -> None:
    assert keys[name][0] not in [told[0] for other, told in keys.items() if other != name]


def test_a_trials_arguments_are_over_all_others(keys: dict[str, list[Any]]) -> None:
    told = keys["a trial"][2]
    assert told["max-running-requests"] == 1
    assert told["flashinfer-allreduce-fusion-backend"] == "trtllm"
    assert (keys["another rank"][1], keys["a trial"][1]) == (4, 1)
