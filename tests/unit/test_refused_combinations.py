"""Combinations that are known to break: each rule is met by what it describes and by nothing beside it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from packaging.version import Version

SERVER = ROOT / "roles/sglang_server/vars"
RULES = yaml.safe_load((SERVER / "refused.yml").read_text())["__sglang_server_refused"]
PROFILES = yaml.safe_load((SERVER / "profiles.yml").read_text())["__sglang_server_profiles"]
RENAMED = yaml.safe_load((SERVER / "main.yml").read_text())["__sglang_server_renamed"]
NEWEST = "0.5.23"

_spec = importlib.util.spec_from_file_location(
    "refused_combinations", ROOT / "roles/preflight/filter_plugins/refused_combinations.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


def refused(release: str = NEWEST, **instance: Any) -> list[str]:
    found = _module.refused_combinations([instance], PROFILES, RULES, RENAMED, release)
    return [each["id"] for each in found]


MTP = {"profile": "glm5-nvfp4-mtp"}
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
# rule: (what meets it, with the release; the same, made right)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8-kv-dense-mla": (
        {"profile": "glm5-nvfp4", "extra_arguments": {"kv-cache-dtype": "fp8_e4m3"}},
        {
            "profile": "glm5-nvfp4",
            "attention_backend": "dsa",
            "dsa_backend": "flashinfer_sparse_mla",
            "extra_arguments": {"kv-cache-dtype": "fp8_e4m3"},
        },
    ),
    "dsa-backend-sm100": ({"extra_arguments": {"nsa-decode-backend": "trtllm"}}, {"dsa_backend": "tilelang"}),
    "dsa-prefill-backend-sm100": (
        {"extra_arguments": {"dsa-prefill-backend": "flashmla_sparse"}},
        {"dsa_backend": "flashinfer_sparse_mla"},
    ),
    "attention-backend-sm100": ({"attention_backend": "trtllm_mla"}, {"attention_backend": "flashinfer"}),
    "moe-runner-sm100": (
        {"moe_runner_backend": "flashinfer_trtllm"},
        {"moe_runner_backend": "flashinfer_cutlass"},
    ),
    "fp4-cutlass-race": ({"profile": "glm5-nvfp4", "release": "0.5.9"}, {"profile": "glm5-nvfp4"}),
    "fp4-gemm-race": (
        {"fp4_gemm_backend": "flashinfer_cutlass", "release": "0.5.9"},
        {"fp4_gemm_backend": "flashinfer_cudnn", "release": "0.5.9"},
    ),
    "shared-experts-fusion": (
        {"profile": "glm5-nvfp4", "extra_arguments": {"disable-shared-experts-fusion": False}},
        {"profile": "glm5-nvfp4"},
    ),
    "expandable-segments": (
        {"tensor_parallel_size": 2, "allreduce_fusion": "off", "extra_environment": SEGMENTS},
        {"tensor_parallel_size": 1, "extra_environment": SEGMENTS},
    ),
    "expandable-segments-fusion": (
        {"profile": "glm5-nvfp4", "extra_environment": SEGMENTS},
        {"profile": "glm5-nvfp4", "extra_environment": SEGMENTS, "allreduce_fusion": "off"},
    ),
    "version-check-off": (
        {"extra_environment": {"FLASHINFER_DISABLE_VERSION_CHECK": 1}},
        {"extra_environment": {"FLASHINFER_DISABLE_VERSION_CHECK": 0}},
    ),
    "mtp-loads-twice": (
        {
            "extra_arguments": {"speculative-algorithm": "NEXTN"},
            "release": "0.5.9",
        },
        {
            "extra_arguments": {"speculative-algorithm": "NEXTN"},
            "extra_environment": {"SGLANG_ENABLE_SPEC_V2": "True"},
            "release": "0.5.9",
        },
    ),
    "mtp-pipeline": (
        {**MTP, "tensor_parallel_size": "4", "pipeline_parallel_size": "2", "release": "0.5.20"},
        {**MTP, "release": "0.5.20"},
    ),
    "reasoning-parser-glm47": (
        {"extra_arguments": {"reasoning-parser": "glm47"}},
        {"extra_arguments": {"reasoning-parser": "glm45", "tool-call-parser": "glm47"}},
    ),
    "mnnvl-fusion": (
        {"extra_arguments": {"flashinfer-allreduce-fusion-backend": "mnnvl"}},
        {"extra_arguments": {"flashinfer-allreduce-fusion-backend": "trtllm"}},
    ),
    "pcie-ipc-without-kernels": (
        {"pcie_ipc_allreduce": True, "release": "0.5.20"},
        {"pcie_ipc_allreduce": True},
    ),
    "glm5-too-few-cards": (
        {"profile": "glm5-nvfp4", "tensor_parallel_size": 4},
        {"profile": "glm5-nvfp4-tp2-pp3"},
    ),
}


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(rule["id"] for rule in RULES)


@pytest.mark.parametrize("rule", sorted(CASES))
def test_a_rule_is_met_by_its_case_alone_and_may_be_insisted_on(rule: str) -> None:
    wrong, right = CASES[rule]
    assert refused(**wrong) == [rule]
    assert refused(**right) == []
    assert refused(**wrong, insist=[rule]) == []


def test_either_word_for_a_size_counts() -> None:
    for word in ("tp-size", "tensor-parallel-size"):
        assert refused(profile="glm5-nvfp4", extra_arguments={word: 4}) == ["glm5-too-few-cards"]
    for word in ("pp-size", "pipeline-parallel-size"):
        assert refused("0.5.20", **MTP, tensor_parallel_size=4, extra_arguments={word: 2}) == ["mtp-pipeline"]


def test_values_of_a_wrong_type_do_not_stand_in_the_way() -> None:
    assert (
        refused(
            extra_arguments="x", extra_environment=[1], tensor_parallel_size="many", insist="x", profile=5
        )
        == []
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["id"])
def test_a_rule_says_why_by_whom_and_what_instead(rule: dict[str, Any]) -> None:
    assert rule["reason"]
    assert rule["instead"]
    assert re.match(r"https://|sglang/srt/", rule["source"])
    assert "below" not in rule or Version(rule["below"])


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_no_profile_is_refused_on_the_default_release(profile: str) -> None:
    assert refused(profile=profile) == []


def test_the_page_of_profiles_is_current() -> None:
    script = [sys.executable, str(ROOT / "tools/profiles_doc.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_value_of_a_profile_has_its_source_beside_it() -> None:
    lines = (SERVER / "profiles.yml").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  glm5-nvfp4:"))
    unsourced, seen = [], 0
    for number in range(start, len(lines)):
        line = lines[number].strip()
        if re.match(r"(?!like:)[\w-]+: (?!\{\})\S", line):
            seen += 1
            if "#" not in line and not lines[number - 1].strip().startswith("#"):
                unsourced.append(line)
    assert unsourced == []
    values = sum(len(each[part]) for each in PROFILES.values() for part in ("arguments", "environment"))
    assert seen == values + sum("model_mib" in each for each in PROFILES.values())


@pytest.mark.parametrize(
    ("instances", "needs"),
    [
        ([{}], {"gpus": 1, "model_mib": 0}),
        ([{"profile": "glm5-nvfp4-tp2-pp3"}], {"gpus": 6, "model_mib": 391000}),
        ([{"profile": "glm5-nvfp4-mtp"}, {"profile": "dense"}], {"gpus": 8, "model_mib": 409000}),
        (
            [{"tensor_parallel_size": "2"}, {"extra_arguments": {"tensor-parallel-size": 4}}],
            {"gpus": 4, "model_mib": 0},
        ),
        (
            [{"profile": "glm5-nvfp4", "tensor_parallel_size": 4, "pipeline_parallel_size": 2}],
            {"gpus": 8, "model_mib": 391000},
        ),
        (
            [{"extra_arguments": {"tp-size": 2, "pp-size": "3"}}, {"tensor_parallel_size": 4}],
            {"gpus": 6, "model_mib": 0},
        ),
        (
            [
                {
                    "profile": "glm5-nvfp4",
                    "tensor_parallel_size": 8,
                    "extra_arguments": {"tp-size": 2, "pipeline-parallel-size": 2},
                }
            ],
            {"gpus": 4, "model_mib": 391000},
        ),
    ],
)
def test_a_guest_needs_what_its_most_demanding_instance_needs(
    instances: list[dict[str, Any]], needs: dict[str, int]
) -> None:
    assert _module.wanted_of_guest(instances, PROFILES, RENAMED) == needs


def test_the_plays_that_a_tag_brings_along() -> None:
    """The guest is looked at where it is to serve, and stands in the way of neither gates nor revert."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "inventories/demo", "site.yml"]
    told = subprocess.run([*command, "--list-tasks"], cwd=ROOT, capture_output=True, text=True, check=True)

    def tags(task: str) -> list[str]:
        return re.findall(rf"^ +{task}\tTAGS: \[(.*)\]$", told.stdout, re.MULTILINE)

    assert tags("Refuse a guest that cannot serve") == ["guest, runtime, serve"]
    assert tags("Check the inventory's values and the host") == ["always"] * 6
