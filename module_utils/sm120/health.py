"""Which state a server is in, and why: stopped, starting, warming, healthy, degraded, hung or crashed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .answer_check import judge
from .health_signs import Signs, Watch
from .http import KEY_REFUSED, Answer, Client
from .served_model import model_info, server_info

STOPPED = "stopped"
STARTING = "starting"
WARMING = "warming"
HEALTHY = "healthy"
DEGRADED = "degraded"
HUNG = "hung"
CRASHED = "crashed"

# The server itself waits 20 s for its scheduler before it answers 503: a shorter limit here would miss the
# answer.
LEAST_HEALTH_SECONDS = 21.0
# A 503 that comes sooner is the server's own word (starting, stopping), not a scheduler that does not answer.
OWN_WORD_SECONDS = 10.0
# A fatal line in the log is believed when /health has not answered well by then (it takes about one second).
LOG_GRACE_SECONDS = 3.0
# That long at least a server is waited for that was started longer ago than it may take.
GRACE_SECONDS = 60.0
BUSY_AFTER_SECONDS = 5.0
# After the fatal line the log may still say more.
SETTLE_SECONDS = 1.5
LOOK_SECONDS = 0.5
PAGE_SECONDS = 10.0


class AccessDenied(Exception):
    """The server does not accept the key."""


@dataclass(frozen=True)
class Question:
    """What to ask, and for how long."""

    generate_tokens: int = 32
    prompt: str = "The capital of France is"
    text_check: str = "strict"
    expect_text: str | None = None
    health_timeout_seconds: float = 25.0
    generate_timeout_seconds: float = 60.0


@dataclass
class Verdict:
    status: str
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)
    diagnosis: dict[str, Any] | None = None
    version: str | None = None
    model: str | None = None


class _Crash(Exception):
    """A sign of death, seen while waiting for an answer."""


class Checker:
    """Asks one server."""

    def __init__(self, client: Client, question: Question, *, unit: str | None, log: Path | None) -> None:
        self._client = client
        self._question = question
        self._unit = unit
        self._watch = Watch(client.address, unit, log, client.secrets)
        self._evidence: dict[str, Any] = {}
        self._work: tuple[float, int] | None = None

    def wait(self, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> Verdict:
        """Ask until the server is healthy, degraded or crashed, or the time is over.

        A unit's time begins with its start: one that has hung for days is not waited for as long as a start may take.
        """
        waiting_seconds = max(
            timeout_seconds - self._watch.active_seconds(clock), min(timeout_seconds, GRACE_SECONDS)
        )
        deadline = clock() + waiting_seconds
        idle_looks = 0
        while True:
            verdict = self.check()
            if verdict.status in (HEALTHY, DEGRADED, CRASHED):
                return verdict
            # A unit that is not even being started will not come up by itself; one look may fall into a
            # restart.
            idle_looks = idle_looks + 1 if verdict.status == STOPPED and self._unit else 0
            if idle_looks >= 5:
                return verdict
            if clock() >= deadline:
                hint = (
                    "; if it takes longer: timeout_seconds, in the roles sglang_server_start_timeout_seconds"
                )
                hint = hint if verdict.status in (STARTING, WARMING) else ""
                verdict.reason += f" (waited {waiting_seconds:.0f} s{hint})"
                return verdict
            time.sleep(1)

    def check(self) -> Verdict:
        """One look at everything, as deep as it gets."""
        self._evidence = {}
        self._work = None
        denied: AccessDenied | None = None
        try:
            status, reason = self._classify()
        except _Crash as crash:
            status, reason = CRASHED, str(crash)
        except AccessDenied as error:
            status, reason, denied = DEGRADED, str(error), error
        # Here and not with the cheap signs: it looks at what every process of the host has open.
        if status in (HEALTHY, DEGRADED) and (found := self._watch.stranger()):
            status = DEGRADED
            reason = (
                f"what answers is {found}, no process of this unit: stop it, or ask the unit's own address"
            )
            self._evidence["stranger"] = asdict(found)
        elif denied:
            raise denied
        verdict = Verdict(status, reason)
        if status in (CRASHED, HUNG, STOPPED):
            if status == CRASHED:
                time.sleep(SETTLE_SECONDS)
            self._watch.read_log()
            verdict.diagnosis = self._watch.diagnosis()
        if status in (HEALTHY, DEGRADED):
            verdict.version, verdict.model = self._names()
        if self._watch.log_read:
            self._evidence["log"] = self._watch.log_evidence()
        verdict.evidence = self._evidence
        return verdict

    def _classify(self) -> tuple[str, str]:
        signs = self._look()
        if signs.unit is not None:
            if not signs.unit.exists:
                return STOPPED, f"there is no unit {self._unit}"
            if signs.unit.stopped_on_request:
                return (
                    STOPPED,
                    f"unit {self._unit} was stopped (systemd calls it failed: {signs.unit.ending})",
                )
            if not signs.unit.running:
                return STOPPED, f"unit {self._unit} is {signs.unit.active} ({signs.unit.sub})"
        health = self._ask(
            lambda: self._client.get("/health", timeout_seconds=self._question.health_timeout_seconds),
            trust_log=True,
        )
        self._evidence["health"] = _shown(health)
        if health.status == 0 and health.error in ("refused", "dns", "tls", "other"):
            return self._unreachable(health, signs)
        if health.status == 503 and health.seconds < OWN_WORD_SECONDS:
            return WARMING, "the server answers 503 at once: it is still warming up, or shutting down"
        if not health.ok and health.status not in (0, 503):
            return STOPPED, f"/health answers {health.status}: this is no SGLang server"
        if not health.ok:
            return self._silent(health)
        return self._generate()

    def _look(self) -> Signs:
        """The cheap signs; raises _Crash when they are those of a dead server."""
        signs = self._watch.look()
        self._evidence |= signs.evidence()
        if signs.unit is not None and signs.unit.exists:
            if signs.unit.crashed:
                raise _Crash(
                    f"unit {self._unit} is {signs.unit.active} ({signs.unit.sub}): "
                    f"result {signs.unit.result}, {signs.unit.ending}"
                )
            if signs.restarted:
                raise _Crash(f"unit {self._unit} ended and was started anew ({signs.unit.restarts} restarts)")
        if signs.dead:
            names = ", ".join(f"{p.name} (pid {p.pid})" for p in signs.dead)
            raise _Crash(f"{names} ended and the parent {signs.pid} lives on without it")
        return signs

    def _ask(self, question: Callable[[], Answer], *, trust_log: bool) -> Answer:
        """Ask in the background and watch the cheap signs meanwhile: a crash ends the wait, not the limit."""
        answers: list[Answer] = []
        asker = threading.Thread(target=lambda: answers.append(question()), daemon=True)
        begun = time.monotonic()
        known = self._watch.scanner.fatal if not trust_log else None
        asker.start()
        while True:
            asker.join(LOOK_SECONDS)
            if not asker.is_alive():
                break
            waited = time.monotonic() - begun
            if waited < LOG_GRACE_SECONDS:
                continue
            self._look()
            self._watch.read_log()
            fatal = self._watch.scanner.fatal
            if fatal is not None and fatal is not known:
                raise _Crash(f"the log says: {fatal.line}")
            if waited > BUSY_AFTER_SECONDS and self._work is None:
                self._work = self._work_done()
        answer = answers[0] if answers else Answer(0, b"", time.monotonic() - begun, "other", "no answer")
        if not answer.ok:
            # What it did may have killed it: one more look before anything is concluded.
            if answer.error in ("reset", "refused"):
                time.sleep(LOOK_SECONDS)
            self._look()
            self._watch.read_log()
            fatal = self._watch.scanner.fatal
            if fatal is not None and fatal is not known:
                raise _Crash(f"the log says: {fatal.line}")
        return answer

    def _unreachable(self, health: Answer, signs: Signs) -> tuple[str, str]:
        where = f"{self._client.address.netloc}: {health.error} ({health.detail})"
        if health.error in ("dns", "tls"):
            return STOPPED, where
        if signs.unit is not None:
            return STARTING, f"unit {self._unit} is {signs.unit.active}, nothing listens yet on {where}"
        last = self._watch.last_word()
        if last is not None:
            return CRASHED, f"nothing listens on {where}, and the log ends with: {last.line}"
        if signs.ended is not None:
            return CRASHED, f"nothing listens on {where}, and {signs.ended}"
        if self._watch.log_is_fresh():
            return STARTING, f"the log is being written, nothing listens yet on {where}"
        return STOPPED, f"nothing listens on {where}"

    def _silent(self, health: Answer) -> tuple[str, str]:
        """/health did not answer, or 503 after its own wait."""
        if health.error == "reset":
            return HUNG, f"/health broke off: {health.detail}"
        stopped = self._watch.look().stopped
        if stopped:
            names = ", ".join(f"{p.name} (pid {p.pid})" for p in stopped)
            return HUNG, f"{names} is stopped by a signal or a debugger (kill -CONT lets it go on)"
        if self._worked():
            return HEALTHY, "busy: /health had no turn, but tokens are being made; generation was not checked"
        said = "503" if health.status == 503 else "nothing"
        return HUNG, f"/health said {said} for {health.seconds:.0f} s: the scheduler does not answer"

    def _generate(self) -> tuple[str, str]:
        asked = self._question
        body = {
            "text": asked.prompt,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": asked.generate_tokens,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        answer = self._ask(
            lambda: self._client.post("/generate", body, timeout_seconds=asked.generate_timeout_seconds),
            trust_log=False,
        )
        self._evidence["generation"] = _shown(answer)
        if answer.status == 401:
            raise AccessDenied(f"the server answers 401: {KEY_REFUSED}")
        if answer.status == 0:
            if answer.error == "timeout" and self._worked():
                return HEALTHY, "busy: the generation had no turn in time, but tokens are being made"
            if answer.error == "refused":
                raise _Crash("the server went away between /health and a generation")
            if answer.error == "reset":
                return self._broken_off(answer)
            return HUNG, (
                f"/health is well, but a generation of {asked.generate_tokens} tokens ended without an "
                f"answer after {answer.seconds:.0f} s ({answer.error}: {answer.detail})"
            )
        if not answer.ok:
            said = self._client.redact(answer.text())
            return DEGRADED, f"/generate answers {answer.status}: {said}"
        faults, seen = judge(
            answer.json(),
            tokens_wanted=asked.generate_tokens,
            check=asked.text_check,
            expect_text=asked.expect_text,
        )
        self._evidence["generation"] |= seen
        if faults:
            return DEGRADED, "; ".join(faults)
        return HEALTHY, f"generated {seen.get('completion_tokens')} tokens in {answer.seconds:.2f} s"

    def _broken_off(self, answer: Answer) -> tuple[str, str]:
        """The connection ended in the middle of an answer: is anybody still there?"""
        again = self._client.get("/health", timeout_seconds=self._question.health_timeout_seconds)
        if again.error == "refused":
            raise _Crash("the server went away in the middle of a generation")
        return DEGRADED, f"the connection broke off in the middle of a generation: {answer.detail}"

    def _work_done(self) -> tuple[float, int]:
        """Counters that only a working scheduler moves."""
        total = 0.0
        page = self._client.get("/metrics", timeout_seconds=PAGE_SECONDS)
        if page.ok:
            for line in page.body.decode("utf-8", "replace").splitlines():
                if line.startswith(("sglang:generation_tokens_total", "sglang:prompt_tokens_total")):
                    total += float(line.rsplit(" ", 1)[1])
        return total, self._watch.work_lines

    def _worked(self) -> bool:
        if self._work is None:
            return False
        now = self._work_done()
        self._evidence["work"] = {
            "tokens": now[0] - self._work[0],
            "batches_logged": now[1] - self._work[1],
        }
        return now != self._work

    def _names(self) -> tuple[str | None, str | None]:
        info = model_info(self._client, PAGE_SECONDS).json()
        model = info.get("model_path") if isinstance(info, dict) else None
        version = server_info(self._client, PAGE_SECONDS).get("version")
        return version, model


def _shown(answer: Answer) -> dict[str, Any]:
    return {"status": answer.status, "seconds": round(answer.seconds, 3), "error": answer.error}
