"""SGLang's gates, keyed on its version alone. Read in the wheels sglang 0.5.8 to 0.5.23 from PyPI."""

from __future__ import annotations

import re

from .gate_model import Edit, Gate, Variant

_COMMUNICATOR = "sglang/srt/layers/communicator.py"
_ADD_NORM = "sglang/srt/layers/layer_boundary/residual/add_norm.py"
_COMM_FUSION = "sglang/srt/layers/flashinfer_comm_fusion.py"
_SERVER_ARGS = "sglang/srt/server_args.py"
_OVERRIDES = "sglang/srt/arg_groups/overrides.py"

# The import stays on one line: lineinfile with two lines would insert again on each run.
_IMPORT = Edit(
    "lineinfile",
    {
        "regexp": r"^    is_sm100_supported,$",
        "line": "    is_sm100_supported, is_sm120_supported,  # sm120",
        "backrefs": True,
    },
)
_CONDITION = Edit(
    "lineinfile",
    {
        "regexp": r"^( +)\(_is_sm90_supported or _is_sm100_supported\)$",
        "line": r"\1(_is_sm90_supported or _is_sm100_supported or _is_sm120_supported)",
        "backrefs": True,
    },
)


_FUNCTIONS = ("is_sm90_supported()", "is_sm100_supported()", "is_sm120_supported()")
_PLATFORM = ("get_platform().is_sm90", "get_platform().is_sm100", "get_platform().is_sm120")


def _closed(calls: tuple[str, str, str]) -> str:
    """Upstream's condition as a regular expression."""
    return re.escape(f"({calls[0]} or {calls[1]})").replace("\\ ", " ")


def _opened(calls: tuple[str, str, str]) -> str:
    return f"({' or '.join(calls)})"


def _condition_line(before: str, calls: tuple[str, str, str], behind: str = "") -> Edit:
    """A line that is this condition alone, between `before` and `behind`."""
    return Edit(
        "lineinfile",
        {
            "regexp": f"^{before}{_closed(calls)}{behind}$",
            "line": f"{before}{_opened(calls)}{behind}",
            "backrefs": True,
        },
    )


def _condition_in_auto_enable(calls: tuple[str, str, str]) -> Edit:
    """The same condition guards an embedding path from 0.5.17 on: this edit stays in its function."""
    return Edit(
        "replace",
        {
            "after": r"\ndef _flashinfer_allreduce_fusion_auto_enable\(",
            "before": r"\n(?=[@d])",
            "regexp": f"{_closed(calls)}$",
            "replace": _opened(calls),
        },
    )


def _cached_variable(value: str) -> Edit:
    return Edit(
        "blockinfile",
        {
            "marker": "# {mark} sm120 fusion.runtime",
            "insertafter": r"^_is_sm100_supported = _is_cuda and ",
            "block": f"_is_sm120_supported = _is_cuda and {value}",
        },
    )


_FROM_UTILS = _cached_variable("is_sm120_supported()")
_FROM_PLATFORM = _cached_variable("get_platform().is_sm120")


GATES = (
    Gate(
        id="fusion.multicast_preflight",
        label="S5",
        feature="allreduce_fusion",
        layer="workspace",
        package="sglang",
        why="a preflight that a board without multicast fails turns the fusion off",
        variants=(
            Variant(
                versions=">=0.5.8,<0.5.11",
                kind="absent",
                path=_COMM_FUSION,
                pattern=r"cuMulticastGetGranularity",
            ),
            Variant(
                versions=">=0.5.11",
                kind="edit",
                path=_COMM_FUSION,
                covers=r"cuda_driver\.cuMulticastGetGranularity\(",
                edits=(
                    Edit(
                        "blockinfile",
                        {
                            "marker": "        # {mark} sm120 fusion.multicast_preflight",
                            "insertbefore": r"^        mc_prop = cuda_driver\.CUmulticastObjectProp\(\)$",
                            "block": (
                                "        from sglang.srt.utils import is_sm120_supported\n"
                                "\n"
                                "        if is_sm120_supported():\n"
                                "            allocation_sizes.append(allocation_size)\n"
                                "            continue"
                            ),
                        },
                    ),
                ),
            ),
        ),
    ),
    Gate(
        id="fusion.runtime",
        label="S1",
        feature="allreduce_fusion",
        layer="runtime",
        package="sglang",
        why="the predicate asked in every layer answers yes on SM90 and SM100 only",
        variants=(
            Variant(
                versions=">=0.5.8,<0.5.19",
                kind="edit",
                path=_COMMUNICATOR,
                edits=(_IMPORT, _FROM_UTILS, _CONDITION),
            ),
            Variant(
                versions=">=0.5.19,<0.5.21",
                kind="edit",
                path=_COMMUNICATOR,
                edits=(_FROM_PLATFORM, _CONDITION),
            ),
            Variant(
                versions=">=0.5.21",
                kind="edit",
                path=_ADD_NORM,
                edits=(_FROM_PLATFORM, _CONDITION),
            ),
        ),
    ),
    Gate(
        id="fusion.resolve_backend",
        label="S4",
        feature="allreduce_fusion",
        layer="runtime",
        package="sglang",
        why="_resolve_backend raises ValueError on anything but SM90 and SM100",
        variants=(
            Variant(
                versions=">=0.5.8,<0.5.14",
                kind="absent",
                path=_COMM_FUSION,
                pattern=r"^def _resolve_backend\(",
            ),
            Variant(
                versions=">=0.5.14,<0.5.19",
                kind="edit",
                path=_COMM_FUSION,
                edits=(
                    _IMPORT,
                    _condition_line("    if not ", _FUNCTIONS, ":"),
                ),
            ),
            Variant(
                versions=">=0.5.19",
                kind="edit",
                path=_COMM_FUSION,
                edits=(_condition_line("    if not ", _PLATFORM, ":"),),
            ),
        ),
    ),
    Gate(
        id="fusion.auto_enable",
        label="S2",
        feature="allreduce_fusion",
        layer="start",
        package="sglang",
        why="the server turns fusion on by itself on SM90 and SM100 only",
        variants=(
            Variant(
                versions=">=0.5.8,<0.5.15",
                kind="edit",
                path=_SERVER_ARGS,
                edits=(_condition_line("            and ", _FUNCTIONS),),
            ),
            Variant(
                versions=">=0.5.15,<0.5.19",
                kind="edit",
                path=_OVERRIDES,
                edits=(_condition_in_auto_enable(_FUNCTIONS),),
            ),
            Variant(
                versions=">=0.5.19",
                kind="edit",
                path=_OVERRIDES,
                edits=(_condition_in_auto_enable(_PLATFORM),),
            ),
        ),
    ),
    Gate(
        id="moe.autotune",
        label="S6",
        feature="moe_autotune",
        layer="start",
        package="sglang",
        why="flashinfer_cutlass is commented out of the list of MoE backends that are autotuned",
        variants=(
            Variant(
                versions=">=0.5.8,<0.5.13",
                kind="edit",
                path="sglang/srt/model_executor/model_runner.py",
                edits=(
                    Edit(
                        "lineinfile",
                        {
                            "regexp": r'^( +)# "flashinfer_cutlass",$',
                            "line": r'\1"flashinfer_cutlass",',
                            "backrefs": True,
                        },
                    ),
                ),
            ),
            Variant(
                versions=">=0.5.13,<0.5.14",
                kind="native",
                path="sglang/srt/model_executor/model_runner.py",
                pattern=r'^ +"flashinfer_cutlass",$',
            ),
            Variant(
                versions=">=0.5.14,<0.5.15",
                kind="native",
                path="sglang/srt/model_executor/runner/base_runner.py",
                pattern=r'^ +"flashinfer_cutlass",$',
            ),
            Variant(
                versions=">=0.5.15",
                kind="native",
                path="sglang/srt/model_executor/runner/flashinfer_autotune.py",
                pattern=r'^ +"flashinfer_cutlass",$',
            ),
        ),
    ),
    Gate(
        id="moe.runner_auto",
        label="S3",
        feature="",
        layer="start",
        package="sglang",
        why="picks trtllm-gen MoE kernels, SM100-only: on SM120 use --moe-runner-backend flashinfer_cutlass",
        variants=(
            Variant(
                versions=">=0.5.8,<0.5.15",
                kind="listed",
                path=_SERVER_ARGS,
                pattern=r"is_sm100_supported\(\)",
            ),
            Variant(
                versions=">=0.5.15",
                kind="listed",
                path=_OVERRIDES,
                pattern=r"is_sm100",
            ),
        ),
    ),
)
