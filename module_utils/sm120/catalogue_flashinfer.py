"""FlashInfer's gates, keyed on its version alone. Read in PyPI's wheels flashinfer-python 0.6.0 to 0.7.4."""

from __future__ import annotations

from .gate_model import Edit, Gate, Variant

_JIT = "flashinfer/jit/comm.py"
_HEADER = "flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh"
_MNNVL = "flashinfer/comm/mnnvl.py"

# Other functions of jit/comm.py carry the same list: every expression here is bound to the one function.
_FUNCTION = r"\ndef gen_trtllm_comm_module\(\)"
_NEXT_FUNCTION = r"\ndef "

GATES = (
    Gate(
        id="fusion.header_guard",
        label="F2",
        feature="allreduce_fusion",
        layer="header",
        package="flashinfer",
        why="a bound on __CUDA_ARCH__ leaves the grid dependency calls (and one whole kernel) out on SM120",
        variants=(
            Variant(
                versions=">=0.6.0,<0.6.17",
                kind="edit",
                path=_HEADER,
                edits=(
                    Edit(
                        "replace",
                        {
                            "regexp": r"^(#if \(defined\(__CUDA_ARCH__\) && \(__CUDA_ARCH__ >= 900\))"
                            r" && \(__CUDA_ARCH__ < 1200\)\)$",
                            "replace": r"\1)",
                        },
                        count=13,
                    ),
                ),
            ),
            Variant(
                versions=">=0.6.17",
                kind="native",
                path=_HEADER,
                pattern=r"^#if \(defined\(__CUDA_ARCH__\) && \(__CUDA_ARCH__ >= 900\)\)$",
                count=13,
            ),
        ),
    ),
    Gate(
        id="fusion.jit",
        label="F1",
        feature="allreduce_fusion",
        layer="jit",
        package="flashinfer",
        why="the kernels may be compiled for majors 9 and 10 only ('No supported CUDA architectures found')",
        variants=(
            Variant(
                versions=">=0.6.0,<0.6.17",
                kind="edit",
                path=_JIT,
                edits=(
                    Edit(
                        "replace",
                        {
                            "after": _FUNCTION,
                            "before": _NEXT_FUNCTION,
                            "regexp": r"^        supported_major_versions=\[9, 10\]$",
                            "replace": "        supported_major_versions=[9, 10, 12]",
                        },
                    ),
                ),
            ),
            Variant(
                versions=">=0.6.17",
                kind="native",
                path=_JIT,
                pattern=_FUNCTION + r"[^\n]*\n[^\n]*\n +supported_major_versions=\[9, 10, 12\]$",
            ),
        ),
    ),
    Gate(
        id="fusion.workspace_multicast",
        label="F5",
        feature="allreduce_fusion",
        layer="workspace",
        package="flashinfer",
        why="the workspace refuses a board without multicast, though nothing in it needs multicast",
        variants=(
            Variant(
                versions=">=0.6.0,<0.6.10",
                kind="edit",
                path=_MNNVL,
                covers=r"cuda\.cuMulticastGetGranularity\(|MULTICAST_SUPPORTED",
                edits=(
                    Edit(
                        "lineinfile",
                        {
                            "regexp": r"^        if multicast_supported == 0:$",
                            "line": "        if multicast_supported == 0 and enable_multicast:",
                            "backrefs": True,
                        },
                    ),
                    Edit(
                        "blockinfile",
                        {
                            "marker": "        # {mark} sm120 fusion.workspace_multicast answer",
                            "insertbefore": (
                                r"^        # Calculate signal pad offset with alignment"
                                r" \(matching C\+\+ exactly\)$"
                            ),
                            "block": "        self._board_has_multicast = multicast_supported != 0",
                        },
                    ),
                    Edit(
                        "blockinfile",
                        {
                            "marker": "        # {mark} sm120 fusion.workspace_multicast granularity",
                            "insertbefore": r"^        # Set up multicast properties$",
                            "block": (
                                "        if not self._board_has_multicast:\n"
                                "            self._mc_granularity = alloc_granularity\n"
                                "            return allocation_prop, None"
                            ),
                        },
                    ),
                ),
            ),
            Variant(
                versions=">=0.6.10,<0.6.15",
                kind="absent",
                path="flashinfer/comm/trtllm_ar.py",
                pattern=r"SymmDeviceMemory\(",
                note="torch's symmetric memory serves as workspace in these versions; not verified on SM120",
            ),
            Variant(
                versions=">=0.6.15,<0.6.16",
                kind="native",
                path=_MNNVL,
                pattern=(
                    r"^        if self\._enable_multicast:\n"
                    r"            multicast_supported = [^)]*_MULTICAST_SUPPORTED"
                ),
            ),
            Variant(
                versions=">=0.6.16",
                kind="native",
                path=_MNNVL,
                pattern=r"^        if self\._enable_multicast and not is_multicast_supported\(device_idx\):$",
            ),
        ),
    ),
)
