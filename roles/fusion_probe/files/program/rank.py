"""One rank of the fusion probe on one GPU: stages nccl, workspace, numbers, graph, speed."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from channel import Channel, die_with_parent, read_config
from checks import TORCH_DTYPES, Figures, compare, make_inputs, poisoned
from faults import Faulty
from fused_op import OPERATORS, Groups, multicast_against_orders, sglang_preflight
from sm120.probe_cases import CALLS, USE_ONESHOT, workspace_bytes
from sm120.probe_limits import limits_for

SPARE_BYTES = 5 << 30  # inputs, outputs and the float64 reference of the largest case, and NCCL's buffers


class StageFailed(Exception):
    """A stage found what it looks for: `cause` is a word of the report, the text is for people."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


def told(figure: float) -> float | None:
    """JSON has no infinity."""
    return figure if math.isfinite(figure) else None


class Rank:
    def __init__(self, config: dict[str, Any], rank: int, channel: Channel, device: Any) -> None:
        self.config, self.rank, self.ranks, self.channel = config, rank, int(config["ranks"]), channel
        self.device, self.cuda = device, device.type == "cuda"
        self.operators, self.backend = OPERATORS, "nccl" if self.cuda else "gloo"
        self.operator: Any = None

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def run(self) -> None:
        stages: dict[str, Callable[[], dict[str, Any]]] = {
            "nccl": self.nccl,
            "workspace": self.workspace,
            "numbers": self.numbers,
            "graph": self.graph,
            "speed": self.speed,
        }
        for name in self.config["stages"]:
            self.channel.begin(name)
            found = stages[name]()
            self.synchronize()
            self.channel.beat("waiting for the others at the end of the stage")
            dist.barrier(group=self.groups.cpu)
            self.channel.end(**found)

    # -- nccl ------------------------------------------------------------------------------------------------
    def nccl(self) -> dict[str, Any]:
        self.channel.beat("joining the process groups")
        forever = timedelta(days=1)  # the supervisor's limits end a hang, not torch's
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            self.backend,
            init_method=self.config["rendezvous"],
            rank=self.rank,
            world_size=self.ranks,
            timeout=forever,
        )
        everyone = list(range(self.ranks))
        self.groups = Groups(
            self.rank,
            self.ranks,
            dist.new_group(everyone, backend=self.backend, timeout=forever),
            dist.new_group(everyone, backend="gloo", timeout=forever),
        )
        for elements in (1, 4096, 1 << 22):
            self.channel.beat(f"all_reduce of {elements} elements")
            values = torch.full((elements,), float(self.rank + 1), device=self.device)
            dist.all_reduce(values, group=self.groups.device)
            self.synchronize()
            want = self.ranks * (self.ranks + 1) / 2
            if not bool((values == want).all()):
                raise StageFailed(
                    "nccl_wrong", f"all_reduce of {elements} elements gave {values[0]}, wanted {want}"
                )
        found: dict[str, Any] = {"torch": torch.__version__}
        if self.cuda:
            index = self.device.index
            found["gpu"] = torch.cuda.get_device_name(index)
            found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(index)))
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            found["p2p"] = [
                torch.cuda.can_device_access_peer(index, p) for p in range(self.ranks) if p != index
            ]
        return found

    # -- workspace -------------------------------------------------------------------------------------------
    def workspace(self) -> dict[str, Any]:
        call = self.config["call"]
        if self.cuda:
            if multicast_against_orders(self.device.index):
                raise StageFailed("multicast", "torch offers NVLink multicast although it is switched off")
            need = SPARE_BYTES + sum(
                workspace_bytes(self.ranks, call["max_tokens"], h) for h in self.config["hidden"]
            )
            free, _total = torch.cuda.mem_get_info()
            if free < need:
                raise StageFailed(
                    "memory", f"{free >> 20} MiB of GPU memory free, the probe needs {need >> 20} MiB"
                )
        self.channel.beat("importing the operator")
        operator = self.operators[call["api"]](self.groups, call, self.config["eps"])
        found: dict[str, Any] = {"api": operator.name}
        if self.cuda:
            self.channel.beat("SGLang's own preflight")
            found["sglang_preflight"] = sglang_preflight(self.groups, call, max(self.config["hidden"]))
            if found["sglang_preflight"] == "refused":
                raise StageFailed(
                    "preflight", "SGLang's own check refuses the workspace: it would go on without fusion"
                )
        for hidden in self.config["hidden"]:
            self.channel.beat(f"workspace for hidden={hidden}")
            found.update(operator.make_workspace(hidden))
            if found.get("backend", "trtllm") != "trtllm":
                raise StageFailed(
                    "backend", f"FlashInfer made a workspace of backend {found['backend']}, wanted trtllm"
                )
        fault = self.config["fault"]
        self.operator = Faulty(operator, fault, self.groups) if fault != "none" else operator
        return found

    # -- numbers ---------------------------------------------------------------------------------------------
    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's input, byte for byte (gloo knows no bf16)."""
        mine = x.contiguous().view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(parts, mine, group=self.groups.device)
        return torch.stack(parts).view(x.dtype)

    def agrees(self, out: torch.Tensor) -> bool:
        """Bit for bit what rank 0 has: tensor parallel ranks that drift apart give wrong text later."""
        first = out.contiguous().view(torch.uint8).clone()
        dist.broadcast(first, 0, group=self.groups.device)
        return bool(torch.equal(first, out.contiguous().view(torch.uint8)))

    def judge(self, case: dict[str, Any], launch: Callable[..., None], inputs: Any) -> None:
        """Fresh data in each call, calls back to back; then the first again, which must not differ."""
        tokens, hidden, dtype = case["tokens"], case["hidden"], case["dtype"]
        gathered = self.gather(inputs.x)
        residual_out = poisoned(CALLS + 1, tokens, hidden, dtype, self.device)
        norm_out = poisoned(CALLS + 1, tokens, hidden, dtype, self.device)
        launch(inputs, residual_out, norm_out)
        self.channel.beat(case["name"] + ": waiting for the result")
        self.synchronize()
        limits = limits_for(dtype, self.ranks, self.config["call"]["fp32_accumulate"])
        figures = Figures()
        for k in range(CALLS):
            self.channel.beat(f"{case['name']}: checking call {k}")
            pair = residual_out[k], norm_out[k]
            figures.merge(
                compare(
                    gathered[:, k], inputs.residual[k], inputs.weight, pair, limits, dtype, self.config["eps"]
                )
            )
        for name, out in (("residual", residual_out), ("norm", norm_out)):
            if not torch.equal(out[0].view(torch.int16), out[CALLS].view(torch.int16)):
                figures.problems[f"{name} moves"] = f"{name}: the same call gave other bits the second time"
            if not self.agrees(out):
                figures.problems[f"{name} differs"] = f"{name}: not the bits that rank 0 has"
        self.channel.send(
            "case",
            case=case["name"],
            worst=told(figures.worst),
            rms=figures.rms,
            bias=figures.bias,
            error=told(figures.error),
            problems=list(figures.problems.values()),
        )

    def inputs_of(self, index: int, case: dict[str, Any]) -> Any:
        self.channel.beat(case["name"])
        return make_inputs(
            CALLS,
            case["tokens"],
            case["hidden"],
            case["dtype"],
            base=self.config["seed"],
            index=index,
            rank=self.rank,
            device=self.device,
        )

    def numbers(self) -> dict[str, Any]:
        for index, case in enumerate(self.config["cases"]):
            if case["kind"] != "eager":
                continue

            def launch(inputs: Any, residual_out: Any, norm_out: Any, case: dict[str, Any] = case) -> None:
                for k in (*range(CALLS), CALLS):
                    self.operator.run(
                        inputs.x[k % CALLS],
                        inputs.residual[k % CALLS],
                        inputs.weight,
                        residual_out[k][: case["tokens"]],
                        norm_out[k][: case["tokens"]],
                        USE_ONESHOT[case["mode"]],
                    )

            self.judge(case, launch, self.inputs_of(index, case))
        return {}

    # -- graph -----------------------------------------------------------------------------------------------
    def graph(self) -> dict[str, Any]:
        from speed import capture

        for index, case in enumerate(self.config["cases"]):
            if case["kind"] != "graph":
                continue
            tokens, hidden, kind = case["tokens"], case["hidden"], TORCH_DTYPES[case["dtype"]]
            inputs = self.inputs_of(index, case)
            x, residual = torch.zeros(2, tokens, hidden, dtype=kind, device=self.device)
            outs = torch.empty(2, tokens, hidden, dtype=kind, device=self.device)

            def body(
                x: Any = x,
                residual: Any = residual,
                outs: Any = outs,
                inputs: Any = inputs,
                mode: str = case["mode"],
            ) -> None:
                self.operator.run(x, residual, inputs.weight, outs[0], outs[1], USE_ONESHOT[mode])

            recorded = capture(body)

            def launch(
                inputs: Any,
                residual_out: Any,
                norm_out: Any,
                x: Any = x,
                residual: Any = residual,
                outs: Any = outs,
                recorded: Any = recorded,
                tokens: int = tokens,
            ) -> None:
                for k in (*range(CALLS), CALLS):
                    x.copy_(inputs.x[k % CALLS])
                    residual.copy_(inputs.residual[k % CALLS])
                    outs.copy_(torch.stack((residual_out[k][:tokens], norm_out[k][:tokens])))  # the poison
                    recorded.replay()
                    residual_out[k][:tokens] = outs[0]
                    norm_out[k][:tokens] = outs[1]

            self.judge(case, launch, inputs)
        return {}

    # -- speed -----------------------------------------------------------------------------------------------
    def speed(self) -> dict[str, Any]:
        from speed import add_and_norm, time_case

        index = len(self.config["cases"])
        for hidden in self.config["hidden"]:
            for tokens in self.config["tokens"]:
                self.channel.beat(f"speed hidden={hidden} tokens={tokens}")
                index += 1
                found = time_case(
                    self.operator, self.groups, hidden, tokens, self.config["eps"], index, self.device
                )
                self.channel.send("speed", hidden=hidden, tokens=tokens, microseconds=found)
        return {"baseline": add_and_norm(self.config["eps"])[0]}


def drive(make: Callable[[dict[str, Any], int, Channel], Rank]) -> None:
    """Runs a rank to its end; never tears NCCL or shared memory down, which can block when a peer is gone."""
    rank = int(sys.argv[1])
    die_with_parent()
    channel = Channel()
    began = time.monotonic()
    try:
        make(read_config(), rank, channel).run()
        channel.send("done", seconds=time.monotonic() - began)
        code = 0
    except StageFailed as failed:
        channel.fail(failed.cause, str(failed))
        code = 3
    except BaseException as error:
        traceback.print_exc()
        channel.fail("exception", f"{type(error).__name__}: {str(error)[:600]}")
        code = 3
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    drive(lambda config, rank, channel: Rank(config, rank, channel, torch.device("cuda", rank)))
