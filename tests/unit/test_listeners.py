"""Who listens on a port and what is in a server's way, over a made-up /proc and over real sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

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


@pytest.mark.parametrize(("told", "first"), [(None, 1024), ("0\n", 0), ("2048\n", 2048)])
def test_which_ports_are_roots_alone(tmp_path: Path, told: str | None, first: int) -> None:
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    if told is not None:
        (tmp_path / "sys/net/ipv4/ip_unprivileged_port_start").write_text(told)
    assert listeners.first_free_port(tmp_path) == first
    assert listeners.why_not([], first - 1, tmp_path) == "privileged"
    assert listeners.why_not([], first, tmp_path) != "privileged"
