"""Conditions that shut SM120 out and that somebody has read and judged harmless for the fusion and the fused MoE."""

from __future__ import annotations

_OTHER_BACKEND = "chooses or guards the mnnvl or cutedsl backend; SM120 goes on to trtllm"
_MULTICAST_ASKED = "asked only where a caller wants multicast, which the workspace of the fusion does not"
_ITS_OWN_MODULE = "builds the kernels of SM100; SM120 has a module of its own"
_NOT_CALLED = "kernels that neither the fused all-reduce nor the fused MoE of SM120 calls"
_FP4 = "chooses among FP4 GEMM kernels; SM120 goes on to flashinfer_cutlass"

# (name of the file, function, text of the condition): why nothing has to open it.
REVIEWED: dict[tuple[str, str, str], str] = {
    ("flashinfer_comm_fusion.py", "_mnnvl_supported", "get_platform().is_sm100"): _OTHER_BACKEND,
    (
        "flashinfer_comm_fusion.py",
        "_mnnvl_supported",
        "get_platform().is_sm90 and (not is_multi_node)",
    ): _OTHER_BACKEND,
    ("flashinfer_comm_fusion.py", "_resolve_backend", "get_platform().is_sm100"): _OTHER_BACKEND,
    ("flashinfer_comm_fusion.py", "_resolve_backend", "not get_platform().is_sm100"): _OTHER_BACKEND,
    ("fp4_utils.py", "initialize_fp4_gemm_config", "get_platform().is_sm100"): _FP4,
    (
        "fp4_utils.py",
        "initialize_fp4_gemm_config",
        "is_cuda() and (10, 0) > get_device_capability() >= (8, 0)",
    ): _FP4,
    (
        "k3_sp_collective.py",
        "_init_state",
        "device_sm not in (100, 103) or group.world_size not in _SUPPORTED_WORLD_SIZES or a2a not in "
        "('megamoe', 'deepep') or (not is_custom_allreduce) or comm_disabled or (not has_multicast)",
    ): _NOT_CALLED,
    ("fused_moe.py", "gen_cutlass_fused_moe_sm103_module", "[10]"): _ITS_OWN_MODULE,
    ("fused_moe.py", "gen_cutlass_fused_moe_sm100_module", "[10, 11]"): _ITS_OWN_MODULE,
    ("fused_moe.py", "gen_trtllm_gen_fused_moe_sm100_module", "[10]"): _NOT_CALLED,
    (
        "allreduce.py",
        "create_allreduce_fusion_workspace",
        "is_multicast_supported(torch.cuda.current_device())",
    ): _OTHER_BACKEND,
    (
        "mixed_comm.py",
        "_create_and_map_vmm_handles",
        "cuda.cuMulticastGetGranularity(mc_prop, cuda.CUmulticastGranularity_flags"
        ".CU_MULTICAST_GRANULARITY_RECOMMENDED)",
    ): _NOT_CALLED,
    (
        "mnnvl.py",
        "is_multicast_supported",
        "cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED",
    ): _MULTICAST_ASKED,
    (
        "mnnvl.py",
        "_get_allocation_prop",
        "cuda.cuMulticastGetGranularity(mc_prop, cuda.CUmulticastGranularity_flags"
        ".CU_MULTICAST_GRANULARITY_RECOMMENDED)",
    ): _MULTICAST_ASKED,
    ("mnnvl_cutedsl_ar.py", "__init__", "is_multicast_supported(device.index)"): _OTHER_BACKEND,
    ("trtllm_ar.py", "_check_cake_moe_allreduce_arch", "capability not in ((10, 0), (10, 3))"): _NOT_CALLED,
    ("comm.py", "gen_trtllm_mnnvl_comm_module", "[9, 10]"): _NOT_CALLED,
    ("comm.py", "gen_mixed_comm_module", "[9, 10]"): _NOT_CALLED,
}
