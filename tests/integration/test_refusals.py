"""Files that are not what they should be: refused with the file and both hashes, before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hosts import COMMUNICATOR, STATE, Host, Run

ANCHOR = "^    is_sm100_supported,$"
ALTERATIONS = {
    "an altered line": "s/^import logging$/import logging as logging/",
    "a missing anchor": f"/{ANCHOR}/d",
    "a doubled anchor": f"/{ANCHOR}/p",
}


@pytest.fixture(scope="module")
def host(make_host: Any) -> Host:
    made: Host = make_host("refusal", 2)
    made.sh(f"cp -p {COMMUNICATOR} /delivered.py")
    return made


@pytest.fixture
def pristine(host: Host) -> Iterator[str]:
    yield host.sha256("/delivered.py")
    host.sh(f"cp -p /delivered.py {COMMUNICATOR}")


def alter(host: Host, expression: str) -> str:
    before = host.sha256(COMMUNICATOR)
    host.sh(f"sed -i '{expression}' {COMMUNICATOR}")
    after = host.sha256(COMMUNICATOR)
    assert after != before
    return after


def assert_refused(run: Run, *named: str) -> None:
    assert run.rc == 2, run.stdout
    assert run.changed == 0
    assert run.failed_tasks() == ["Refuse what is not understood, with nothing touched"]
    assert [name for name in named if name not in run.failures()[0]] == []


@pytest.mark.parametrize("case", ALTERATIONS)
def test_a_file_changed_by_hand_is_refused(host: Host, pristine: str, case: str) -> None:
    found = alter(host, ALTERATIONS[case])
    snapshot = host.snapshot()
    assert_refused(host.play(), COMMUNICATOR, pristine, found)
    assert host.snapshot() == snapshot
    assert host.differing() == {"sglang/srt/layers/communicator.py"}
    assert not host.exists(STATE)


def test_a_file_changed_after_our_edit_is_kept(host: Host, pristine: str) -> None:
    run = host.play(playbook="playbooks/gates.yml")
    assert run.rc == 0, run.stdout
    ours = host.sha256(COMMUNICATOR)
    found = alter(host, "$a # a note")
    snapshot, differing = host.snapshot(), host.differing()
    assert len(differing) == 6
    for options in (("--tags", "revert"), ()):
        assert_refused(host.play(*options), COMMUNICATOR, pristine, ours, found)
        assert host.snapshot() == snapshot
        assert host.differing() == differing
    host.sh(f"sed -i '$d' {COMMUNICATOR}")
    assert host.sha256(COMMUNICATOR) == ours
    run = host.play(playbook="playbooks/revert.yml", sglang_server_state_after_revert="stopped")
    assert run.rc == 0, run.stdout
    assert host.differing() == set()
