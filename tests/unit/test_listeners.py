"""Who listens on a port and what is in a server's way, over a made-up /proc and over real sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.sm120 import listeners
from fake_proc import FakeProc


@pytest.mark.parametrize(
    ("told", "address"),
    [
        ("0100007F", "127.0.0.1"),
        ("00000000", "0.0.0.0"),  # noqa: S104
        ("00000000000000000000000000000000", "::"),
        ("00000000000000000000000001000000", "::1"),
        ("B80D0120000000000000000001000000", "2001:db8::1"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1"),  # of IPv4, in a socket of IPv6
    ],
)
def test_addresses_are_read_as_the_kernel_tells_them(
    tmp_path: Path, told: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.byteorder", "little")
    FakeProc(tmp_path).socket(told, 30000, 7)
    assert listeners.listening(30000, tmp_path) == {"socket:[7]": ip_address(address)}


def test_only_what_listens_on_the_port_counts(tmp_path: Path) -> None:
    assert listeners.listening(30000, tmp_path) == {}  # no tables at all
    proc = FakeProc(tmp_path)
    proc.socket("0100007F", 30001, 1)
    proc.socket("0100007F", 30000, 2, state="01")  # a connection
    proc.socket("0200007F", 30000, 3)
    proc.socket("0" * 32, 30000, 4)
    assert set(listeners.listening(30000, tmp_path)) == {"socket:[3]", "socket:[4]"}


V4, OTHER, ANY, V6, ANY6 = "127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::"  # noqa: S104


@pytest.mark.parametrize(
    ("wanted", "held", "found"),
    [
        ([V4], [V4], [V4]),
        ([V4], [OTHER], []),
        ([V4], [ANY, OTHER], [ANY]),
        ([ANY], [V4, OTHER], [V4, OTHER]),
        ([V6], [V6, V4, ANY], [V6]),
        ([V6], [ANY], []),
        ([ANY6], [V6, V4], [V6]),
        # A socket on :: may be of both families.
        ([str(listeners.Target(10, ("::ffff:127.0.0.1", 0, 0, 0)).ip)], [V4], [V4]),
        ([V4], [ANY6], [ANY6]),
        ([V4], [ANY6, OTHER], [ANY6]),
        ([V4], [ANY6, V4], [V4]),
        ([ANY], [ANY6], [ANY6]),
        ([ANY], [V6], []),
        # What localhost is.
        ([V6, V4], [V4], [V4]),
        ([V6, V4], [V6, V4, OTHER], [V6, V4]),
        ([V6, V4], [ANY6], [ANY6]),
        ([], [V4, ANY, ANY6], []),
        ([V4], [], []),
    ],
)
def test_who_holds_an_address(wanted: list[str], held: list[str], found: list[str]) -> None:
    assert listeners.in_the_way(map(ip_address, wanted), {name: ip_address(name) for name in held}) == set(
        found
    )


def test_holders_are_named_with_their_units(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.process(30, name="b (x) y", sockets=[7], group="/system.slice/b.service")
    proc.process(9, name="a", sockets=[7, 8], group="/")
    proc.process(10, name="c", sockets=[9], group="/system.slice/c.service")
    found = listeners.holders({"socket:[7]"}, tmp_path)
    assert list(map(str, found)) == ["a (pid 9)", "b (x) y (pid 30, b.service)"]
    assert listeners.holders(set(), tmp_path) == []
    assert listeners.holders({"socket:[6]"}, tmp_path) == []


def test_a_process_of_several_hierarchies_is_of_systemds_unit(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.process(9, name="a", sockets=[7])
    (tmp_path / "9/cgroup").write_text("4:memory:/other\n1:name=systemd:/system.slice/a:b.service\n")
    assert [each.unit for each in listeners.holders({"socket:[7]"}, tmp_path)] == ["a:b.service"]


def test_the_listener_of_a_port_is_the_first_process_that_has_it(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.socket("0100007F", 30000, 7)
    proc.process(100, name="child", sockets=[7])
    proc.process(99, name="parent", sockets=[7])
    assert listeners.listener_pid(30000, tmp_path) == 99
    assert listeners.listener_pid(30001, tmp_path) is None


def test_the_listener_of_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listeners.listener_pid(port) == os.getpid()
    assert listeners.listener_pid(port) is None


def ipv6(address: str, *, dualstack: bool) -> socket.socket:
    try:
        return socket.create_server((address, 0), family=socket.AF_INET6, dualstack_ipv6=dualstack)
    except OSError:
        pytest.skip("no IPv6 here")


@pytest.mark.parametrize(
    ("listen", "taken"),
    [
        (lambda: socket.create_server(("127.0.0.1", 0)), {V4, ANY}),
        (lambda: socket.create_server((ANY, 0)), {V4, ANY}),
        (lambda: ipv6(ANY6, dualstack=False), {V6, ANY6}),
        (lambda: ipv6(ANY6, dualstack=True), {V4, ANY, V6, ANY6}),
        (lambda: ipv6("::ffff:127.0.0.1", dualstack=True), {V4, ANY}),
    ],
    ids=["IPv4", "wildcard", "IPv6", "dual-stack", "IPv4 in IPv6"],
)
def test_what_the_kernel_refuses_is_explained(listen: Callable[[], socket.socket], taken: set[str]) -> None:
    with listen() as server:
        port = server.getsockname()[1]
        given = [{"instance": host, "host": host, "port": port} for host in (V4, ANY, V6, ANY6)]
        found = {each["host"]: each for each in listeners.unable(given, {}) if each["why"] == "taken"}
    assert set(found) == taken
    assert all(f"(pid {os.getpid()}" in each["by"] for each in found.values())


UNIT, FOREIGN = "/system.slice/sglang-a.service", "/system.slice/sglang-b.service"
MAIN = 50
# What listens on 127.0.0.1:30000 while the unit's main process, 50, does not: None for nobody to be named.
ANSWERING: dict[str, tuple[dict[str, Any], str | None]] = {
    "another unit": ({"group": FOREIGN}, "sglang::http (pid 77, sglang-b.service)"),
    "a unit whose name begins alike": ({"group": f"{UNIT}-2"}, "sglang::http (pid 77, sglang-a.service-2)"),
    "a process of no unit": ({"group": "/"}, "sglang::http (pid 77)"),
    "in the unit's control group": ({"group": UNIT}, None),
    "in one below it": ({"group": f"{UNIT}/payload"}, None),
    "a child in a session of its own": ({"group": "/user.slice/session-3.scope", "parent": MAIN}, None),
    "in a container": ({"group": "/system.slice/docker-1.scope", "namespace": "pid:[2]"}, None),
    "in a container that shares the host's processes": ({"group": "/system.slice/docker-1.scope"}, None),
    "in one that has groups of its own": ({"group": "/machine.slice/libpod-1.scope/container"}, None),
    "an engine that forwards": ({"group": "/system.slice/docker.service", "name": "docker-proxy"}, None),
    "a user's engine that forwards": ({"group": "/user.slice/session-3.scope", "name": "rootlessport"}, None),
    "somebody not ours to see": ({"group": FOREIGN, "sockets": []}, None),
}


def lay_out(root: Path, **listener: Any) -> FakeProc:
    proc = FakeProc(root)
    proc.socket("0100007F", 30000, 7)
    proc.process(MAIN, group=UNIT)
    proc.process(77, **({"name": "sglang::http", "sockets": [7]} | listener))
    return proc


@pytest.mark.parametrize(("listener", "named"), ANSWERING.values(), ids=list(ANSWERING))
def test_who_answers_in_place_of_a_unit(tmp_path: Path, listener: dict[str, Any], named: str | None) -> None:
    lay_out(tmp_path, **listener)
    found = listeners.stranger("127.0.0.1", 30000, MAIN, UNIT, tmp_path)
    assert (None if found is None else str(found)) == named


@pytest.mark.parametrize(
    ("host", "port", "main", "group"),
    [
        ("192.0.2.1", 30000, MAIN, UNIT),  # another host's
        ("no such name", 30000, MAIN, UNIT),
        ("127.0.0.2", 30000, MAIN, UNIT),  # nobody listens
        ("127.0.0.1", 30001, MAIN, UNIT),
        ("127.0.0.1", 30000, 0, UNIT),  # no main process to compare with
        ("127.0.0.1", 30000, MAIN, ""),
        ("127.0.0.1", 30000, 51, UNIT),  # a number that means another process here, or none
        ("127.0.0.1", 30000, 77, UNIT),
    ],
)
def test_nobody_is_called_a_stranger_where_it_cannot_be_told(
    tmp_path: Path, host: str, port: int, main: int, group: str
) -> None:
    proc = lay_out(tmp_path, group=FOREIGN)
    proc.process(51, group="/")
    assert listeners.stranger(host, port, main, group, tmp_path) is None


def test_another_hosts_address_is_not_looked_for_among_ours(tmp_path: Path) -> None:
    lay_out(tmp_path, group=FOREIGN).socket("00000000", 30000, 8)
    (tmp_path / "77/fd/8").symlink_to("socket:[8]")
    assert listeners.stranger("127.0.0.2", 30000, MAIN, UNIT, tmp_path) is not None
    assert listeners.stranger("192.0.2.1", 30000, MAIN, UNIT, tmp_path) is None


def test_a_socket_that_the_unit_shares_is_the_units(tmp_path: Path) -> None:
    """systemd holds the socket as well where it activates a service by it."""
    lay_out(tmp_path, group=FOREIGN).process(60, group=UNIT, sockets=[7])
    assert listeners.stranger("127.0.0.1", 30000, MAIN, UNIT, tmp_path) is None


def test_who_shares_the_port_with_somebody_unseen_may_not_be_who_answered(tmp_path: Path) -> None:
    lay_out(tmp_path, group=FOREIGN).socket("0100007F", 30000, 8)  # SO_REUSEPORT
    assert listeners.stranger("127.0.0.1", 30000, MAIN, UNIT, tmp_path) is None


def test_localhost_is_who_answers_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit's on IPv4 is not reached where a stranger has the port on IPv6."""
    lay_out(tmp_path, group=FOREIGN, sockets=[8]).socket("00000000000000000000000001000000", 30000, 8)
    (tmp_path / str(MAIN) / "fd/3").symlink_to("socket:[7]")
    both = [listeners.Target(2, ("127.0.0.1", 0)), listeners.Target(10, ("::1", 0, 0, 0))]
    monkeypatch.setattr(listeners, "_bind_error", lambda _target: 0)
    for order, met in ((both, False), (both[::-1], True)):
        monkeypatch.setattr(listeners, "addresses", lambda _host, _port, order=order: order)
        found = listeners.stranger("localhost", 30000, MAIN, UNIT, tmp_path)
        assert (found is not None) is met


@pytest.mark.parametrize(("told", "first"), [(None, 1024), ("0\n", 0), ("2048\n", 2048)])
def test_which_ports_are_roots_alone(tmp_path: Path, told: str | None, first: int) -> None:
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    if told is not None:
        (tmp_path / "sys/net/ipv4/ip_unprivileged_port_start").write_text(told)
    assert listeners.first_free_port(tmp_path) == first
    assert listeners.why_not([], first - 1, tmp_path) == "privileged"
    assert listeners.why_not([], first, tmp_path) != "privileged"
