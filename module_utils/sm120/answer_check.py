"""Is a generated answer one of a working model? Counts and text, without knowing the model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
REPLACEMENT_SHARE = 0.2
# One token repeated this often is a stuck model; a shorter run happens in honest text ("----").
REPEATED_TOKENS = 8


def judge(
    answer: Any, *, tokens_wanted: int, check: str, expect_text: str | None = None
) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with a /generate answer (nothing: an empty list), and what was looked at."""
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        return ["the answer of /generate holds no meta_info"], {}
    meta = answer["meta_info"]
    text, ids = str(answer.get("text") or ""), list(answer.get("output_ids") or [])
    finish = (meta.get("finish_reason") or {}).get("type")
    seen = {"text": text[:200], "completion_tokens": meta.get("completion_tokens"), "finish_reason": finish}
    if check == "off":
        return [], seen
    wrong = []
    if meta.get("completion_tokens") != tokens_wanted:
        wrong.append(f"{meta.get('completion_tokens')} tokens instead of {tokens_wanted} (finish: {finish})")
    if finish == "abort":
        wrong.append("the server aborted the request")
    if check == "strict":
        wrong += _text_faults(text, ids)
    wrong += _logprob_faults(meta.get("output_token_logprobs"))
    if expect_text is not None and not re.search(expect_text, text):
        wrong.append(f"the text does not match {expect_text!r}")
    return wrong, seen


def _text_faults(text: str, ids: Sequence[Any]) -> list[str]:
    faults = []
    if not text.strip():
        faults.append("the text is empty")
    elif text.count(REPLACEMENT) > max(1, REPLACEMENT_SHARE * len(text)):
        faults.append(f"{text.count(REPLACEMENT)} of {len(text)} characters are not text")
    if len(ids) >= REPEATED_TOKENS and len(set(ids)) == 1:
        faults.append(f"one token ({ids[0]}) repeated {len(ids)} times")
    elif not ids and len(text) >= 2 * REPEATED_TOKENS and len(set(text.replace(" ", ""))) == 1:
        faults.append(f"one character repeated {len(text)} times")
    return faults


def _logprob_faults(logprobs: Any) -> list[str]:
    """SGLang writes NaN as null; every chosen token must have a finite log probability."""
    if not isinstance(logprobs, list):
        return []
    bad = sum(1 for entry in logprobs if isinstance(entry, list) and entry and not _finite(entry[0]))
    return [f"{bad} of {len(logprobs)} log probabilities are not numbers (NaN)"] if bad else []


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
