"""One probe from settings to report: environment, build, ranks, verdict."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .gpu_facts import SMI_QUERIES, Host, processes
from .probe_call import (
    SOURCE,
    FusionCall,
    UnknownCall,
    aot_lacks_sm120,
    arch_list,
    call_without_sglang,
    nvcc_arch,
    parse_call,
)
from .probe_cases import RANKS, Case, matrix
from .probe_report import (
    BUILD_STAGES,
    PLAY,
    STAGES,
    Stage,
    case_rows,
    merge_groups,
    next_step,
    speed_rows,
    speed_summary,
    verdict,
)
from .probe_run import MEMORY_WAIT_SECONDS, Account, Job, gpu_table, run_group, wait_memory_free
from .probe_watch import Failure, Watch

FAULTS = (
    "none",
    "wrong_scale",
    "missing_residual",
    "garbage_row",
    "unwritten_row",
    "moving_error",
    "absent_rank",
    "crashed_rank",
)
GRAPH_MODES = ("auto",)
# What of the server's environment bears on the probe's outcome; of that, not what only says more about it.
BEARS = re.compile(
    r"(NCCL|CUDA|NVCC|FLASHINFER|TORCH|PYTORCH|NVSHMEM|GLOO|TVM_FFI)_|SGLANG_.*(ALL_?REDUCE|FUSION|SYMM|P2P)"
    r"|(HOME|PATH|PYTHONPATH|LD_PRELOAD|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|CC|CXX)$"
)
TELLS = re.compile(r"NCCL_DEBUG|.*_LOG")


@dataclass
class Settings:
    python: str
    program: Path  # folder of the probe program
    work: Path  # working folder and rendezvous, writable by the account
    logs: Path  # not writable by the account: root opens the logs
    account: Account
    environment: dict[str, str]  # the server's own
    ranks: int
    groups: int = 1  # of so many ranks each, one after the other
    stages: tuple[str, ...] = STAGES
    hidden: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    capability: str = "12.0"
    eps: float = 1e-6
    seed: int = 1
    fault: str = "none"
    max_slowdown: float = 3.0
    timeout_seconds: float = 5400
    stage_limits: dict[str, float] = field(default_factory=dict)
    step_factor: float = 1.0
    rank_program: str = "rank.py"
    worker_options: dict[str, Any] = field(default_factory=dict)


# The first import from a network disk is slow.
FACTS_SECONDS = 120


class ProbeError(Exception):
    """The probe cannot even start: what is wrong and what to do."""


def environment_facts(settings: Settings) -> dict[str, Any]:
    """Versions and folders of the venv, asked for by the service user itself."""
    try:
        done = subprocess.run(
            [settings.python, str(settings.program / "facts.py")],
            capture_output=True,
            text=True,
            check=False,
            timeout=FACTS_SECONDS,
            cwd=settings.work,
            env=settings.environment,
            **settings.account.process_options(),
        )
    except OSError as error:
        raise ProbeError(
            f"{settings.python} cannot be run: {error.strerror}. Run: {PLAY}runtime.yml"
        ) from None
    except subprocess.TimeoutExpired:
        raise ProbeError(
            f"{settings.python} told nothing about its packages in {FACTS_SECONDS} s as {settings.account.name}: "
            "look whether its file system hangs"
        ) from None
    if done.returncode:
        raise ProbeError(
            f"{settings.python} ended with {done.returncode} as {settings.account.name}: {done.stderr[-600:]}"
        )
    try:
        facts: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise ProbeError(
            f"{settings.python} told no facts as {settings.account.name} but {done.stdout[-300:]!r}: something prints "
            "when it starts (a .pth file, sitecustomize)"
        ) from None
    return facts


def fusion_call(facts: Mapping[str, Any]) -> FusionCall:
    packages = facts["packages"]
    if "flashinfer-python" not in packages:
        raise ProbeError(f"flashinfer-python is not installed in this environment. Run: {PLAY}runtime.yml")
    root = packages.get("sglang", {}).get("root", "")
    if not root:
        return call_without_sglang(packages["flashinfer-python"]["version"])
    source = Path(root) / SOURCE
    try:
        return parse_call(source.read_text(encoding="utf-8"))
    except (OSError, UnknownCall) as error:
        raise ProbeError(
            f"cannot tell how SGLang {packages['sglang']['version']} calls the fused all-reduce "
            f"({source}): {error}"
        ) from None


def cases_of(settings: Settings) -> list[Case]:
    cases = matrix("eager", settings.ranks, settings.hidden, settings.tokens, settings.dtypes, settings.modes)
    return cases + matrix(
        "graph", settings.ranks, settings.hidden, settings.tokens, settings.dtypes[:1], GRAPH_MODES
    )


def key_of(
    settings: Settings, facts: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], digest: str
) -> str:
    """A verdict holds for exactly this: packages, gates, driver, cards, program, and what was asked."""
    program = hashlib.sha256()
    for path in sorted(settings.program.rglob("*.py")):
        program.update(path.name.encode() + path.read_bytes())
    parts = {
        "facts": facts,
        "gates": digest,
        "gpus": [[gpu["uuid"], gpu["driver"]] for gpu in gpus],
        "program": program.hexdigest(),
        "environment": {
            name: value
            for name, value in settings.environment.items()
            if BEARS.match(name) and not TELLS.match(name)
        },
        "asked": [
            settings.ranks,
            settings.groups,
            settings.stages,
            settings.hidden,
            settings.tokens,
            settings.dtypes,
            settings.modes,
        ],
        "more": [settings.eps, settings.capability, settings.max_slowdown, settings.account.name],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def visible(environment: Mapping[str, str], gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """The GPUs that the server's processes see, in their order; none where the driver shows none."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None or not gpus:
        return [str(number) for number in range(len(gpus))]
    return [each.strip() for each in named.split(",") if each.strip()]


def units_on_gpus(host: Host) -> list[str]:
    """The servers' units that have processes on the GPUs. Of others nobody knows here whether they may be stopped."""
    code, text = host.run(["nvidia-smi", *SMI_QUERIES["processes"]])
    found = processes(host, text) if code == 0 else []
    return sorted({process["unit"] for process in found if (process["unit"] or "").startswith("sglang-")})


class Probe:
    def __init__(self, settings: Settings, facts: Mapping[str, Any], announce: Callable[[str], None]) -> None:
        self.settings, self.facts, self.announce = settings, facts, announce
        self.call = fusion_call(facts)
        self.stages = {name: Stage(name, detail="not asked for") for name in STAGES}
        self.wanted = settings.stages
        self.failures: list[Failure] = []
        self.groups: list[dict[str, Any]] = []
        self.cases: list[dict[str, Any]] = []
        self.speed: list[dict[str, Any]] = []
        self.speed_summary: dict[str, Any] = {}
        self.memory_held: list[str] = []

    def run(self) -> dict[str, Any]:
        began, settings = time.time(), self.settings
        gpus = gpu_table(settings.environment)
        build = [name for name in BUILD_STAGES if name in settings.stages]
        compute = [name for name in STAGES if name in settings.stages and name not in BUILD_STAGES]
        if build:
            self._build(build, bool(gpus))
        seen = visible(settings.environment, gpus)
        if compute and not self.failures:
            if settings.ranks < RANKS[0]:
                self._leave_out(compute, "one rank: there is nothing to reduce")
            elif len(seen) < settings.ranks * settings.groups and settings.rank_program == "rank.py":
                self._too_few(compute, gpus, seen)
            else:
                self._compute_all(compute, gpus, seen)
        first = self.failures[0] if self.failures else None
        holders = units_on_gpus(Host()) if first and first.cause == "memory" else []
        for stage in self.stages.values():
            if first and stage.status == "not_run" and stage.name in settings.stages:
                stage.detail = f"stage {first.stage} failed before"
        return {
            "verdict": verdict(self.stages.values(), self.wanted),
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "seconds": round(time.time() - began, 1),
            "ranks": settings.ranks,
            "groups": settings.groups,
            "fault": settings.fault,
            "failure": None
            if first is None
            else {**vars(first), "next": next_step(first.stage, first.cause, holders)},
            "stages": [stage.as_dict() for stage in self.stages.values()],
            "call": self.call.as_dict(),
            "cases": self.cases,
            "case_table": case_rows(cases_of(self.settings), self.cases),
            "speed": {"rows": self.speed, **self.speed_summary},
            "gpus": gpus,
            "environment": self.facts,
            "processes": self.groups,
            "memory_held": self.memory_held,
        }

    def _leave_out(self, compute: Sequence[str], why: str) -> None:
        """Said, never passed."""
        for name in compute:
            self.stages[name].detail = why
        self.wanted = tuple(name for name in self.wanted if name in BUILD_STAGES)

    def _too_few(
        self, compute: Sequence[str], gpus: Sequence[Mapping[str, Any]], seen: Sequence[str]
    ) -> None:
        cause, found = "ranks", f"{len(gpus)} GPUs on this host"
        if len(seen) < len(gpus):
            named = self.settings.environment["CUDA_VISIBLE_DEVICES"]
            cause = "visible"
            found = f"{len(seen)} GPUs visible (CUDA_VISIBLE_DEVICES={named}) of {len(gpus)}"
        text = f"{found}, {self.settings.ranks * self.settings.groups} wanted"
        self._leave_out(compute, text)
        if seen:
            self.failures.append(Failure(compute[0], cause, text))
            self.stages[compute[0]].status = "failed"

    def _fail_afterwards(self, last: str, cause: str, text: str) -> None:
        """Of the stage that failed; where none did, of the last one."""
        stage = next((each for each in self.stages.values() if each.status == "failed"), self.stages[last])
        stage.status, stage.detail = "failed", "; ".join(filter(None, (stage.detail, text)))
        self.failures.append(Failure(stage.name, cause, text))

    def _build(self, stages: Sequence[str], has_gpus: bool) -> None:
        settings, flashinfer = self.settings, self.facts["packages"]["flashinfer-python"]["version"]
        wanted = arch_list(settings.capability, flashinfer)
        environment = dict(settings.environment)
        if not has_gpus:
            environment.setdefault("FLASHINFER_CUDA_ARCH_LIST", wanted)
        entries = environment.get("FLASHINFER_CUDA_ARCH_LIST", wanted).split()
        config = {
            "stages": list(stages),
            "architectures": [nvcc_arch(entry) for entry in entries],
            "refuse_aot": aot_lacks_sm120(settings.capability, flashinfer),
        }
        watch = Watch(1, stages, time.monotonic(), settings.stage_limits, settings.step_factor)
        self._group("build.py", 1, config, environment, watch, "build")

    def _compute_all(
        self, stages: Sequence[str], gpus: Sequence[Mapping[str, Any]], seen: Sequence[str]
    ) -> None:
        settings, speeds = self.settings, []
        for group in range(settings.groups):
            mine = ",".join(seen[group * settings.ranks : (group + 1) * settings.ranks])
            watch = self._compute(
                stages, {"CUDA_VISIBLE_DEVICES": mine} if settings.groups > 1 else {}, group
            )
            self.cases += [{**case, "gpus": mine} for case in watch.cases()]
            speeds.append(watch.speed())
            if self.failures:
                if settings.groups > 1:
                    self.failures[0].text = f"GPUs {mine}: {self.failures[0].text}"
                break
        self.speed = speed_rows(merge_groups(speeds))
        self.speed_summary = speed_summary(self.speed, settings.max_slowdown)
        stage = self.stages.get("speed")
        if stage and stage.status == "passed" and self.speed_summary["too_slow"]:
            stage.status, stage.detail = "failed", self.speed_summary["too_slow"][0]
            self.failures.append(Failure("speed", "slow", stage.detail))
        wait = MEMORY_WAIT_SECONDS if gpus else 0.0
        self.memory_held = wait_memory_free(gpus, lambda: gpu_table(settings.environment), wait)
        if self.memory_held:
            text = f"GPU memory is not free again: {'; '.join(self.memory_held)}"
            self._fail_afterwards(stages[-1], "memory", text)

    def _compute(self, stages: Sequence[str], more: Mapping[str, str], group: int) -> Watch:
        settings = self.settings
        rendezvous = settings.work / "rendezvous"
        rendezvous.unlink(missing_ok=True)  # a file store that another run left would pair us with its ranks
        cases = cases_of(settings)
        config = {
            "ranks": settings.ranks,
            "stages": list(stages),
            "rendezvous": f"file://{rendezvous}",
            "call": self.call.as_dict(),
            "cases": [case.as_dict() for case in cases],
            "hidden": list(settings.hidden),
            "tokens": list(settings.tokens),
            "eps": settings.eps,
            "seed": settings.seed,
            "fault": settings.fault,
            **settings.worker_options,
        }
        # All ranks are on this host, whose name need not resolve for gloo.
        environment = {"GLOO_SOCKET_IFNAME": "lo", **settings.environment, **more}
        watch = Watch(
            settings.ranks,
            stages,
            time.monotonic(),
            settings.stage_limits,
            settings.step_factor,
            [case.name for case in cases],
        )
        name = f"compute-group{group}" if more else "compute"
        self._group(settings.rank_program, settings.ranks, config, environment, watch, name)
        return watch

    def _group(
        self,
        program: str,
        ranks: int,
        config: Mapping[str, Any],
        environment: Mapping[str, str],
        watch: Watch,
        name: str,
    ) -> None:
        settings = self.settings
        job = Job(
            name,
            (settings.python, "-u", str(settings.program / program)),
            ranks,
            config,
            environment,
            settings.account,
            settings.work,
            settings.logs,
            settings.timeout_seconds,
        )
        found = run_group(job, watch, self.announce)
        self.groups.append(found)
        for stage in watch.stages.values():
            stage.seconds += self.stages[stage.name].seconds  # of the groups before
            self.stages[stage.name] = stage
        first = watch.first_failure()
        if first is not None:
            self.failures += [first, *(failure for failure in watch.failures if failure is not first)]
        if found["pids_left"]:
            text = f"processes {found['pids_left']} did not end after SIGKILL: see dmesg"
            self._fail_afterwards(list(watch.stages)[-1], "hang", text)
