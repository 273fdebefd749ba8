"""Log lines in the shape that upstream prints them, each with the signature that must know it."""

from __future__ import annotations

LOAD = "[x TP0] Load weight begin. avail mem=94.00 GB"
POOL = "[x TP0] Load weight end. elapsed=30 s, type=GlmMoeDsaForCausalLM, avail mem=30.00 GB"
GRAPH = "[x TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=7.53 GB"
READY = "[x] The server is fired up and ready to roll!"
DOCUMENTED = (
    "in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 94 GiB"
# What a server has logged where its memory runs out.
STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("memory.oom", ()),
    ("memory.oom_at_load", (LOAD,)),
    ("memory.oom_at_kv_allocation", (LOAD, POOL)),
    ("memory.oom_at_graph_capture", (LOAD, POOL, GRAPH)),
    ("memory.oom_while_serving", (LOAD, POOL, GRAPH, READY)),
)

# (signature, lines): the last line is the one that must be found.
SERVER_LINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gate.jit_closed", ("RuntimeError: No supported CUDA architectures found for major versions [9, 10].",)),
    ("gate.jit_closed", ("RuntimeError: No supported CUDA architectures found for major versions [9].",)),
    (
        "gate.backend_refused",
        ("ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.",),
    ),
    ("gate.cuda_too_old_for_sm12x", ("RuntimeError: SM 12.x requires CUDA >= 12.9",)),
    (
        "fusion.preflight_failed",
        (
            "[x TP1] FlashInfer workspace preflight probe failed (CUDA_ERROR_NOT_SUPPORTED). "
            "Skipping allreduce fusion.",
        ),
    ),
    (
        "fusion.workspace_failed",
        ("[x TP1] Failed to initialize FlashInfer workspace (backend=trtllm): x. Disabling it permanently.",),
    ),
    (
        "fusion.disabled",
        (
            "[x TP1] FlashInfer allreduce fusion disabled globally because workspace initialization "
            "failed on "
            "at least one rank.",
        ),
    ),
    ("fusion.disabled", ("[x] FlashInfer allreduce fusion is forcibly disabled by --enforce-disable",)),
    ("fusion.disabled", ("[x TP0] FlashInfer comm not available, skipping workspace initialization",)),
    (
        "fusion.disabled",
        ("[x] Disable --enable-flashinfer-allreduce-fusion because deterministic inference is enabled.",),
    ),
    (
        "fusion.disabled",
        ("[x] Disable --flashinfer-allreduce-fusion-backend because deterministic inference is enabled.",),
    ),
    # 0.5.9, 0.5.10 to 0.5.13.post1, 0.5.14 and later.
    ("fusion.active", ("[x TP0] FlashInfer workspace initialized for rank 0, world_size 8",)),
    ("fusion.active", ("[x TP0] FlashInfer workspace initialized for rank 0, world_size 2, backend trtllm",)),
    (
        "fusion.active",
        (
            "[x TP0] FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0, "
            "world_size=2, max_token_num=2048, hidden_dim=4096",
        ),
    ),
    ("fusion.disabled", ("flashinfer.comm allreduce_fusion API is not available, falling back to standard",)),
    (
        "kernel.no_image",
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device",),
    ),
    (
        "kernel.ptx_unsupported",
        ("RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",),
    ),
    (
        "toolchain.architecture_unknown",
        ("ptxas fatal   : Value 'sm_120a' is not defined for option 'gpu-name'",),
    ),
    ("toolchain.architecture_unknown", ("nvcc fatal   : Unsupported gpu architecture 'compute_120a'",)),
    (
        "kernel.capability_refused",
        ("ValueError: mm_fp4 does not support backend 'trtllm' with capability 120",),
    ),
    (
        "kernel.capability_refused",
        ("AssertionError: moe_runner_backend=flashinfer_mxfp4 requires SM90 or SM100.",),
    ),
    ("kernel.capability_refused", ("RuntimeError: compute capability 12.0 is not supported",)),
    ("kernel.capability_refused", ("NotImplementedError: sm_120 is not supported",)),
    ("kernel.deep_gemm", ("AttributeError: module 'deep_gemm' has no attribute 'get_num_sms'",)),
    ("jit.build_failed", ("RuntimeError: Ninja build failed. Ninja output:",)),
    (
        "memory.kv_pool",
        (
            LOAD,
            POOL,
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current "
            "value: 0.5",
        ),
    ),
    (
        "memory.kv_pool",
        (
            LOAD,
            POOL,
            "ValueError: Loaded weights leave no GPU memory for the KV cache under "
            "--mem-fraction-static=0.0001. Raise --mem-fraction-static above 0.012",
        ),
    ),
    (
        "memory.kv_pool",
        (
            LOAD,
            "RuntimeError: SWA pool cap (4096 tokens, 1.20 GiB) leaves no room for the full KV pool within the "
            "available 1.00 GiB. Reduce --max-running-requests, lower SGLANG_SWA_EVICTION_INTERVAL, or increase "
            "--mem-fraction-static.",
        ),
    ),
    (
        "memory.gpu_occupied",
        (
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
            "pre_model_load_memory=1",
        ),
    ),
    ("memory.oom", (OOM,)),
    ("memory.oom_at_load", (LOAD, OOM)),
    ("memory.oom_at_kv_allocation", (LOAD, POOL, OOM)),
    ("memory.oom_at_graph_capture", (LOAD, POOL, GRAPH, f"Exception: Capture cuda graph failed: {OOM}")),
    ("memory.oom_while_serving", (LOAD, POOL, GRAPH, READY, OOM)),
    (
        "memory.nccl_allocation",
        ("h:1:2 [0] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'",),
    ),
    ("memory.unit_oom", ("sglang-main.service: Failed with result 'oom-kill'.",)),
    ("memory.shared", ("RuntimeError: unable to open shared memory object </torch_1> in read-write mode",)),
    ("memory.disk_full", ("OSError: [Errno 28] No space left on device",)),
    ("memory.pinned", ("RuntimeError: error: RLIMIT_MEMLOCK is too low",)),
    ("memory.kv_retracted", ("[x] KV cache pool is full. Retract requests. #retracted_reqs: 1",)),
    ("memory.graph_capture_failed", ("Exception: Capture cuda graph failed: something else",)),
    (
        "nccl.collective_timeout",
        (
            "[rank7]:[E226 ProcessGroupNCCL.cpp:616] [Rank 7] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=5653, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600077 milliseconds",
        ),
    ),
    (
        "nccl.watchdog_stuck",
        ("[rank7]:[E626] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress",),
    ),
    (
        "nccl.p2p_fault",
        ("h:1:2 [0] transport/p2p.cc:275 NCCL WARN P2P cuMemImportFromShareableHandle failed : invalid",),
    ),
    ("nccl.network", ("h:1:2 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",)),
    ("nccl.version_mismatch", ("ImportError: libtorch_cuda.so: undefined symbol: ncclCommWindowRegister",)),
    (
        "nccl.error",
        (
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled "
            "cuda error, "
            "NCCL version 2.27",
        ),
    ),
    ("nccl.warn", ("h:1:2 [0] misc/x.cc:5 NCCL WARN something new",)),
    ("communication.ipc_invalid", ("RuntimeError: CUDA error: cudaIpcGetMemHandle: invalid argument",)),
    (
        "communication.rendezvous",
        ("torch.distributed.DistStoreError: wait() on TCPStore: wait timeout after 1800000ms, timed out",),
    ),
    ("hang.watchdog", ("[x TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",)),
    (
        "hang.health_check",
        (
            "[x] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. "
            "tic start time: 10:00:00.",
        ),
    ),
    ("toolchain.no_ninja", ("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",)),
    (
        "toolchain.no_nvcc",
        ("RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist",),
    ),
    ("toolchain.no_nvcc", ("/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found",)),
    (
        "toolchain.no_nvcc",
        ("FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",),
    ),
    (
        "toolchain.no_cuda_home",
        ("OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",),
    ),
    ("toolchain.no_header", ("main.c:5:10: fatal error: Python.h: No such file or directory",)),
    (
        "toolchain.no_compiler",
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment",),
    ),
    ("toolchain.no_libcuda", ("/usr/bin/ld: cannot find -lcuda: No such file or directory (libcuda)",)),
    ("toolchain.no_libcuda", ("AssertionError: libcuda.so cannot found!",)),
    ("packages.libcudart_not_loaded", ("AssertionError: libcudart is not loaded in the current process",)),
    (
        "packages.flashinfer_mismatch",
        ("RuntimeError: flashinfer-cubin version (0.6.2) does not match flashinfer version (0.6.3). Please",),
    ),
    (
        "packages.too_old",
        (
            "Exception: flashinfer_python is installed with version 0.5.0, which is less than the minimum "
            "required version 0.6.3. Please",
        ),
    ),
    ("packages.abi", ("ImportError: /v/sgl_kernel/common_ops.so: undefined symbol: _ZN3c104cuda",)),
    (
        "packages.missing_library",
        ("ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",),
    ),
    ("packages.missing_module", ("ModuleNotFoundError: No module named 'orjson'",)),
    (
        "packages.registered_twice",
        ("ValueError: 'qwen3_asr' is already used by a Transformers config, pick another name.",),
    ),
    ("arguments.refused", ("launch_server.py: error: unrecognized arguments: --foo",)),
    ("arguments.refused", ("launch_server.py: error: argument --reasoning-parser: invalid choice: 'glm47'",)),
    (
        "model.no_path",
        ("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name': '/no/model'",),
    ),
    (
        "model.no_path",
        (
            "OSError: /m does not appear to have a file named config.json. Checkout 'https://huggingface.co/m'",
        ),
    ),
    ("model.no_path", ("OSError: Can't load the configuration of '/no/such/model'. If you were trying to",)),
    ("model.gated", ("OSError: You are trying to access a gated repo.",)),
    (
        "model.unknown_architecture",
        (
            "ValueError: The checkpoint you are trying to load has model type `glm_moe_dsa` but Transformers "
            "does not recognize this architecture.",
        ),
    ),
    ("model.weights_missing", ("RuntimeError: Cannot find any model weights with `/m`",)),
    (
        "model.weights_missing",
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",),
    ),
    ("model.tokenizer", ("OSError: Can't load tokenizer for '/m'. If you were trying to load it from",)),
    (
        "model.expert_shape",
        (
            LOAD,
            "RuntimeError: The size of tensor a (3072) must match the size of tensor b (6144) at "
            "non-singleton dimension 1",
        ),
    ),
    (
        "model.tp_does_not_divide",
        (
            "ValueError: The output_size of gate's weight = 192 is not divisible by weight "
            "quantization block_n",
        ),
    ),
    (
        "model.quantization",
        ("ValueError: Quantization method specified in the model config (fp8) does not match modelopt_fp4",),
    ),
    (
        "kernel.fp4",
        ("RuntimeError: [FP4 gemm Runner] Failed to run cutlass FP4 gemm on sm120. Error: Error",),
    ),
    (
        "kernel.tactic_skipped",
        ("[x] flashinfer.jit: [Autotuner]: Skipping tactic <x> 14, due to failure while profiling",),
    ),
    (
        "kernel.moe_config_missing",
        (
            "[x] Using default MoE kernel config. Performance might be sub-optimal! Config file not "
            "found at x.json",
        ),
    ),
    ("model.nan", ("ValueError: Detected errors during sampling! NaN in the logits.",)),
    (
        "model.sampling_assert",
        ("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",),
    ),
    ("model.token_outside_vocabulary", ("IndexError: index out of range in self",)),
    (
        "kernel.illegal_access",
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered",),
    ),
    ("kernel.illegal_access", ("RuntimeError: CUDA error: unspecified launch failure",)),
    (
        "request.too_long",
        ("ValueError: Requested token count exceeds the model's maximum context length of 4096 tokens.",),
    ),
    (
        "process.sigquit",
        ("[x] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",),
    ),
    ("process.sigquit", ("[x] Received sigquit from a child process. It usually means the child failed.",)),
    (
        "process.child_killed",
        ("[x] Subprocess scheduler_0 (pid=5) crashed with exit code -9. Triggering SIGQUIT for cleanup...",),
    ),
    (
        "process.child_crashed",
        ("[x] Subprocess scheduler_0 (pid=5) crashed with exit code 1. Triggering SIGQUIT for cleanup...",),
    ),
    ("process.rank_died", ("RuntimeError: Rank 0 scheduler died during initialization (exit code: 1).",)),
    ("process.initialization_failed", ("[x] Initialization failed. warmup error: Traceback",)),
    ("process.rank_gave_up", ("EOFError",)),
    ("process.segfault", ("Fatal Python error: Segmentation fault",)),
    (
        "network.port_in_use",
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): "
            "address already",
        ),
    ),
    ("network.address", ("OSError: [Errno 99] Cannot assign requested address",)),
    ("host.permission", ("PermissionError: [Errno 13] Permission denied: '/m/config.json'",)),
    ("host.read_only", ("OSError: [Errno 30] Read-only file system: '/home/sglang/.cache'",)),
    ("host.too_many_files", ("OSError: [Errno 24] Too many open files",)),
    ("host.threads", ("RuntimeError: can't start new thread",)),
    ("systemd.start_limit", ("sglang-main.service: Failed with result 'start-limit-hit'.",)),
    ("systemd.exec", ("sglang-main.service: Failed at step EXEC spawning /v/bin/python: No such file",)),
    ("systemd.killed", ("sglang-main.service: Failed with result 'signal'.",)),
    ("systemd.failed", ("sglang-main.service: Failed with result 'exit-code'.",)),
    ("process.forced_exit", ("Signal SIGTERM received while health check failed. Force exiting.",)),
    ("driver.mismatch", ("Failed to initialize NVML: Driver/library version mismatch",)),
    (
        "driver.too_old",
        ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version",),
    ),
    (
        "driver.not_running",
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",),
    ),
    ("driver.no_gpu", ("RuntimeError: No CUDA GPUs are available",)),
    # Each alternative of an expression once more: one that its needle or the triggers keep out is never found.
    (
        "model.token_outside_vocabulary",
        (
            "aten/src/ATen/native/cuda/IndexKernelUtils.cu:16: vectorized_gather_kernel: block: [0,0,0], thread: "
            '[1,0,0] Assertion `ind >=0 && ind < size && "vectorized gather kernel index out of bounds"` failed.',
        ),
    ),
    (
        "model.token_outside_vocabulary",
        (
            "aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [1,0,0], thread: [0,0,0] "
            "Assertion `srcIndex < srcSelectDimSize` failed.",
        ),
    ),
    (
        "model.sampling_assert",
        (
            "aten/src/ATen/native/cuda/TensorCompare.cu:112: _assert_async_cuda_kernel: block: [0,0,0], thread: "
            "[0,0,0] Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed.",
        ),
    ),
    (
        "communication.rendezvous",
        (
            "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of "
            "(10.0.0.1, 20000).",
        ),
    ),
    *(
        (name, (*before, line))
        for name, before in STAGES
        for line in (
            "torch.AcceleratorError: CUDA error: out of memory",
            f"Search for `cudaErrorMemoryAllocation' {DOCUMENTED}",
        )
    ),
    ("toolchain.no_ninja", ("/bin/sh: 1: ninja: not found",)),
    ("toolchain.no_ninja", ("RuntimeError: Ninja is required to load C++ extensions (ninja is required)",)),
    ("toolchain.no_ninja", ("ModuleNotFoundError: No module named 'ninja'",)),
    ("toolchain.no_cuda_home", ("RuntimeError: CUDA_HOME=/usr/local/cuda-12.9 does not exist",)),
    ("toolchain.no_header", ('k.cu(3): catastrophic error: cannot open source file "cuda_runtime.h"',)),
    (
        "toolchain.no_compiler",
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",),
    ),
    (
        "toolchain.no_compiler",
        ("gcc: fatal error: cannot execute 'cc1plus': execvp: No such file or directory",),
    ),
    ("toolchain.no_compiler", ("/bin/sh: 1: c++: not found",)),
    ("toolchain.no_libcuda", ("/usr/bin/ld: cannot find -lcuda: No such file or directory",)),
    (
        "toolchain.no_libcuda",
        ("OSError: libcuda.so.1: cannot open shared object file: No such file or directory",),
    ),
    (
        "packages.too_old",
        (
            "Exception: flashinfer_python with minimum required version 0.6.3 is not installed. Please install it",
        ),
    ),
    (
        "packages.abi",
        ("python: symbol lookup error: /v/sgl_kernel/common_ops.abi3.so: undefined symbol: _ZN3c10",),
    ),
    (
        "packages.missing_library",
        ("OSError: libcudnn.so.9: cannot open shared object file: No such file or directory",),
    ),
    ("packages.missing_module", ("[x TP0] Import failed: ModuleNotFoundError: No module named 'xgrammar'",)),
    ("process.rank_gave_up", ("ConnectionResetError: [Errno 104] Connection reset by peer",)),
    ("process.rank_gave_up", ("BrokenPipeError: [Errno 32] Broken pipe",)),
    (
        "process.rank_gave_up",
        ("RuntimeError: [../third_party/gloo] Connection closed by peer [127.0.0.1]:20",),
    ),
    ("network.port_in_use", ("torch.distributed.DistNetworkError: bind failed (errno: 98, EADDRINUSE)",)),
    ("network.port_in_use", ("RuntimeError: the server socket has failed to bind: address already in use",)),
    ("network.port_in_use", ("ValueError: port 30000 is not available",)),
    ("network.address", ("OSError: Cannot assign requested address",)),
    ("host.permission", ("OSError: [Errno 13] '/srv/models/default'",)),
    ("host.read_only", ("OSError: Read-only file system: '/home/sglang/.cache'",)),
    ("host.too_many_files", ("OSError: Too many open files",)),
    ("host.threads", ("libgomp: Thread creation failed: Resource temporarily unavailable",)),
    (
        "host.threads",
        ("terminate: std::system_error: Resource temporarily unavailable (thread constructor)",),
    ),
    ("systemd.exec", ("sglang-main.service: Main process exited, code=exited, status=203/EXEC",)),
    ("fusion.disabled", (". Disabling flashinfer allreduce fusion permanently.",)),
    ("fusion.disabled", ("). Skipping allreduce fusion.",)),
    ("kernel.no_image", (f"Search for `cudaErrorNoKernelImageForDevice' {DOCUMENTED}",)),
    ("kernel.ptx_unsupported", (f"Search for `cudaErrorUnsupportedPtxVersion' {DOCUMENTED}",)),
    (
        "kernel.capability_refused",
        ("NotImplementedError: flash_attn at sgl-kernel is only supported on sm90 and above",),
    ),
    ("driver.no_gpu", ("RuntimeError: CUDA error: no CUDA-capable device is detected",)),
    (
        "driver.no_gpu",
        ("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",),
    ),
    (
        "driver.no_gpu",
        ("RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",),
    ),
    (
        "driver.no_gpu",
        ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",),
    ),
    ("driver.no_gpu", (f"Search for `cudaErrorNoDevice' {DOCUMENTED}",)),
    ("driver.no_gpu", ("torch.AcceleratorError: CUDA error: invalid device ordinal",)),
    (
        "memory.nccl_allocation",
        ("h:1:2 [0] include/alloc.h:302 NCCL WARN Failed to CUDA calloc async 4194304 bytes",),
    ),
    ("memory.shared", ("Fatal Python error: Bus error",)),
    ("nccl.p2p_fault", ("h:1:2 [0] enqueue.cc:1556 NCCL WARN Cuda failure 1 'invalid argument'",)),
    ("nccl.error", ("ncclUnhandledCudaError: Call to CUDA function failed.",)),
    (
        "communication.ipc_invalid",
        ("Failed: Cuda error /sgl-kernel/csrc/allreduce/custom_all_reduce.cuh:164 'invalid argument'",),
    ),
    (
        "model.no_path",
        (
            "OSError: x/y is not a local folder and is not a valid model identifier listed on "
            "'https://huggingface.co/models'",
        ),
    ),
    (
        "model.no_path",
        ("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-69)",),
    ),
    (
        "model.no_path",
        (
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk "
            "cache and outgoing traffic has been disabled.",
        ),
    ),
    (
        "model.no_path",
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find "
            "them in the cached files.",
        ),
    ),
    (
        "model.no_path",
        ("ValueError: Unrecognized model in /m. Should have a `model_type` key in its config.json.",),
    ),
    (
        "model.no_path",
        (
            "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach "
            "https://huggingface.co/api/models/x/y: offline mode is enabled.",
        ),
    ),
    (
        "model.gated",
        (
            "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/x/y",
        ),
    ),
    (
        "model.gated",
        ("requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://huggingface.co/x/y",),
    ),
    (
        "model.unknown_architecture",
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now.",),
    ),
    ("model.unknown_architecture", ("KeyError: 'glm_moe_dsa'",)),
    ("model.unknown_architecture", ("ModuleNotFoundError: No module named 'transformers_modules.GLM-5'",)),
    (
        "model.weights_missing",
        ("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",),
    ),
    (
        "model.weights_missing",
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: invalid header or archive is "
            "corrupted",
        ),
    ),
    (
        "model.weights_missing",
        ('FileNotFoundError: No such file or directory: "/m/model-00002-of-00002.safetensors"',),
    ),
    (
        "model.tokenizer",
        ("ValueError: Tokenizer class GlmTokenizer does not exist or is not currently imported.",),
    ),
    ("model.tokenizer", ("FileNotFoundError: [Errno 2] No such file or directory: '/m/tokenizer.json'",)),
    (
        "model.tokenizer",
        ("Exception: data did not match any variant of untagged enum ModelWrapper at line 757443 column 3",),
    ),
    (
        "model.expert_shape",
        (LOAD, "RuntimeError: start (3072) + length (3072) exceeds dimension size (3072)."),
    ),
    (
        "model.expert_shape",
        (
            LOAD,
            "AssertionError: Attempted to load weight (torch.Size([3072])) into parameter (torch.Size([6144]))",
        ),
    ),
    ("model.tp_does_not_divide", ("AssertionError: tp_size must be divisible by number of nodes",)),
    (
        "model.quantization",
        (
            "ValueError: Cannot find 'quant_algo' in the model's quantization config. Expected either flat "
            "format (config.json) or nested format (hf_quant_config.json).",
        ),
    ),
    (
        "model.quantization",
        (
            "ValueError: The quantization method modelopt_fp4 is not supported for the current GPU. Minimum "
            "capability: 100.",
        ),
    ),
    (
        "kernel.fp4",
        (
            "RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: Failed to initialize cutlass TMA WS "
            "grouped gemm.",
        ),
    ),
    ("kernel.illegal_access", ("torch.AcceleratorError: CUDA error: misaligned address",)),
    ("kernel.illegal_access", ("torch.AcceleratorError: CUDA error: device-side assert triggered",)),
    ("kernel.illegal_access", (f"Search for `cudaErrorIllegalAddress' {DOCUMENTED}",)),
    (
        "request.too_long",
        ("ValueError: The input (5000 tokens) is longer than the model's context length (4096 tokens).",),
    ),
)

KERNEL_LINES: tuple[tuple[str, str], ...] = (
    *(
        (
            f"xid.{number}",
            f"Nov 30 10:00:00 h kernel: NVRM: Xid (PCI:0000:01:00): {number}, pid=12, name=python, x",
        )
        for number in (13, 31, 43, 48, 61, 62, 63, 64, 74, 79, 94, 95, 119, 120, 154)
    ),
    (
        "xid.154_over",
        "NVRM: Xid (PCI:0000:82:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    ),
    ("xid.other", "NVRM: Xid (PCI:0000:01:00): 1339, pid=1"),
    (
        "xid.154",
        "NVRM: Xid (PCI:0000:82:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)",
    ),
    (
        "driver.mismatch",
        "NVRM: API mismatch: the client has the version 580.126.09, but this kernel module 580.1",
    ),
    ("driver.init_failed", "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x62:0x40:2624)"),
    (
        "driver.needs_open_modules",
        "NVRM: installed in this system requires use of the NVIDIA open kernel modules.",
    ),
    ("gpu.fallen_off", "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus."),
    ("pcie.bar", "NVRM: BAR0 is 0M @ 0x0 (PCI:0000:06:00.0)"),
    ("pcie.bar", "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:"),
    ("pcie.bar", "pci 0000:01:00.0: BAR 2 [mem size 0x2000000000 64bit pref]: can't assign; no space"),
    (
        "pcie.error",
        "pcieport 0000:00:01.1: AER: Uncorrectable (Fatal) error message received from 0000:01:00.0",
    ),
    (
        "pcie.error",
        "pcieport 0000:00:01.1: AER: Multiple Correctable error message received from 0000:01:00.0",
    ),
    ("pcie.link_down", "pcieport 0000:40:01.1: pciehp: Slot(0): Link Down"),
    ("pcie.reset", "vfio-pci 0000:01:00.0: not ready 65535ms after FLR; giving up"),
    ("iommu.fault", "AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0012 address=0xf000 flags=0x0000]"),
    (
        "iommu.fault",
        "DMAR: [DMA Read NO_PASID] Request device [01:00.0] fault addr 0xf0000000 [fault reason 0x06]",
    ),
    ("iommu.fault", "qemu-system-x86_64: IOMMU_IOAS_MAP failed: Bad address"),
    ("memory.host_oom", "Out of memory: Killed process 4242 (sglang::schedul) total-vm:1kB, anon-rss:1kB"),
    ("kernel_log.segfault", "python[4242]: segfault at 0 ip 00007f sp 00007f error 4 in libcuda.so.1"),
)

# Lines of healthy servers and kernels, some with words that look bad.
HARMLESS = (
    "[x] server_args=ServerArgs(model_path='/m', watchdog_timeout=300, log_level_http=None, "
    "crash_dump_folder=None, "
    "enable_flashinfer_allreduce_fusion=True, fp4_gemm_runner_backend='auto', "
    "disable_shared_experts_fusion=False)",
    "[x] Ignore import error when loading sglang.srt.models.midashenglm: No module named 'torchaudio'",
    "[x] Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
    "[x] Decode batch, #running-req: 8, #token: 12, token usage: 0.01, gen throughput (token/s): 1, "
    "#queue-req: 0",
    '[x] INFO:     127.0.0.1:5 - "POST /generate HTTP/1.1" 200 OK',
    '[x] INFO:     127.0.0.1:5 - "GET /error_report HTTP/1.1" 404 Not Found',
    "[x] Memory pool end. avail mem=7.53 GB",
    "[x] Auto-enabling FlashInfer AllReduce Fusion on SM90/SM10X for GlmMoeDsaForCausalLM",
    "h:1:2 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to SYS",
    "[x] Setting error_count=0, failed_requests=0, timeout=20",
    "[x] Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[].",
    "[x] The current platform does not support Intel AMX, will fallback to torch_native backend.",
    "systemd[1]: Stopped sglang-main.service.",
    "[x] Subprocess scheduler_0 (pid=5) crashed with exit code -15. Triggering SIGQUIT for cleanup...",
)
