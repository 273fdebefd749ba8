"""NCCL, P2P, collectives that never end, watchdogs."""

from __future__ import annotations

import re

from .signature import CAUSE, CONSEQUENCE, WARNING, Signature

TOPIC = "The server hangs, or ranks do not find each other"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        name="nccl.collective_timeout",
        role=CAUSE,
        layer="communication",
        needle=b"caught collective operation timeout",
        meaning="A collective did not end: one rank never came, or P2P between two cards does not work.",
        advice="Try NCCL_P2P_DISABLE=1: when that helps, it is P2P (IOMMU, ACS, nvidia_uvm "
        "uvm_disable_hmm=1). "
        "Otherwise look for the rank that logged last.",
        fatal=True,
    ),
    Signature(
        name="nccl.watchdog_stuck",
        role=CAUSE,
        layer="communication",
        needle=b"watchdog got stuck",
        meaning="A CUDA or NCCL call never returned.",
        advice="Look at the kernel log for Xid errors; try NCCL_P2P_DISABLE=1.",
        fatal=True,
    ),
    Signature(
        name="nccl.p2p_fault",
        role=CAUSE,
        layer="communication",
        needle=b"NCCL",
        pattern=re.compile(
            rb"(?i)(?:P2P|peer access|cudaIpc|cuMem\w*Import|peer mapping).*"
            rb"(?:fail|error|invalid|not supported|illegal)|Cuda failure.*'(?:invalid argument|peer access)"
        ),
        meaning="Peer access between two GPUs failed.",
        advice="nvidia-smi topo -p2p r must say OK for all pairs. In a VM the cards need one "
        "GPUDirect clique "
        "(x-nv-gpudirect-clique); until then NCCL_P2P_DISABLE=1.",
    ),
    Signature(
        name="nccl.network",
        role=CAUSE,
        layer="communication",
        needle=b"NCCL",
        pattern=re.compile(
            rb"(?i)(?:bootstrap|socket|interface|connect to).*(?:fail|refused|found|timed? ?out)"
        ),
        meaning="NCCL's ranks could not reach each other over the network interface that was chosen.",
        advice="Set NCCL_SOCKET_IFNAME (lo on one host) and NCCL_IB_DISABLE=1 where there is no InfiniBand.",
    ),
    Signature(
        name="nccl.version_mismatch",
        role=CAUSE,
        layer="packages",
        needle=b"rror",
        pattern=re.compile(rb"undefined symbol: nccl\w+"),
        meaning="The NCCL library loaded is not the one torch was built with.",
        advice="Remove NCCL from LD_LIBRARY_PATH; keep to the release set's nvidia-nccl wheel.",
    ),
    Signature(
        name="nccl.error",
        role=CAUSE,
        layer="communication",
        needle=b"rror",
        pattern=re.compile(
            rb"NCCL error|nccl(?:UnhandledCuda|Internal|System|Remote|InvalidUsage"
            rb"|InvalidArgument)Error|DistBackendError"
        ),
        meaning="NCCL gave up; the line or the one below it names the call.",
        advice="Start once with NCCL_DEBUG=INFO and look at the first WARN line.",
    ),
    Signature(
        name="nccl.warn",
        role=WARNING,
        layer="communication",
        needle=b"NCCL WARN",
        meaning="NCCL met something unexpected.",
        advice="Read the line: the first WARN before a failure usually names its reason.",
    ),
    Signature(
        name="communication.ipc_invalid",
        role=CAUSE,
        layer="communication",
        needle=b"rror",
        pattern=re.compile(rb"(?i)custom_all_reduce.*invalid argument|cudaIpc(?:Get|Open)MemHandle"),
        meaning="CUDA IPC between the ranks failed. expandable_segments:True in "
        "PYTORCH_CUDA_ALLOC_CONF does that.",
        advice="Remove expandable_segments, or start with --disable-custom-all-reduce.",
    ),
    Signature(
        name="communication.rendezvous",
        role=CAUSE,
        layer="communication",
        needle=b"imed out",
        pattern=re.compile(rb"(?i)(?:TCPStore|rendezvous|init_process_group|wait\(\)|barrier).*timed out"),
        meaning="The ranks waited for each other in vain while starting.",
        advice="One rank died earlier or hangs in a JIT compile: look at the first exception of any rank.",
    ),
    Signature(
        name="communication.rendezvous",
        role=CAUSE,
        layer="communication",
        needle=b"DistNetworkError",
        pattern=re.compile(rb"DistNetworkError(?!.*(?:EADDRINUSE|in use))"),
        meaning="The ranks waited for each other in vain while starting.",
        advice="One rank died earlier or hangs in a JIT compile: look at the first exception of any rank.",
    ),
    Signature(
        name="hang.watchdog",
        role=CAUSE,
        layer="hang",
        needle=b"atchdog timeout",
        pattern=re.compile(rb"(?<!soft )watchdog timeout \(", re.IGNORECASE),
        meaning="One forward pass took longer than the watchdog allows: a collective that never "
        "ends, or a compile "
        "within it.",
        advice="If a JIT compile was running, raise watchdog_timeout for the first start. If the "
        "GPUs stood at 100 % "
        "and low power, try with sglang_server_allreduce_fusion: off.",
        fatal=True,
    ),
    Signature(
        name="hang.health_check",
        role=CONSEQUENCE,
        layer="hang",
        needle=b"Health check failed. Server couldn't get a response from detokenizer",
        meaning="The scheduler did not answer its own health check for 20 seconds.",
        advice="Look for what stopped it: an exception, a watchdog, a stopped process. A long "
        "prefill does it too.",
    ),
)
