"""Every condition on the compute capability in SGLang and FlashInfer, found without the catalogue."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .packages import Package, tracked
from .scan_cuda import cuda_conditions
from .scan_python import Found, python_conditions
from .scan_reviewed import REVIEWED
from .survey import Finding

# Kernel libraries of FlashInfer that neither the fusion nor the fused MoE calls, and those of its
# build recipes that are named after something else.
_NOT_ON_THE_PATH = re.compile(
    r"^flashinfer/(data|experimental|moe_ep|cute_dsl|attention|parallel_attention|attn_scores|mla|msa_ops"
    r"|gdn_kernels|kda_kernels|mamba|prims_ts|trace|trace_apply|diffusion_ops|topk_varlen|triton|cutile|cudnn"
    r"|logits_processor|testing|profiler|gemm|grouped_mm|norm|dsv3_ops|fused_moe/[^/]+|quantization/[^/]+)/"
    r"|^flashinfer/jit/(?![^/]*(?:comm|reduce|moe|core|env|ext|utils|__init__)[^/]*\.py$)"
)
_HEADERS = re.compile(r"^flashinfer/data/include/flashinfer/.*\.(cuh|h|hpp)$")

# Where the fusion and the fused MoE live; elsewhere a condition counts when its own statement speaks of them.
_PATH = re.compile(
    r"^sglang/srt/layers/(communicator\.py|flashinfer_comm_fusion\.py|layer_boundary/residual/)"
    r"|^flashinfer/(comm/(trtllm_ar|allreduce|mnnvl)\.py$|jit/(comm|fused_moe)\.py$)"
    r"|^flashinfer/data/include/flashinfer/comm/trtllm_(moe_)?allreduce"
)
_TALK = re.compile(
    r"all_?reduce_fusion|trtllm_(ar|comm|all_?reduce)|flashinfer_cutlass|moe_runner_backend|multicast",
    re.IGNORECASE,
)

# A branch that sets moe_runner_backend, and whose condition asks for none by name, picks the MoE kernels of one model:
# the gate that is never opened.
RUNNER_AUTO = "moe.runner_auto"
_RUNNER = "moe_runner_backend"
_NAMED_RUNNER = re.compile(rf"{_RUNNER}(?:\(\))?(?:\.is_(?!auto)| (?:==|!=|in|not in) (?!'auto'))")


class ScanProblem(Exception):
    """A file that should be there is not, or cannot be read as what it is: an empty result would be a lie."""


@dataclass(frozen=True)
class Condition:
    """One condition: where it is, which capabilities it lets through, and which gate it is."""

    path: str
    line: int
    last: int
    form: str
    text: str
    admits: tuple[str, ...]
    within: str
    on_path: bool
    gate: str | None = None

    @property
    def sm120(self) -> bool:
        return "12.0" in self.admits

    @property
    def shuts_out_sm120(self) -> bool:
        """Whether it lets Hopper or data-centre Blackwell through, and not SM120."""
        return not self.sm120 and bool({"9.0", "10.0"} & set(self.admits))

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "line": self.line,
            "form": self.form,
            "text": self.text,
            "within": self.within,
            "admits": list(self.admits),
            "sm120": self.sm120,
            "on_path": self.on_path,
            "gate": self.gate,
        }


def reader_for(name: str) -> Callable[[str], Iterable[Found]] | None:
    """The reader for a file, by its path; None for a file that is not looked at."""
    if name.startswith("sglang/srt/") and name.endswith(".py"):
        return python_conditions
    if name.startswith("flashinfer/") and name.endswith(".py") and not _NOT_ON_THE_PATH.match(name):
        return python_conditions
    return cuda_conditions if _HEADERS.match(name) else None


def _files(package: Package) -> list[str]:
    """Files to look at: what the wheel's RECORD lists, or what git knows of a checkout and what lies there besides."""
    if package.source == "wheel":
        return [name for name in package.hashes if reader_for(name)]
    known = tracked(package)
    if known is None:
        raise ScanProblem(f"git does not tell what belongs to {package.root}: is git installed on this host?")
    lying = {str(path.relative_to(package.base)) for path in package.root.rglob("*") if path.is_file()}
    return sorted(name for name in known | lying if reader_for(name))


def scan_package(package: Package) -> list[Condition]:
    """Every condition of one package; raises where a file is missing or unreadable."""
    files = _files(package)
    for needed in {"sglang": ("sglang/srt/",), "flashinfer": ("flashinfer/jit/", "flashinfer/data/include/")}[
        package.name
    ]:
        if not any(name.startswith(needed) for name in files):
            raise ScanProblem(f"{package.base / needed} holds nothing to scan: is {package.root} whole?")
    found = []
    for name in files:
        path = package.base / name
        reader = reader_for(name)
        if reader is None:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            conditions = list(reader(text))
        except FileNotFoundError:
            raise ScanProblem(
                f"{path} was delivered with {package.name} {package.version} and is missing"
            ) from None
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ScanProblem(f"{path} cannot be read: {error}") from error
        for each in conditions:
            on_path = bool(_PATH.match(name) or _TALK.search(each.statement))
            picks = _RUNNER in each.sets and not _NAMED_RUNNER.search(each.text)
            gate = RUNNER_AUTO if picks and name.startswith("sglang/") else None
            found.append(
                Condition(
                    str(path),
                    each.first,
                    each.last,
                    each.form,
                    each.text,
                    each.admits,
                    each.within,
                    on_path,
                    gate,
                )
            )
    return found


def _gate_at(condition: Condition, findings: tuple[Finding, ...]) -> str | None:
    """The gate of the catalogue that a condition is: one of its edits, or its text, touches this line."""
    inside = set(range(condition.line, condition.last + 1))
    for finding in findings:
        file = finding.file
        if file is not None and str(file.path) == condition.path and finding.lines & inside:
            return finding.gate.id
    return condition.gate


def scan(packages: dict[str, Package], findings: tuple[Finding, ...]) -> list[Condition]:
    """All conditions of both packages, those of the catalogue marked."""
    return [
        replace(condition, gate=_gate_at(condition, findings))
        for package in packages.values()
        for condition in scan_package(package)
    ]


def unlisted(conditions: list[Condition]) -> list[Condition]:
    """Conditions on the path that shut SM120 out, that no gate covers and that nobody has judged harmless."""
    return [
        each
        for each in conditions
        if each.on_path
        and each.shuts_out_sm120
        and each.gate is None
        and each.form not in ("definition", "architecture string")
        and (Path(each.path).name, each.within, each.text) not in REVIEWED
    ]
