"""A host on which nothing is installed: a preview is honest, and bad values are refused before any change."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import Host

CUDA = {
    "sglang_runtime_device": "cuda",
    "sglang_server_profile": "default",
    "sm120_gates_policy": "measured",
}
# What an operator gets wrong, and what the message has to name.
BAD_VALUES: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "unknown feature": (
        {"sm120_gates_features": ["allreduce_fusion", "warp"]},
        ("sm120_gates_features", "warp"),
    ),
    "port 0": ({"sglang_server_port": 0}, ("65535", "0")),
    "output length -1": ({"sglang_verify_output_tokens": -1}, ("sglang_verify_output_tokens", "-1")),
    "relative venv": ({"sglang_runtime_venv": "venvs/sglang"}, ("sglang_runtime_venv", "venvs/sglang")),
    "unknown release": ({"sglang_runtime_release": "0.4.0"}, ("sglang_runtime_release", "0.4.0")),
    "instances as a string": ({"sglang_server_instances": "chat"}, ("sglang_server_instances", "dict")),
    "an instance that is no dict": (
        {"sglang_server_instances": ["chat"]},
        ("sglang_server_instances", "dict"),
    ),
    "a branch of a hub's repository": (
        {
            "sglang_model_source": "hub",
            "sglang_model_repository": "lab/tiny",
            "sglang_model_revision": "main",
        },
        ("sglang_model_revision", "main"),
    ),
    "a combination that breaks": (
        {
            "sglang_runtime_device": "cuda",
            "sglang_runtime_release": "0.5.23",
            "sglang_server_instances": [
                {
                    "instance": "chat",
                    "profile": "glm5-nvfp4",
                    "extra_arguments": {"kv-cache-dtype": "fp8_e4m3"},
                }
            ],
        },
        ("fp8-kv-dense-mla", "models/glm5.md"),
    ),
    "a toolkit's path with a colon": (
        {"cuda_toolkit_path": ":/usr/local/cuda"},
        ("cuda_toolkit_path", ":/usr/local/cuda"),
    ),
    "a second source of CUDA_HOME": (
        {"sglang_server_instances": [{"instance": "chat", "extra_environment": {"CUDA_HOME": "/opt/cuda"}}]},
        ("cuda_toolkit_path", "/opt/cuda"),
    ),
    "a set that is not for this device": (
        {"sglang_runtime_release": "0.5.20"},
        ("sglang_runtime_release", "0.5.20"),
    ),
    "a release that cannot be measured": (
        {**CUDA, "sglang_runtime_release": "0.5.9"},
        ("sm120_gates_policy", "0.5.12.post1"),
    ),
    "vocabulary too large": ({"sglang_verify_vocab_size": 2049}, ("2048", "2049")),
}


@pytest.fixture(scope="module")
def host(make_host: Any) -> Host:
    made: Host = make_host("bare", 1, baked=False)
    return made


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_one_message_and_no_change(host: Host, case: str) -> None:
    values, named = BAD_VALUES[case]
    snapshot = host.snapshot()
    run = host.play(**values)
    assert run.rc == 2, run.stdout
    assert run.changed == 0
    assert len(run.failures()) == 1, run.failures()
    complaints = [line for line in run.failures()[0].splitlines() if line.startswith("- ")]
    assert len(complaints) == 1, complaints
    assert [name for name in named if name not in complaints[0]] == []
    assert host.snapshot() == snapshot


@pytest.mark.parametrize("playbook", ["runtime", "gates", "probe", "serve", "promote"])
def test_a_playbook_alone_refuses_the_same(host: Host, playbook: str) -> None:
    values, named = BAD_VALUES["a combination that breaks"]
    snapshot = host.snapshot()
    run = host.play(playbook=f"playbooks/{playbook}.yml", **values)
    assert (run.rc, run.changed) == (2, 0), run.stdout
    (failure,) = run.failures()
    assert [name for name in named if name not in failure] == []
    assert host.snapshot() == snapshot


def test_a_release_that_cannot_be_measured_goes_unmeasured(host: Host) -> None:
    given = {**CUDA, "sglang_runtime_release": "0.5.9", "sm120_gates_policy": "forced"}
    run = host.play(playbook="playbooks/preflight.yml", **given)
    assert (run.rc, run.changed) == (0, 0), run.stdout


def test_check_mode_before_anything_is_installed(host: Host) -> None:
    snapshot = host.snapshot()
    run = host.play("--check", "--diff")
    assert run.rc == 0, run.stdout
    assert run.failures() == []
    assert run.changed > 0
    assert run.tasks().count("Look at the host") == 1
    assert host.snapshot() == snapshot
    assert host.execute("id sglang")[0] == 1
    assert "sglang-" not in host.sh("systemctl list-unit-files")


def test_revert_of_a_host_that_was_never_changed(host: Host) -> None:
    snapshot = host.snapshot()
    run = host.play("--tags", "revert", "--check")
    assert (run.rc, run.changed, run.failures()) == (0, 0, []), run.stdout
    assert host.snapshot() == snapshot
