"""The supervisor's book-keeping: what each rank last said, which limit it broke. The clock is passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .probe_report import Stage, merge_case, merge_speed

# Whole stage, and longest silence within one step of it. The build's silence is its own heartbeat's affair.
STAGE_LIMIT_SECONDS: dict[str, float] = {
    "toolchain": 360,
    "jit": 3600,
    "nccl": 60,
    "workspace": 180,
    "numbers": 900,
    "graph": 600,
    "speed": 600,
}
STEP_LIMIT_SECONDS: dict[str, float] = {
    "toolchain": 330,
    "jit": 120,
    "nccl": 45,
    "workspace": 90,
    "numbers": 25,
    "graph": 25,
    "speed": 60,
}
START_LIMIT_SECONDS = 120.0  # interpreter and `import torch` from a cold disk
WAITING = "waiting for"
PEERS_SECONDS = 3.0  # after one rank's failure the others may still say why


@dataclass
class RankState:
    stage: str = "start"
    stage_since: float = 0.0
    word_at: float = 0.0
    case: str = ""
    finished: bool = False
    ended: set[str] = field(default_factory=set)

    @property
    def where(self) -> str:
        return self.case or f"stage {self.stage}"

    @property
    def waiting(self) -> bool:
        """It said that it waits for its peers, so the hang is another's."""
        return WAITING in self.case


@dataclass
class Failure:
    stage: str
    cause: str
    text: str
    rank: int | None = None
    case: str = ""


class Watch:
    """Fed with messages and the time; tells what failed. One for each group of processes."""

    def __init__(
        self,
        ranks: int,
        stages: Sequence[str],
        now: float,
        limits: Mapping[str, float],
        step_factor: float = 1.0,
        planned: Sequence[str] = (),
    ) -> None:
        self.began = now
        self.ranks = {rank: RankState(stage_since=now, word_at=now) for rank in range(ranks)}
        self.stages = {name: Stage(name) for name in stages}
        self.limits = {**STAGE_LIMIT_SECONDS, **limits}
        self.step_factor = step_factor
        self.planned = planned  # names of the cases to come
        self.failures: list[Failure] = []
        self.failed_at: float | None = None
        self.case_reports: dict[str, dict[int, Mapping[str, Any]]] = {}
        self.speed_reports: dict[tuple[int, int], dict[int, Mapping[str, float]]] = {}
        self.news: list[str] = []

    def feed(self, rank: int, message: Mapping[str, Any], now: float) -> None:
        state, kind = self.ranks[rank], message["t"]
        state.word_at = now
        if kind == "begin":
            state.stage, state.stage_since, state.case = str(message["stage"]), now, ""
        elif kind == "beat":
            state.case = str(message["case"])
        elif kind == "end":
            self._end(rank, state, message, now)
        elif kind == "case":
            self.case_reports.setdefault(str(message["case"]), {})[rank] = message
        elif kind == "speed":
            key = int(message["hidden"]), int(message["tokens"])
            self.speed_reports.setdefault(key, {})[rank] = message["microseconds"]
        elif kind == "fail":
            self.fail(
                Failure(state.stage, str(message["cause"]), str(message["text"]), rank, state.case), now
            )
        elif kind == "done":
            state.finished = True

    def _end(self, rank: int, state: RankState, message: Mapping[str, Any], now: float) -> None:
        stage = self.stages[state.stage]
        state.ended.add(state.stage)
        facts = {k: v for k, v in message.items() if k not in ("t", "stage")}
        if rank == 0:
            stage.facts = facts
        if all(state.stage in other.ended for other in self.ranks.values()):
            stage.seconds = now - state.stage_since
            stage.status = "passed"
            self._judge(stage, now)
            self.news.append(
                f"stage {stage.name} {stage.status} after {stage.seconds:.1f} s {stage.detail}".rstrip()
            )

    def _judge(self, stage: Stage, now: float) -> None:
        if stage.name not in ("numbers", "graph"):
            return
        kind = "eager" if stage.name == "numbers" else "graph"
        found = [case for case in self.cases() if str(case["name"]).startswith(kind)]
        bad = [case for case in found if not case["ok"]]
        names = {str(case["name"]) for case in found}
        lacking = [name for name in self.planned if name.startswith(kind) and name not in names]
        stage.detail = f"{len(found) - len(bad)} of {len(found) + len(lacking)} cases right"
        if bad:
            text = f"{stage.detail}; {bad[0]['name']}: {'; '.join(bad[0]['problems'][:3])}"
            self.fail(Failure(stage.name, "wrong_numbers", text, case=str(bad[0]["name"])), now)
        elif lacking or not found:
            why = f"not told by all ranks: {lacking[0]}" if lacking else "nothing was computed"
            stage.detail, text = "", f"{stage.detail}; {why}"
            self.fail(Failure(stage.name, "cases_lacking", text), now)

    def fail(self, failure: Failure, now: float) -> None:
        self.failures.append(failure)
        self.failed_at = self.failed_at if self.failed_at is not None else now
        stage = self.stages.get(failure.stage) or next(iter(self.stages.values()))
        stage.status = "failed"
        stage.detail = stage.detail if stage.detail and failure.cause != "wrong_numbers" else failure.text

    def exited(self, rank: int, code: int, now: float) -> None:
        """The process is gone without having said `done` or `fail`."""
        state = self.ranks[rank]
        if state.finished or any(f.rank == rank for f in self.failures):
            return
        how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        where = f" in {state.case}" if state.case else ""
        self.fail(Failure(state.stage, "crash", f"rank {rank} {how}{where}", rank, state.case), now)

    def check(self, now: float, total_seconds: float) -> None:
        """Limits, unless something failed already."""
        if self.failures:
            return
        busy = {r: s for r, s in self.ranks.items() if not s.finished and s.stage not in s.ended}
        # Who has started waits for who has not: while there is one of these, only its limit counts.
        busy = {r: s for r, s in busy.items() if s.stage == "start"} or busy
        for rank, state in busy.items():
            limit = START_LIMIT_SECONDS if state.stage == "start" else self.limits[state.stage]
            if now - state.stage_since > limit:
                text = f"rank {rank}: stage {state.stage} is over its limit of {limit:.0f} s"
                self.fail(Failure(state.stage, "time_limit", text, rank, state.case), now)
                return
            step = self.step_factor * STEP_LIMIT_SECONDS.get(state.stage, limit)
            if now - state.word_at > step:
                self.fail(self._hang(busy, now), now)
                return
        if busy and now - self.began > total_seconds:
            failure = self._hang(busy, now)
            failure.cause = "time_limit"
            failure.text = f"the whole probe is over its limit of {total_seconds:.0f} s; {failure.text}"
            self.fail(failure, now)

    def _hang(self, busy: Mapping[int, RankState], now: float) -> Failure:
        """Blames the rank that did not come to where the others wait; of several, the one silent longest."""
        rank = min(busy, key=lambda r: (busy[r].waiting, busy[r].word_at))
        state = busy[rank]
        others = "; ".join(f"rank {r}: {s.where}" for r, s in self.ranks.items() if r != rank)
        text = f"hang: rank {rank} silent for {now - state.word_at:.0f} s in {state.where}"
        return Failure(state.stage, "hang", text + (f" ({others})" if others else ""), rank, state.case)

    def first_failure(self) -> Failure | None:
        """The cause, not what followed: peers of a crashed rank raise their own errors, sometimes sooner."""
        return min(self.failures, key=lambda f: f.cause != "crash", default=None)

    def over(self, now: float) -> bool:
        if self.failed_at is not None and now - self.failed_at >= PEERS_SECONDS:
            return True
        return all(state.finished for state in self.ranks.values())

    def cases(self) -> list[dict[str, Any]]:
        whole = ((n, r) for n, r in self.case_reports.items() if len(r) == len(self.ranks))
        return [{"name": name, **merge_case(reports)} for name, reports in whole]

    def speed(self) -> dict[tuple[int, int], dict[str, float]]:
        whole = ((k, r) for k, r in self.speed_reports.items() if len(r) == len(self.ranks))
        return {key: merge_speed(reports) for key, reports in whole}
