"""Hosts for a file's tests: started before the first, removed after the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hosts import Host

FIRST_SSH_PORT = 22110
FIRST_SERVER_PORT = 30110

MakeHost = Callable[..., Host]

# Files by how long they take: the last of the workers to end is not one that has just begun.
LONGEST_FIRST = ("test_job test_interruption test_probe test_promote test_driver test_pve_provision").split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turn = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: turn.get(item.path.stem, len(turn)))


@pytest.fixture(scope="module")
def make_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeHost]:
    """Start a host. Its number sets its ports: files may run side by side, so no two share one."""
    made: list[Host] = []

    def make(name: str, number: int, baked: bool = True) -> Host:
        ports = FIRST_SSH_PORT + number, FIRST_SERVER_PORT + 10 * number
        host = Host(name, *ports, tmp_path_factory.mktemp(name), baked)
        made.append(host)
        return host

    yield make
    for host in made:
        host.remove()
