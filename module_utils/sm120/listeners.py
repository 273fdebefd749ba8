"""Who listens on this host's TCP ports, and what keeps a server from it. Read from /proc: ss need not be there."""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import PROC, control_groups, descendants, opened, pid_namespace, pids, read_process

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
FIRST_FREE_PORT = 1024  # where the kernel does not tell its own
# Units of engines and of the containers that share the host's processes, and programs that forward a port into one.
CONTAINER_UNITS = ("docker", "containerd", "podman", "libpod", "crio", "cri-containerd")
FORWARDERS = ("docker-proxy", "rootlessport", "slirp4netns", "pasta")


class BadRecord(ValueError):
    """What tells of an instance that is deployed here cannot be read; the message names the file."""


@dataclass(frozen=True)
class Target:
    """An address to bind, as the socket module has it."""

    family: int
    sockaddr: tuple[Any, ...]

    @property
    def ip(self) -> Ip:
        return _told(ipaddress.ip_address(str(self.sockaddr[0]).partition("%")[0]))


@dataclass(frozen=True, order=True)
class Holder:
    """A process that has a socket. `unit` is the last part of its control group: mostly a systemd unit."""

    unit: str
    name: str
    pid: int

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, {self.unit})" if self.unit else f"{self.name} (pid {self.pid})"


def addresses(host: str, port: int) -> list[Target]:
    """What a server there binds; nothing for no address."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError):  # ValueError: what can be no name, such as one with an empty label
        return []
    return [Target(family, sockaddr) for family, _, _, _, sockaddr in found]


def _bind_error(target: Target) -> int:
    """Error number of binding it, 0 for none. Nothing listens afterwards."""
    try:
        with socket.socket(target.family, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if target.family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            server.bind(target.sockaddr)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def first_free_port(proc: Path = PROC) -> int:
    """The lowest port that a service user may listen on."""
    try:
        return int((proc / "sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except OSError:
        return FIRST_FREE_PORT


def why_not(targets: Iterable[Target], port: int, proc: Path = PROC) -> str:
    """What keeps a server from listening: "taken", "address" (not one of this host's), "privileged", or nothing."""
    if port < first_free_port(proc):
        return "privileged"  # root may, and asks here; the service user may not
    codes = {_bind_error(target) for target in targets}
    if errno.EADDRINUSE in codes:
        return "taken"
    # Of localhost's two addresses one may be missing.
    return "address" if codes <= {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT} else ""


def listening(port: int, proc: Path = PROC) -> dict[str, Ip]:
    """{socket: its address} of all that listen on a port; a socket's name is that of its descriptors' links."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, _, number = fields[1].rpartition(":")
            if fields[3] == "0A" and int(number, 16) == port:
                found[f"socket:[{fields[9]}]"] = _address(bytes.fromhex(address))
    return found


def _address(raw: bytes) -> Ip:
    """Of words of 32 bits, each in the machine's order."""
    order = -1 if sys.byteorder == "little" else 1
    return _told(ipaddress.ip_address(b"".join(raw[at : at + 4][::order] for at in range(0, len(raw), 4))))


def _told(address: Ip) -> Ip:
    """An IPv4 address in a socket of IPv6 is one of IPv4."""
    return getattr(address, "ipv4_mapped", None) or address


def in_the_way(wanted: Iterable[Ip], held: Mapping[str, Ip]) -> set[str]:
    """The sockets that hold one of these addresses. One on :: may hold IPv4's too: where nothing else explains it."""
    wanted = list(wanted)
    of_family = {
        name
        for name, address in held.items()
        for one in wanted
        if address.version == one.version and (address == one or address.is_unspecified or one.is_unspecified)
    }
    if of_family or all(one.version == 6 for one in wanted):
        return of_family
    return {name for name, address in held.items() if address.version == 6 and address.is_unspecified}


def holding(sockets: Iterable[str], proc: Path = PROC) -> Iterator[int]:
    """The processes that have one of these sockets, lowest number first, as far as they are ours to see."""
    wanted = frozenset(sockets)
    if wanted:
        yield from (pid for pid in pids(proc) if not wanted.isdisjoint(opened(pid, proc)))


def holder(pid: int, proc: Path = PROC) -> Holder | None:
    """None where the process has ended."""
    process = read_process(pid, proc)
    if process is None:
        return None
    groups = control_groups(pid, proc)
    return Holder(groups[-1].rpartition("/")[2] if groups else "", process.name, pid)


def holders(sockets: Iterable[str], proc: Path = PROC) -> list[Holder]:
    return sorted(found for pid in holding(sockets, proc) if (found := holder(pid, proc)))


def listener_pid(port: int, proc: Path = PROC) -> int | None:
    """The process that listens on a port; None when nobody does or it is not ours to see."""
    return next(holding(listening(port, proc), proc), None)


def _within(pid: int, group: str, proc: Path) -> bool:
    groups = control_groups(pid, proc) if group else []
    return any(each == group or each.startswith(f"{group}/") for each in groups)


def _group_parts(pid: int, proc: Path) -> set[str]:
    return {part for group in control_groups(pid, proc) for part in group.split("/")}


def stranger(host: str, port: int, main_pid: int, group: str, proc: Path = PROC) -> Holder | None:
    """Who answers there, where it does not belong to a unit: is neither in its control group, nor its main process or
    one below it.

    None also where that cannot be told: the address is not this host's, a listener is not ours to see, is in a
    container or forwards to one, which the unit may have had started, or systemd speaks of other processes than `proc`
    shows.
    """
    held = listening(port, proc)
    # In the order in which a client tries them.
    answering = ((target, in_the_way([target.ip], held)) for target in addresses(host, 0))
    target, sockets = next((each for each in answering if each[1]), (None, set()))
    if target is None or _bind_error(target) or not _within(main_pid, group, proc):
        return None
    seen = [set(holding([each], proc)) for each in sockets]
    found = sorted(set().union(*seen))
    if not all(seen) or any(_within(pid, group, proc) for pid in found):
        return None
    of_unit = {main_pid, *(process.pid for process in descendants(main_pid, proc))}
    here = pid_namespace("self", proc)
    if not of_unit.isdisjoint(found) or here is None or {pid_namespace(pid, proc) for pid in found} != {here}:
        return None
    answers = holder(found[0], proc)
    # Not this host's own, where it is a container itself.
    theirs = _group_parts(found[0], proc) - _group_parts(main_pid, proc)
    contained = any(part.startswith(CONTAINER_UNITS) for part in theirs)
    return None if answers is None or contained or answers.name.startswith(FORWARDERS) else answers


def deployed_units(folder: Path) -> dict[str, str]:
    """{unit: instance} of what is deployed here. Raises BadRecord."""
    found = {}
    for path in folder.glob("*/instance.json"):
        try:
            found[str(json.loads(path.read_text(encoding="utf-8"))["unit"])] = path.parent.name
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadRecord(
                f"{path}: wanted the record of an instance; found {type(error).__name__}: {error}"
            ) from error
    return found


def unable(
    listeners: Sequence[Mapping[str, Any]], ours: Mapping[str, str], proc: Path = PROC
) -> Iterator[dict[str, Any]]:
    """The instances that could not listen, with why and because of whom (in words, and their units).

    `listeners` have instance, host and port as the inventory has them, `ours` is {unit: instance} of what is deployed.
    Instances are deployed in this order: what our own units hold is free, but not what one holds that comes later and
    is still listed.
    """
    names = [str(each["instance"]) for each in listeners]
    for place, each in enumerate(listeners):
        if not str(each["port"]).isdecimal() or not 0 < int(each["port"]) < 65536:
            continue  # told by another check
        port = int(each["port"])
        targets = addresses(str(each["host"]), port)
        why = why_not(targets, port, proc)
        found: list[Holder] = []
        if why == "taken":
            found = holders(in_the_way((target.ip for target in targets), listening(port, proc)), proc)
        free = {unit for unit, instance in ours.items() if instance not in names[place + 1 :]}
        if why and not (found and free.issuperset(one.unit for one in found)):
            by = ", ".join(map(str, found)) or "a process that is not visible here"
            units = sorted({one.unit for one in found})
            named = {name: each[name] for name in ("instance", "host")}
            yield {**named, "port": port, "why": why, "by": by, "units": units}
