"""What the opened functions answer, executed with a faked platform: SM120 passes, every other answer is what it was.

The functions are cut out of upstream's files and run with stand-ins for what they import: no torch, no GPU.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.sm120 import catalogue
from ansible.module_utils.sm120.editing import simulate
from ansible.module_utils.sm120.versions import Ranges

pytestmark = pytest.mark.once

wheels = importlib.import_module("wheels")

CAPABILITIES = ((8, 0), (9, 0), (10, 0), (12, 0))
BY_ID = {gate.id: gate for gate in catalogue.GATES}


def texts(tmp_path: Path, package: str, version: str, gate_id: str) -> tuple[str, str]:
    """A gate's file as delivered, and with this gate's edits."""
    gate = BY_ID[gate_id]
    variant = catalogue.variant_for(gate, version, Ranges())
    assert variant is not None
    site = tmp_path / version
    wheels.unpack(package, version, site)
    delivered = (site / variant.path).read_bytes()
    return delivered.decode(), simulate(delivered, catalogue.records(gate, variant)).decode()


@lru_cache(maxsize=8)
def cut(text: str, *names: str) -> str:
    """The source of functions, classes, assigned variables and methods of these names, in the file's order."""
    tree = ast.parse(text)
    wanted = []
    for node in ast.walk(tree):
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        if name in names and isinstance(node, ast.stmt):
            node.decorator_list = []  # type: ignore[attr-defined]
            wanted.append(node)
    for node in wanted:
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
    return "\n\n".join(ast.unparse(node) for node in sorted(wanted, key=lambda node: node.lineno))


def platform(capability: tuple[int, int]) -> dict[str, Any]:
    """SGLang's two ways to ask for the platform, answered for a capability."""
    is_major = {major: capability[0] == major for major in (9, 10, 12)}
    flags = SimpleNamespace(
        is_sm90=is_major[9], is_sm100=is_major[10], is_sm120=is_major[12], is_blackwell=is_major[10]
    )
    names: dict[str, Any] = {"get_platform": lambda: flags}
    for major, number in ((9, 90), (10, 100), (12, 120)):
        names[f"is_sm{number}_supported"] = lambda answer=is_major[major]: answer
    return names


def run(source: str, space: dict[str, Any], local: dict[str, Any] | None = None) -> None:
    """Execute what was cut out of a wheel from the package index, in names of its own."""
    exec(source, space, local)  # noqa: S102 - executing these functions is what this file is for


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the kind of its exception."""
    try:
        return call()
    except (ValueError, RuntimeError) as error:
        return type(error).__name__


RUNTIME = [
    ("0.5.8", "apply_flashinfer_allreduce_fusion"),
    ("0.5.10", "apply_flashinfer_allreduce_fusion"),
    ("0.5.18", "apply_flashinfer_allreduce_fusion"),
    ("0.5.19", "apply_flashinfer_allreduce_fusion"),
    ("0.5.21", "apply_flashinfer_allreduce_fusion"),
    ("0.5.23", "flashinfer_ar_fusion_applies"),
]


def predicate(
    text: str, name: str, capability: tuple[int, int], asked: bool, dp: bool
) -> Callable[[int], Any]:
    comm = SimpleNamespace(flashinfer_allreduce_fusion_backend="trtllm" if asked else None)
    args = SimpleNamespace(
        enable_flashinfer_allreduce_fusion=asked,
        flashinfer_allreduce_fusion_backend="trtllm" if asked else None,
        attn_cp_size=1,
    )
    space: dict[str, Any] = {
        **platform(capability),
        "_is_cuda": True,
        "_is_flashinfer_available": True,
        "is_dp_attention_enabled": lambda: dp,
        "get_global_server_args": lambda: args,
        "get_server_args": lambda: args,
        "get_exec": lambda: SimpleNamespace(comm=comm),
        "uses_cutedsl_ar_fusion": lambda: False,
        "is_flashinfer_allreduce_unavailable": lambda: False,
    }
    parts = (
        "_is_sm90_supported",
        "_is_sm100_supported",
        "_is_sm120_supported",
        "FUSE_ALLREDUCE_MAX_BATCH_SIZE",
        name,
    )
    run(cut(text, *parts), space)
    return space[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("version", "name"), RUNTIME)
def test_the_fusion_predicate(tmp_path: Path, version: str, name: str) -> None:
    closed, opened = texts(tmp_path, "sglang", version, "fusion.runtime")
    for capability, asked, dp in itertools.product(CAPABILITIES, (True, False), (True, False)):
        was, now = (predicate(text, name, capability, asked, dp) for text in (closed, opened))
        for size in (0, 1, 2048, 4096):
            if capability == (12, 0):
                assert not was(size)
                assert bool(now(size)) is (asked and not dp and 0 < size <= 2048)
            else:
                assert bool(now(size)) is bool(was(size))


AUTO_ENABLE = "_flashinfer_allreduce_fusion_auto_enable"


@lru_cache(maxsize=2)
def auto_enable_source(text: str) -> str:
    """What decides at start: the branch at the end of ServerArgs' method, or the function that it became."""
    if f"def {AUTO_ENABLE}(" in text:
        return cut(text, "_FLASHINFER_ALLREDUCE_FUSION_ARCHS", AUTO_ENABLE)
    (branch,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.If)
        and "is_sm100_supported()" in ast.unparse(node.test)
        and re.search(r"allreduce_fusion(_backend)? = ", "\n".join(map(ast.unparse, node.body)))
    )
    return ast.unparse(branch)


def auto_enabled(source: str, space: dict[str, Any], view: SimpleNamespace, arch: str) -> Any:
    space = {
        **space,
        "model_arch": arch,
        "is_h20_device": False,
        "logger": SimpleNamespace(info=print, warning=print),
        "envs": SimpleNamespace(SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION=SimpleNamespace(get=bool)),
        "model_config_of": lambda view: view.get_model_config(),
        "attn_dp_enabled_of": lambda view: view.enable_dp_attention,
    }
    run(source, space, None if AUTO_ENABLE in source else {"self": view})
    if AUTO_ENABLE in space:
        return space[AUTO_ENABLE](view).get("flashinfer_allreduce_fusion_backend")
    return view.flashinfer_allreduce_fusion_backend or view.enable_flashinfer_allreduce_fusion or None


@pytest.mark.parametrize(
    "version", ["0.5.8", "0.5.11", "0.5.14", "0.5.15", "0.5.18", "0.5.19", "0.5.21", "0.5.23"]
)
def test_auto_enable(tmp_path: Path, version: str) -> None:
    closed, opened = texts(tmp_path, "sglang", version, "fusion.auto_enable")
    answer = True if version in ("0.5.8", "0.5.11") else "auto"
    fitting = {"tp_size": 8, "nnodes": 1, "enable_dp_attention": False, "moe_a2a_backend": "none"}
    unfit = [{"tp_size": 1}, {"nnodes": 2}, {"enable_dp_attention": True}, {"moe_a2a_backend": "deepep"}]
    for capability, differs, arch in itertools.product(
        CAPABILITIES, [{}, *unfit], ("Glm4MoeForCausalLM", "LlamaForCausalLM")
    ):
        answers = []
        for text in (closed, opened):
            config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[arch]))
            view = SimpleNamespace(
                **{**fitting, **differs},
                enable_flashinfer_allreduce_fusion=False,
                flashinfer_allreduce_fusion_backend=None,
                disable_custom_all_reduce=False,
                get_model_config=lambda config=config: config,
            )
            answers.append(auto_enabled(auto_enable_source(text), platform(capability), view, arch))
        was, now = answers
        if capability == (12, 0):
            # The first release asked for the number of nodes, not for that of GPUs.
            fits = not differs or (differs == {"tp_size": 1} and version == "0.5.8")
            assert was is None
            assert now == (answer if fits and arch.startswith("Glm") else None)
        else:
            assert now == was
        if capability in ((9, 0), (10, 0)) and not differs and arch.startswith("Glm"):
            assert was == answer


@pytest.mark.parametrize("version", ["0.5.14", "0.5.18", "0.5.19", "0.5.21", "0.5.23"])
def test_resolve_backend(tmp_path: Path, version: str) -> None:
    closed, opened = texts(tmp_path, "sglang", version, "fusion.resolve_backend")
    for capability in CAPABILITIES:
        spaces = [dict(platform(capability)), dict(platform(capability))]
        for space, text in zip(spaces, (closed, opened), strict=True):
            run(cut(text, "_resolve_backend", "_mnnvl_supported"), space)
        for backend, multi in itertools.product(("auto", "trtllm", "mnnvl"), (False, True)):
            was, now = (outcome(partial(space["_resolve_backend"], backend, multi)) for space in spaces)
            if capability == (12, 0):
                assert was == "ValueError"
                assert now == ("trtllm" if backend in ("auto", "trtllm") and not multi else "ValueError")
            else:
                assert now == was


@pytest.mark.parametrize("version", ["0.5.11", "0.5.14", "0.5.19", "0.5.23"])
@pytest.mark.parametrize("multicast", [False, True])
def test_multicast_preflight(
    tmp_path: Path, version: str, multicast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, opened = texts(tmp_path, "sglang", version, "fusion.multicast_preflight")
    name = "_flashinfer_trtllm_workspace_allocation_sizes"
    success = object()
    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=success),
        CUmemAllocationGranularity_flags=SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1),
        CUmulticastGranularity_flags=SimpleNamespace(CU_MULTICAST_GRANULARITY_RECOMMENDED=1),
        CUmulticastObjectProp=SimpleNamespace,
        cuMemGetAllocationGranularity=lambda prop, flag: (success, 1 << 21),
        cuMulticastGetGranularity=lambda prop, flag: (success, 1 << 29) if multicast else ("error", 0),
    )
    for capability in CAPABILITIES:
        utils = SimpleNamespace(is_sm120_supported=lambda answer=capability[0] == 12: answer)
        for module in ("sglang", "sglang.srt", "sglang.srt.utils"):
            monkeypatch.setitem(sys.modules, module, utils)
        answers = []
        for text in (closed, opened):
            space = {
                **platform(capability),
                "torch": SimpleNamespace(float32=object()),
                "ceil_align": lambda value, to: -(-value // to) * to,
            }
            run(cut(text, name), space)
            prop = SimpleNamespace(requestedHandleTypes=1)
            answers.append(outcome(lambda s=space, p=prop: s[name](driver, p, 8, 2048, 6144, "bf16")))
        was, now = answers
        if capability == (12, 0):
            assert was == "RuntimeError" or multicast
            assert len(now) == 3
            assert all(size % (1 << 21) == 0 for size in now)
        else:
            assert now == was


@pytest.mark.parametrize("version", ["0.5.8", "0.5.9", "0.5.11", "0.5.12.post1"])
def test_autotune_list(tmp_path: Path, version: str) -> None:
    closed, opened = texts(tmp_path, "sglang", version, "moe.autotune")
    backends = ("flashinfer_trtllm", "flashinfer_mxfp4", "flashinfer_cutlass", "triton", "auto")
    for capability in CAPABILITIES:
        answers = []
        for text in (closed, opened):
            cuda = SimpleNamespace(get_device_capability=lambda answer=capability: answer)
            space: dict[str, Any] = {"torch": SimpleNamespace(cuda=cuda)}
            run(cut(text, "_should_run_flashinfer_autotune"), space)
            kinds = ("is_eagle", "is_standalone", "is_ngram", "is_speculative")
            no = SimpleNamespace(**dict.fromkeys(kinds, bool))
            answers.append(
                {
                    backend: space["_should_run_flashinfer_autotune"](
                        SimpleNamespace(
                            server_args=SimpleNamespace(
                                disable_flashinfer_autotune=False, moe_runner_backend=backend
                            ),
                            spec_algorithm=no,
                            is_draft_worker=False,
                        )
                    )
                    for backend in backends
                }
            )
        was, now = answers
        assert not was["flashinfer_cutlass"]
        assert now == {**was, "flashinfer_cutlass": capability[0] >= 9}


def symmetric_memory(text: str, supported: bool, enable_multicast: bool) -> Any:
    """Allocate with FlashInfer's SymmDeviceMemory on a board with or without multicast; its granularity."""
    tree = ast.parse(text)
    (owner,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SymmDeviceMemory"
    )
    init = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    starts = [at for at, node in enumerate(init.body) if "MULTICAST_SUPPORTED" in ast.unparse(node)]
    check = "\n".join(ast.unparse(node) for node in init.body[starts[0] : starts[0] + 3])
    prop = next(node for node in owner.body if getattr(node, "name", "") == "_get_allocation_prop")

    def granularity(*_: Any) -> int:
        if not supported:
            raise RuntimeError("cuMulticastGetGranularity")
        return 1 << 29

    cuda = SimpleNamespace(
        cuDeviceGetAttribute=lambda attribute, device: int(supported),
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED=1),
        CUmemAllocationProp=lambda: SimpleNamespace(allocFlags=SimpleNamespace()),
        CUmemAllocationType=SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1),
        CUmemLocation=SimpleNamespace,
        CUmemLocationType=SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1),
        CUmemAllocationGranularity_flags=SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1),
        CUmulticastGranularity_flags=SimpleNamespace(CU_MULTICAST_GRANULARITY_RECOMMENDED=1),
        CUmulticastObjectProp=SimpleNamespace,
        cuMemGetAllocationGranularity=lambda *_: 1 << 21,
        cuMulticastGetGranularity=granularity,
    )
    space = {
        "cuda": cuda,
        "checkCudaErrors": lambda answer: answer,
        "round_up": lambda value, to: -(-value // to) * to,
    }
    owner_self = SimpleNamespace(
        device_idx=0,
        group_size=2,
        SIGNAL_PAD_SIZE=2048,
        SIGNAL_PAD_ALIGNMENT=16,
        _exchanger=SimpleNamespace(handle_type=1),
    )
    run(
        check,
        space,
        {"self": owner_self, "device_idx": 0, "enable_multicast": enable_multicast, "buf_size": 1 << 21},
    )
    run(ast.unparse(prop), space)
    space["_get_allocation_prop"](owner_self, 1 << 21)  # type: ignore[operator]
    return owner_self._mc_granularity, owner_self.allocation_size


@pytest.mark.parametrize("version", ["0.6.0", "0.6.3", "0.6.7", "0.6.9"])
def test_workspace_without_multicast(tmp_path: Path, version: str) -> None:
    closed, opened = texts(tmp_path, "flashinfer", version, "fusion.workspace_multicast")
    for enable in (False, True):
        assert outcome(lambda e=enable: symmetric_memory(closed, False, e)) == "RuntimeError"
        with_multicast = [
            outcome(lambda t=text, e=enable: symmetric_memory(t, True, e)) for text in (closed, opened)
        ]
        assert with_multicast[0] == with_multicast[1] == (1 << 29, 1 << 29)
    assert outcome(lambda: symmetric_memory(opened, False, False)) == (1 << 21, 1 << 22)
    assert outcome(lambda: symmetric_memory(opened, False, True)) == "RuntimeError"


@pytest.mark.parametrize("version", ["0.6.0", "0.6.3", "0.6.10", "0.6.13", "0.6.16.post4", "0.6.17", "0.7.2"])
def test_jit_flags(tmp_path: Path, version: str) -> None:
    """gen_trtllm_comm_module asks for majors; its neighbours ask for what they always did."""
    gate = BY_ID["fusion.jit"]
    variant = catalogue.variant_for(gate, version, Ranges())
    assert variant is not None
    wheels.unpack("flashinfer", version, tmp_path / "site")
    delivered = (tmp_path / "site" / variant.path).read_bytes()
    opened = simulate(delivered, catalogue.records(gate, variant))

    def asked(text: bytes) -> dict[str, list[int]]:
        return {
            node.name: [
                ast.literal_eval(keyword.value)
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
                for keyword in call.keywords
                if keyword.arg == "supported_major_versions"
            ]
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef)
        }

    was, now = asked(delivered), asked(opened)
    assert now == {**was, "gen_trtllm_comm_module": [[9, 10, 12]]}
    assert was["gen_trtllm_comm_module"] == ([[9, 10]] if variant.kind == "edit" else [[9, 10, 12]])
