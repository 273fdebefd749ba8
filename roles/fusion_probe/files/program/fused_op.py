"""All-reduce, residual add and RMSNorm in one FlashInfer call, as the installed SGLang makes it."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
import torch.distributed as dist


class Groups:
    """The two process groups of SGLang's coordinator: NCCL for tensors, gloo for the CPU."""

    def __init__(self, rank: int, ranks: int, device: Any, cpu: Any) -> None:
        self.rank, self.ranks, self.device, self.cpu = rank, ranks, device, cpu


class IpcApi:
    """`trtllm_allreduce_fusion` on a workspace of CUDA IPC buffers (SGLang up to 0.5.9)."""

    name = "ipc"

    def __init__(self, groups: Groups, call: dict[str, Any], eps: float) -> None:
        import flashinfer.comm as comm

        self.comm, self.groups, self.call, self.eps = comm, groups, call, eps
        self.workspaces: dict[int, torch.Tensor] = {}

    def make_workspace(self, hidden: int) -> dict[str, Any]:
        _handles, tensor = self.comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            self.groups.rank,
            self.groups.ranks,
            self.call["max_tokens"],
            hidden,
            group=self.groups.device,
            use_fp32_lamport=False,
        )
        self.workspaces[hidden] = tensor
        return {"backend": "trtllm", "memory": "CUDA IPC"}

    def run(
        self, x: Any, residual: Any, weight: Any, residual_out: Any, norm_out: Any, use_oneshot: bool | None
    ) -> None:
        tokens, hidden = x.shape
        self.comm.trtllm_allreduce_fusion(
            allreduce_in=x,
            world_size=self.groups.ranks,
            world_rank=self.groups.rank,
            token_num=tokens,
            hidden_dim=hidden,
            workspace_ptrs=self.workspaces[hidden],
            launch_with_pdl=True,
            use_oneshot=use_oneshot,
            trigger_completion_at_end=False,
            fp32_acc=self.call["fp32_accumulate"],
            pattern_code=self.comm.AllReduceFusionPattern.kARResidualRMSNorm,
            allreduce_out=None,
            residual_in=residual,
            residual_out=residual_out,
            norm_out=norm_out,
            quant_out=None,
            scale_out=None,
            rms_gamma=weight,
            rms_eps=self.eps,
            scale_factor=None,
            layout_code=None,
        )


class UnifiedApi:
    """`allreduce_fusion` on `create_allreduce_fusion_workspace(backend="trtllm")` (SGLang from 0.5.10)."""

    name = "unified"

    def __init__(self, groups: Groups, call: dict[str, Any], eps: float) -> None:
        import flashinfer.comm as comm

        self.comm, self.groups, self.call, self.eps = comm, groups, call, eps
        self.workspaces: dict[int, Any] = {}
        takes = inspect.signature(comm.allreduce_fusion).parameters
        self.extra = {"trigger_completion_at_end": False} if "trigger_completion_at_end" in takes else {}

    def make_workspace(self, hidden: int) -> dict[str, Any]:
        groups, create = self.groups, self.comm.create_allreduce_fusion_workspace
        takes = inspect.signature(create).parameters
        options: dict[str, Any] = {}
        if self.call["passes_groups"] and "comm_backend" in takes:
            options["comm_backend"] = _comm_backend(groups)
        if self.call["passes_groups"] and "group" in takes:
            options["group"] = groups.device
        workspace = create(
            backend="trtllm",
            world_size=groups.ranks,
            rank=groups.rank,
            max_token_num=self.call["max_tokens"],
            hidden_dim=hidden,
            dtype=torch.bfloat16,
            gpus_per_node=groups.ranks,
            **options,
        )
        self.workspaces[hidden] = workspace
        handles = getattr(workspace, "mem_handles", [])
        return {"backend": workspace.backend, "memory": type(handles[0]).__name__ if handles else "CUDA IPC"}

    def run(
        self, x: Any, residual: Any, weight: Any, residual_out: Any, norm_out: Any, use_oneshot: bool | None
    ) -> None:
        self.comm.allreduce_fusion(
            input=x,
            workspace=self.workspaces[x.shape[-1]],
            pattern=self.comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            residual_out=residual_out,
            norm_out=norm_out,
            residual_in=residual,
            rms_gamma=weight,
            rms_eps=self.eps,
            use_oneshot=use_oneshot,
            fp32_acc=self.call["fp32_accumulate"],
            **self.extra,
        )


OPERATORS: dict[str, Any] = {api.name: api for api in (IpcApi, UnifiedApi)}


def _comm_backend(groups: Groups) -> Any:
    """FlashInfer's backend on the NCCL group, broadcasting over the CPU group, as SGLang has it."""
    from flashinfer.comm.mnnvl import TorchDistBackend

    class Backend(TorchDistBackend):
        def bcast(self, data: Any, root: int) -> Any:
            box = [data]
            dist.broadcast_object_list(
                box, src=dist.get_process_group_ranks(groups.cpu)[root], group=groups.cpu
            )
            return box[0]

    return Backend(group=groups.device)


def multicast_against_orders(device_index: int) -> bool:
    """The host switched multicast off in torch and torch offers it all the same: do not allocate."""
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
        return False
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device_index))


def sglang_preflight(groups: Groups, call: dict[str, Any], hidden: int) -> str:
    """SGLang's own vote before it makes a workspace: 'passed', 'refused', or why it was not asked."""
    if not call["has_preflight"]:
        return "this SGLang has none"
    try:
        from sglang.srt.layers import flashinfer_comm_fusion as fusion
    except Exception as error:  # whatever SGLang's imports raise on this host, the probe itself can go on
        return f"not asked: {type(error).__name__}: {str(error)[:200]}"
    check = fusion._preflight_check_workspace_memory
    offered = {
        "world_size": groups.ranks,
        "max_token_num": call["max_tokens"],
        "hidden_dim": hidden,
        "dtype": torch.bfloat16,
        "cpu_group": groups.cpu,
        "group": groups.cpu,
    }
    takes = inspect.signature(check).parameters
    return "passed" if check(**{k: v for k, v in offered.items() if k in takes}) else "refused"
