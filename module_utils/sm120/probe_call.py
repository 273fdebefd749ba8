"""How the installed SGLang calls FlashInfer's fused all-reduce, and what the JIT builds for."""

from __future__ import annotations

import ast
import re
from dataclasses import asdict, dataclass
from typing import Any

CALLER = "flashinfer_allreduce_residual_rmsnorm"
SOURCE = "srt/layers/flashinfer_comm_fusion.py"  # below the sglang package
PREFLIGHT = "_preflight_check_workspace_memory"
APIS = {"trtllm_allreduce_fusion": "ipc", "allreduce_fusion": "unified"}
# Without SGLang in the environment: SGLang up to 0.5.9, with the IPC call, pins FlashInfer up to 0.6.3.
FIRST_UNIFIED = (0, 6, 7)
FIRST_FAMILY_ARCH = (0, 6, 7)  # from here FlashInfer builds SM120 as 120f, before as 120a
FIRST_AOT_SM120 = (0, 6, 17)
MAX_TOKENS = 2048


@dataclass(frozen=True)
class FusionCall:
    """What decides which kernel instance runs, and how its workspace is made."""

    api: str
    fp32_accumulate: bool
    max_tokens: int
    passes_groups: bool
    has_preflight: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class UnknownCall(ValueError):
    """SGLang's source does not hold the call where every known version has it."""


def version_tuple(text: str) -> tuple[int, ...]:
    """The release part of a version: 0.6.11.post1 -> (0, 6, 11)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def parse_call(source: str) -> FusionCall:
    tree = ast.parse(source)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    caller = functions.get(CALLER)
    if caller is None:
        raise UnknownCall(f"no function {CALLER} in {SOURCE}")
    names = {
        n.func.attr for n in ast.walk(caller) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    apis = [api for name, api in APIS.items() if name in names]
    if len(apis) != 1:
        raise UnknownCall(
            f"{CALLER} calls {sorted(names & set(APIS)) or 'none'} of {sorted(APIS)}, wanted one"
        )
    defaults = _defaults(caller)
    return FusionCall(
        api=apis[0],
        fp32_accumulate=bool(defaults.get("fp32_acc", False)),
        max_tokens=int(defaults.get("max_token_num", MAX_TOKENS)),
        passes_groups="comm_backend" in source,
        has_preflight=PREFLIGHT in functions,
    )


def call_without_sglang(flashinfer_version: str) -> FusionCall:
    unified = version_tuple(flashinfer_version) >= FIRST_UNIFIED
    return FusionCall("unified" if unified else "ipc", False, MAX_TOKENS, unified, False)


def _defaults(function: ast.FunctionDef) -> dict[str, Any]:
    named = function.args.args
    pairs = zip(named[len(named) - len(function.args.defaults) :], function.args.defaults, strict=True)
    return {arg.arg: value.value for arg, value in pairs if isinstance(value, ast.Constant)}


def arch_list(capability: str, flashinfer_version: str) -> str:
    """FLASHINFER_CUDA_ARCH_LIST that yields the folder and flags a real card of this capability gives."""
    major, minor = (int(part) for part in capability.split("."))
    if major < 9:
        return f"{major}.{minor}"
    family = major == 12 and minor == 0 and version_tuple(flashinfer_version) >= FIRST_FAMILY_ARCH
    return f"{major}.{minor}{'f' if family else 'a'}"


def nvcc_arch(entry: str) -> str:
    """12.0f -> 120f, as nvcc's -gencode wants it."""
    return entry.replace(".", "")


def aot_lacks_sm120(capability: str, flashinfer_version: str) -> bool:
    return capability.startswith("12.") and version_tuple(flashinfer_version) < FIRST_AOT_SM120
