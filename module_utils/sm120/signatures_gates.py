"""Gates, JIT and kernels that do not know this GPU."""

from __future__ import annotations

import re

from .signature import CAUSE, NOTE, WARNING, Signature

TOPIC = "The gates, and kernels that do not know this GPU"

_DISABLED_MEANING = "All-reduce fusion was asked for and is not active."
_DISABLED_ADVICE = (
    "playbooks/audit.yml shows which gate is closed; playbooks/probe.yml proves the kernels alone."
)

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        name="gate.jit_closed",
        role=CAUSE,
        layer="layer 3",
        needle=b"No supported CUDA architectures found for major versions",
        meaning="FlashInfer refuses to compile for this GPU: its gate in flashinfer/jit/comm.py "
        "(supported_major_versions) is closed while SGLang's gates above it are open. The same error comes "
        "where no GPU is visible and FLASHINFER_CUDA_ARCH_LIST is not set.",
        advice="Open all gates or none: playbooks/gates.yml, or --tags revert. playbooks/audit.yml "
        "shows each.",
    ),
    Signature(
        name="gate.backend_refused",
        role=CAUSE,
        layer="layer 1",
        needle=b"FlashInfer allreduce fusion requires SM90 or SM10X",
        meaning="SGLang 0.5.14 and later refuse the fusion flag on SM120 at start: the gate "
        "fusion.resolve_backend "
        "is closed.",
        advice="Open the feature allreduce_fusion with playbooks/gates.yml, or set "
        "sglang_server_allreduce_fusion: off.",
    ),
    Signature(
        name="gate.cuda_too_old_for_sm12x",
        role=CAUSE,
        layer="toolchain",
        needle=b"rror",
        pattern=re.compile(rb"SM ?12\.?x? requires CUDA (?:>=|version)"),
        meaning="This FlashInfer compiles SM12x only with a newer CUDA toolkit than the one it found.",
        advice="Install CUDA 12.9 or later (13.0 is the one tested) and set one CUDA_HOME for the unit.",
    ),
    Signature(
        name="fusion.preflight_failed",
        role=WARNING,
        layer="layer 2",
        needle=b"FlashInfer workspace preflight",
        meaning="SGLang's multicast preflight failed, as it does on PCIe boards, and all-reduce "
        "fusion is off: "
        "the gate fusion.multicast_preflight is closed.",
        advice="playbooks/gates.yml opens it; playbooks/audit.yml shows its state.",
    ),
    Signature(
        name="fusion.workspace_failed",
        role=WARNING,
        layer="layer 2",
        needle=b"Failed to initialize FlashInfer workspace",
        meaning="The fusion's workspace could not be made; SGLang goes on without the fusion.",
        advice="Read the reason in the line. CUDA IPC fails with expandable_segments in "
        "PYTORCH_CUDA_ALLOC_CONF, and "
        "where P2P is off (nvidia-smi topo -p2p r).",
    ),
    Signature(
        name="fusion.disabled",
        role=WARNING,
        layer="layer 2",
        needle=b"usion",
        pattern=re.compile(
            rb"(?i)allreduce fusion (?:is |forcibly |globally )*disabled"
            rb"|disabling (?:flashinfer )?allreduce fusion|"
            rb"skipping allreduce fusion|allreduce_fusion API is not available|"
            rb"allreduce fusion is forcibly disabled|"
            rb"disable --(?:enable-)?flashinfer-allreduce-fusion"
        ),
        meaning=_DISABLED_MEANING,
        advice=_DISABLED_ADVICE,
    ),
    Signature(
        name="fusion.disabled",
        role=WARNING,
        layer="layer 2",
        needle=b"FlashInfer comm not available, skipping workspace init",
        meaning=_DISABLED_MEANING,
        advice=_DISABLED_ADVICE,
    ),
    # flashinfer_comm_fusion.py of the released wheels, logged once the workspace is made: 0.5.8 to 0.5.13.post1
    # "FlashInfer workspace initialized for rank 0, world_size 2" (from 0.5.10 with the backend), 0.5.14 to 0.5.23
    # "FlashInfer AllReduce Fusion enabled and workspace initialized: backend=...".
    Signature(
        name="fusion.active",
        role=NOTE,
        layer="layer 2",
        needle=b"workspace initialized",
        pattern=re.compile(
            rb"FlashInfer (?:workspace initialized for rank|AllReduce Fusion enabled and workspace initialized)"
        ),
        meaning="All-reduce fusion is active on this rank: its workspace has been made.",
        advice="Nothing to do. playbooks/promote.yml measures whether it is worth having.",
    ),
    Signature(
        name="kernel.no_image",
        role=CAUSE,
        layer="kernels",
        needle=b"rror",
        pattern=re.compile(rb"no kernel image is available for execution|cudaErrorNoKernelImageForDevice"),
        meaning="A binary in use holds no code for this GPU: a torch or kernel wheel built without "
        "sm_120, or a JIT "
        "cache from another machine.",
        advice="Use wheels for CUDA 12.8 or later (cu130 tested) and purge the JIT cache (module "
        "flashinfer_cache).",
    ),
    Signature(
        name="kernel.ptx_unsupported",
        role=CAUSE,
        layer="kernels",
        needle=b"nsupported",
        pattern=re.compile(rb"(?i)unsupported (?:PTX version|toolchain)|cudaErrorUnsupportedPtxVersion"),
        meaning="The driver is older than the toolkit that made the code.",
        advice="Update the driver (role nvidia_driver), or use wheels of an older CUDA.",
    ),
    Signature(
        name="toolchain.architecture_unknown",
        role=CAUSE,
        layer="toolchain",
        needle=b"atal",
        pattern=re.compile(
            rb"(?:ptxas|nvcc) +fatal *: +(?:Value '(?:sm|compute)_\d+\w*' is not defined"
            rb"|Unsupported gpu arch)"
        ),
        meaning="This ptxas or nvcc does not know the architecture. Triton brings an older ptxas of its own.",
        advice="Point TRITON_PTXAS_PATH at ptxas of CUDA 12.8 or later, and CUDA_HOME at the same toolkit.",
    ),
    Signature(
        name="kernel.capability_refused",
        role=CAUSE,
        layer="kernels",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)does not support backend '\w+' with capability 12"
            rb"|capability \(?12[., ]*[01]\)? is not supported|SM_?120 (?:is )?not supported"
            rb"|requires? (?:SM|sm_?)(?:90|100|10X)\b|only support(?:s|ed on)? SM(?:90|100)"
        ),
        meaning="A backend that was chosen exists only for SM90 or SM100.",
        advice="Choose one that knows SM120: --moe-runner-backend flashinfer_cutlass, "
        "--attention-backend flashinfer or "
        "triton, --fp4-gemm-backend flashinfer_cutlass or flashinfer_cudnn.",
    ),
    Signature(
        name="kernel.deep_gemm",
        role=CAUSE,
        layer="kernels",
        needle=b"rror",
        pattern=re.compile(rb"(?i)deep_?gemm.*(?:get_num_sms|assert|unsupported|unknown)|get_num_sms"),
        meaning="DeepGEMM has no kernels for SM120 in this version.",
        advice="Set SGLANG_ENABLE_JIT_DEEPGEMM=0 and SGLANG_ENABLE_DEEP_GEMM=0 in the unit's environment.",
    ),
    Signature(
        name="jit.build_failed",
        role=CAUSE,
        layer="toolchain",
        needle=b"Ninja build failed",
        meaning="FlashInfer's compile failed. The compiler's own message stands above or below this line.",
        advice="Read the first 'error:' of nvcc. A stale or half-written cache is cured by module "
        "flashinfer_cache.",
    ),
)
