"""Case matrix and rank arithmetic at 2, 4, 8 and 16 ranks."""

from __future__ import annotations

import pytest
from ansible.module_utils.sm120.probe_cases import (
    CALLS,
    DTYPES,
    HIDDEN,
    LAMPORT_BUFFERS,
    MODES,
    TOKENS,
    feasible,
    matrix,
    seed_of,
    workspace_bytes,
)


# 4 hidden sizes x 2 types x (11 auto + 11 one-shot + token counts above the number of ranks)
@pytest.mark.parametrize(("ranks", "cases"), [(2, 248), (4, 240), (8, 232), (16, 224)])
def test_every_combination_is_in_the_matrix_once(ranks: int, cases: int) -> None:
    found = matrix("eager", ranks, HIDDEN, TOKENS, DTYPES, MODES)
    assert len(found) == cases
    assert len({case.name for case in found}) == cases
    assert {case.tokens for case in found if case.mode == "two_shot"} == {t for t in TOKENS if t > ranks}


def test_two_shot_needs_more_tokens_than_ranks() -> None:
    assert not feasible("two_shot", 8, 8)
    assert feasible("two_shot", 9, 8)
    assert all(feasible(mode, 1, 8) for mode in ("auto", "one_shot"))


def test_each_rank_and_case_has_data_of_its_own() -> None:
    seeds = {seed_of(1, index, rank) for index in range(300) for rank in (*range(16), 63)}
    assert len(seeds) == 300 * 17


def test_workspace_of_glm_at_eight_ranks() -> None:
    # 8 x 2048 x 6144 x 2 bytes = 192 MiB staging, 2 MiB of flags (rounded up), three Lamport buffers
    assert workspace_bytes(8, 2048, 6144) == (192 + 2 + 3 * 192) << 20


def test_lamport_buffers_stop_growing_at_the_int32_cap() -> None:
    assert workspace_bytes(16, 16384, 8192) == (4096 + 2 + 3 * 2046) << 20


def test_each_lamport_buffer_is_met_again() -> None:
    assert CALLS > LAMPORT_BUFFERS
