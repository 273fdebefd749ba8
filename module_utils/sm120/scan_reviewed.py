"""Conditions that shut SM120 out and that somebody has read and judged harmless for the fusion and the fused MoE."""

from __future__ import annotations

_OTHER_BACKEND = "chooses or guards the mnnvl or cutedsl backend; SM120 goes on to trtllm"
_MULTICAST_ASKED = "asked only where a caller wants multicast, which the workspace of the fusion does not"
_ITS_OWN_MODULE = "builds the kernels of SM100; SM120 has a module of its own"
_NOT_CALLED = "kernels that neither the fused all-reduce nor the fused MoE of SM120 calls"
_FP4 = "chooses among FP4 GEMM kernels; SM120 goes on to flashinfer_cutlass"
_FP8 = "about dense FP8 GEMM kernels, which neither the fusion nor the fused MoE of NVFP4 experts calls"
_MXFP4 = "picks a class or a kernel for MXFP4 experts; NVFP4 experts do not come here"
_DEEP_GEMM = "about DeepGEMM's MoE, which is not what serves NVFP4 experts on SM120"
_HOPPERS_OWN = "turns something off on Hopper alone; SM120 goes on"
_ARM = "asked on aarch64 only: how memory handles are passed between processes"

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
    ("flashinfer_comm_fusion.py", "_mnnvl_supported", "is_sm100_supported()"): _OTHER_BACKEND,
    (
        "flashinfer_comm_fusion.py",
        "_mnnvl_supported",
        "is_sm90_supported() and (not is_multi_node)",
    ): _OTHER_BACKEND,
    ("flashinfer_comm_fusion.py", "_resolve_backend", "is_sm100_supported()"): _OTHER_BACKEND,
    ("flashinfer_comm_fusion.py", "_should_force_posix_fd_transport", "major == 10"): _ARM,
    (
        "flashinfer_autotune.py",
        "should_run_flashinfer_autotune",
        "model_uses_modelopt_fp8 and is_sm100_supported()",
    ): _FP8,
    (
        "base_runner.py",
        "_should_run_flashinfer_autotune",
        "model_uses_modelopt_fp8 and is_sm100_supported()",
    ): _FP8,
    (
        "fp8_utils.py",
        "initialize_fp8_gemm_config",
        "backend.is_auto() and server_args.quantization == 'mxfp8' and _is_sm100_supported and "
        "is_flashinfer_available()",
    ): _FP8,
    ("mxfp4.py", "__init__", "is_sm100_supported()"): _MXFP4,
    ("mxfp4.py", "__init__", "is_sm90_supported()"): _MXFP4,
    ("mxfp4.py", "__init__", "get_platform().is_sm100"): _MXFP4,
    ("mxfp4.py", "__init__", "get_platform().is_sm90"): _MXFP4,
    (
        "single_batch_overlap.py",
        "enable_combine_down_gemm_two_stream_overlap",
        "get_moe_runner_backend().is_deep_gemm() and (not is_blackwell())",
    ): _DEEP_GEMM,
    (
        "deepseek_v2.py",
        "shared_experts_fusion_disable_reason",
        "quant_config is not None and quant_config.get_name() == 'modelopt_fp4' and is_sm90_supported() and "
        "get_moe_runner_backend().is_marlin()",
    ): _HOPPERS_OWN,
    ("fp8.py", "get_quant_method", "is_sm90_supported() and (not is_sm100_supported())"): _MXFP4,
    ("fp4_utils.py", "initialize_fp4_gemm_config", "is_sm100_supported()"): _FP4,
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
        "mixed_comm.py",
        "init_virtual_memory",
        "cuda.cuMulticastGetGranularity(mc_prop, cuda.CUmulticastGranularity_flags"
        ".CU_MULTICAST_GRANULARITY_RECOMMENDED)",
    ): _NOT_CALLED,
    (
        "mnnvl.py",
        "__init__",
        "cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED",
    ): _MULTICAST_ASKED,  # where no gate is: from 0.6.10 on only the mnnvl backend makes such memory
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
    ("mnnvl_cutedsl_ar.py", "_check_device", "is_multicast_supported(device.index)"): _OTHER_BACKEND,
    ("runtime.py", "require_mnnvl_multicast_device", "is_multicast_supported(device.index)"): _OTHER_BACKEND,
    ("trtllm_ar.py", "_check_cake_moe_allreduce_arch", "capability not in ((10, 0), (10, 3))"): _NOT_CALLED,
    ("comm.py", "gen_trtllm_mnnvl_comm_module", "[9, 10]"): _NOT_CALLED,
    ("comm.py", "gen_mixed_comm_module", "[9, 10]"): _NOT_CALLED,
}
