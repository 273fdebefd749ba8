"""Memory: of the GPU at each stage, of the host, of the file systems."""

from __future__ import annotations

import re

from .signature import CAPTURING, CAUSE, CONSEQUENCE, LOADING, POOLING, SERVING, WARNING, Signature

TOPIC = "Out of memory"

_CUDA_OOM = re.compile(
    rb"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|OutOfMemoryError"
)

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        name="memory.kv_pool",
        role=CAUSE,
        layer="memory",
        needle=b"--mem-fraction-static",
        # The first by releases of every age; the others by 0.5.23 (kv_cache_configurator.py, pool_configurator.py).
        pattern=re.compile(
            rb"Not enough memory\. Please try to increase|Loaded weights leave no GPU memory for the KV cache"
            rb"|leaves no room for the full KV pool"
        ),
        meaning="After the weights nothing is left for the KV cache.",
        advice="Raise mem_fraction_static, or give the weights more GPUs (tp), a smaller context or "
        "quantised KV. "
        "nvidia-smi shows whether another process holds memory.",
    ),
    Signature(
        name="memory.gpu_occupied",
        role=CAUSE,
        layer="memory",
        needle=b"The memory capacity is unbalanced",
        meaning="Another process holds memory on some of the GPUs, often an orphan of an earlier server.",
        advice="nvidia-smi --query-compute-apps=pid,used_memory --format=csv shows it; stop its unit.",
    ),
    Signature(
        name="memory.oom_at_load",
        role=CAUSE,
        layer="memory",
        needle=b"emory",
        pattern=_CUDA_OOM,
        stage=LOADING,
        meaning="The weights do not fit into the GPUs' memory.",
        advice="More GPUs (tp, pp), a smaller quantisation, or nothing else on the cards. With "
        "speculative decoding the "
        "model may be loaded twice unless SGLANG_ENABLE_SPEC_V2 is set.",
    ),
    Signature(
        name="memory.oom_at_kv_allocation",
        role=CAUSE,
        layer="memory",
        needle=b"emory",
        pattern=_CUDA_OOM,
        stage=POOLING,
        meaning="The KV cache that mem_fraction_static asks for does not fit.",
        advice="Lower mem_fraction_static by 0.05, or max_total_tokens.",
    ),
    Signature(
        name="memory.oom_at_graph_capture",
        role=CAUSE,
        layer="memory",
        needle=b"emory",
        pattern=_CUDA_OOM,
        stage=CAPTURING,
        meaning="Capturing the CUDA graphs needs more memory than the KV cache left.",
        advice="Lower mem_fraction_static by 0.05 or cuda_graph_max_bs; some MoE backends take 5 to "
        "10 GB more.",
    ),
    Signature(
        name="memory.oom_while_serving",
        role=CAUSE,
        layer="memory",
        needle=b"emory",
        pattern=_CUDA_OOM,
        stage=SERVING,
        meaning="A batch needed more activation memory than was left beside the KV cache.",
        advice="Lower mem_fraction_static or chunked_prefill_size.",
    ),
    Signature(
        name="memory.oom",
        role=CAUSE,
        layer="memory",
        needle=b"emory",
        pattern=_CUDA_OOM,
        meaning="A GPU's memory is full before the weights are loaded: another process holds it.",
        advice="nvidia-smi --query-compute-apps=pid,used_memory --format=csv shows it; stop its unit.",
    ),
    Signature(
        name="memory.nccl_allocation",
        role=CAUSE,
        layer="memory",
        needle=b"NCCL WARN",
        pattern=re.compile(rb"(?i)cuda failure.*out of memory|failed to (?:cuda )?(?:m|c)alloc|calloc"),
        meaning="NCCL found no memory for its buffers beside the KV cache.",
        advice="Lower mem_fraction_static by 0.02 to 0.05, or fewer channels (NCCL_MAX_NCHANNELS).",
    ),
    Signature(
        name="memory.unit_oom",
        role=CAUSE,
        layer="host",
        needle=b"ailed with result 'oom-kill'",
        meaning="The kernel or systemd-oomd killed the unit for want of host memory.",
        advice="More memory for the VM, or a higher MemoryMax of the unit.",
        fatal=True,
    ),
    Signature(
        name="memory.shared",
        role=CAUSE,
        layer="host",
        needle=b"rror",
        pattern=re.compile(rb"(?i)bus error|unable to (?:open|allocate|mmap).*(?:shared memory|/dev/shm)"),
        meaning="The file system for shared memory is too small for the ranks.",
        advice="Make /dev/shm larger (df -h /dev/shm; in containers --shm-size or --ipc=host).",
    ),
    Signature(
        name="memory.disk_full",
        role=CAUSE,
        layer="host",
        needle=b"rror",
        pattern=re.compile(rb"No space left on device|\[Errno 28\]"),
        meaning="A file system is full: weights, JIT cache or /tmp.",
        advice="df -h shows which; the JIT cache lies under the service user's ~/.cache/flashinfer.",
    ),
    Signature(
        name="memory.pinned",
        role=CAUSE,
        layer="host",
        needle=b"rror",
        pattern=re.compile(rb"RLIMIT_MEMLOCK"),
        meaning="Host memory could not be locked for the GPU.",
        advice="LimitMEMLOCK=infinity in the unit.",
    ),
    Signature(
        name="memory.kv_retracted",
        role=WARNING,
        layer="memory",
        needle=b"KV cache pool is full",
        meaning="Requests were put back for want of KV cache: they finish late, and throughput falls.",
        advice="Fewer max_running_requests, or more KV cache.",
    ),
    Signature(
        name="memory.graph_capture_failed",
        role=CONSEQUENCE,
        layer="memory",
        needle=b"apture cuda graph failed",
        meaning="Graph capture stopped; the reason is in this line or in the exception above it.",
        advice="Look at the first exception above it.",
    ),
)
