"""Greedy answers of two sides, compared token by token: equal, different by a hair, or different."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Two tokens whose log probabilities lie closer than this are a tie: another order of the same sums may
# choose either.
TIE_NATS = 0.2


@dataclass(frozen=True)
class Answer:
    """One greedy answer: its tokens, and per token the best candidates as (log probability, token)."""

    tokens: tuple[int, ...]
    candidates: tuple[tuple[tuple[float, int], ...], ...] = ()


def answer_of(generated: dict[str, Any]) -> Answer:
    """From /generate with return_logprob and top_logprobs_num."""
    top = generated.get("meta_info", {}).get("output_top_logprobs") or []
    return Answer(
        tuple(generated.get("output_ids") or ()),
        tuple(tuple((float(one[0]), int(one[1])) for one in entry if one[0] is not None) for entry in top),
    )


def first_difference(off: Answer, on: Answer) -> int | None:
    """The position of the first token that differs; None when both are the same."""
    for position, (left, right) in enumerate(zip(off.tokens, on.tokens, strict=False)):
        if left != right:
            return position
    return None if len(off.tokens) == len(on.tokens) else min(len(off.tokens), len(on.tokens))


def is_tie(off: Answer, on: Answer, position: int, tie_nats: float = TIE_NATS) -> bool:
    """Did the off side itself find the on side's token as good as its own? After that the answers may
    part."""
    if position >= min(len(off.tokens), len(on.tokens), len(off.candidates)):
        return False
    scores = {token: score for score, token in off.candidates[position]}
    ours, theirs = scores.get(off.tokens[position]), scores.get(on.tokens[position])
    return ours is not None and theirs is not None and abs(ours - theirs) <= tie_nats


@dataclass(frozen=True)
class Parting:
    """Where the two answers to a prompt part; both counted from 1."""

    prompt: int
    token: int

    def __str__(self) -> str:
        return f"prompt {self.prompt} from token {self.token} on"


def difference(
    off: Sequence[Answer], on: Sequence[Answer], tie_nats: float = TIE_NATS
) -> tuple[str | None, list[Parting]]:
    """(what speaks against the on side, or None; the partings that a tie explains)."""
    if not off or len(off) != len(on):
        return f"{len(off)} answers off, {len(on)} on", []
    wrong: list[Parting] = []
    explained: list[Parting] = []
    for number, (left, right) in enumerate(zip(off, on, strict=True), start=1):
        position = first_difference(left, right)
        if position is not None:
            kind = explained if is_tie(left, right, position, tie_nats) else wrong
            kind.append(Parting(number, position + 1))
    if not wrong:
        return None, explained
    where = ", ".join(map(str, wrong[:5]))
    return f"{len(wrong)} of {len(off)} greedy answers differ where the model was sure: {where}", explained


def say_partings(explained: Sequence[Parting]) -> str:
    return (
        f"greedy answers part at a tie, where the off side held both tokens to be as good: "
        f"{', '.join(map(str, explained))}"
    )
