"""How the call is read from SGLang's source, and what the JIT is told to build for."""

from __future__ import annotations

import pytest
from ansible.module_utils.sm120.probe_call import (
    FusionCall,
    UnknownCall,
    aot_lacks_sm120,
    arch_list,
    call_without_sglang,
    nvcc_arch,
    parse_call,
    version_tuple,
)

OLD = """
def flashinfer_allreduce_residual_rmsnorm(x, residual, eps=1e-6, max_token_num: int = 2048, fp32_acc=False):
    comm.trtllm_allreduce_fusion(allreduce_in=x, fp32_acc=fp32_acc)
"""
NEW = """
def _preflight_check_workspace_memory(world_size):
    return True

def other(fp32_acc: bool = False):
    comm.trtllm_allreduce_fusion()

def flashinfer_allreduce_residual_rmsnorm(x, eps=1e-6, max_token_num: int = 4096, fp32_acc: bool = True):
    create_kw["comm_backend"] = backend
    comm.allreduce_fusion(input=x)
"""


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (OLD, FusionCall("ipc", False, 2048, False, False)),
        (NEW, FusionCall("unified", True, 4096, True, True)),
    ],
)
def test_the_call_is_read_from_the_source(source: str, call: FusionCall) -> None:
    assert parse_call(source) == call


@pytest.mark.parametrize(
    "source",
    [
        "def something_else(): pass",
        "def flashinfer_allreduce_residual_rmsnorm(x): comm.new_name(x)",
        "def flashinfer_allreduce_residual_rmsnorm():\n c.allreduce_fusion()\n c.trtllm_allreduce_fusion()",
    ],
)
def test_an_unknown_shape_is_refused_not_guessed(source: str) -> None:
    with pytest.raises(UnknownCall):
        parse_call(source)


@pytest.mark.parametrize(
    ("version", "api"), [("0.6.3", "ipc"), ("0.6.7.post2", "unified"), ("0.7.2", "unified")]
)
def test_without_sglang_the_flashinfer_version_decides(version: str, api: str) -> None:
    assert call_without_sglang(version).api == api


@pytest.mark.parametrize(
    ("capability", "version", "entry", "nvcc"),
    [
        ("12.0", "0.6.3", "12.0a", "120a"),
        ("12.0", "0.6.7", "12.0f", "120f"),
        ("12.0", "0.7.2.post1", "12.0f", "120f"),
        ("12.1", "0.7.2", "12.1a", "121a"),
        ("9.0", "0.6.12", "9.0a", "90a"),
        ("8.9", "0.6.12", "8.9", "89"),
    ],
)
def test_architectures_are_those_of_a_real_card(capability: str, version: str, entry: str, nvcc: str) -> None:
    assert arch_list(capability, version) == entry
    assert nvcc_arch(entry) == nvcc


def test_ready_made_libraries_know_sm120_from_0_6_17() -> None:
    assert aot_lacks_sm120("12.0", "0.6.16.post4")
    assert not aot_lacks_sm120("12.0", "0.6.17")
    assert not aot_lacks_sm120("9.0", "0.6.3")


def test_versions_compare_by_number() -> None:
    assert version_tuple("0.6.11.post1") == (0, 6, 11) > version_tuple("0.6.9")
    assert version_tuple("unknown") == ()
