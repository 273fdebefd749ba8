"""Facts for the checks before anything is touched. Standard input of python3.

Arguments: the model's folder; the instances that are to listen, as JSON [[name, host, port], …]; the folder of what is
deployed here already. Prints JSON.
"""

import contextlib
import errno
import ipaddress
import json
import os
import platform
import socket
import sys
from pathlib import Path


def addresses(host, port):
    """What a server there binds: [(family, type, protocol, name, address), …]; nothing for no address."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return []


def why_not(targets, port):
    """What keeps a server from listening: "taken", "address" (not one of this host's), "privileged", or nothing."""
    lowest = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if port < int(lowest.read_text() if lowest.exists() else 1024):
        return "privileged"  # root may, and asks here; the service user may not
    codes = []
    for family, kind, protocol, _, target in targets:
        try:
            with socket.socket(family, kind, protocol) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.bind(target)
            codes.append(0)
        except OSError as error:
            codes.append(error.errno)
    if errno.EADDRINUSE in codes:
        return "taken"
    # Of localhost's two addresses one may be missing.
    missing = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
    return "address" if missing.issuperset(codes) else ""


def listening(port):
    """{socket: its address} of all that listen on a port. Read from /proc: ss need not be there."""
    found = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            address, _, number = fields[1].rpartition(":")
            if fields[3] == "0A" and int(number, 16) == port:
                raw = bytes.fromhex(address)  # words of 32 bits, each in the machine's order
                words = [
                    raw[at : at + 4][:: -1 if sys.byteorder == "little" else 1]
                    for at in range(0, len(raw), 4)
                ]
                found[f"socket:[{fields[9]}]"] = ipaddress.ip_address(b"".join(words))
    return found


def in_the_way(targets, port):
    """The sockets that hold one of these addresses. One on :: may hold IPv4's too: where nothing else explains it."""
    wanted = {ipaddress.ip_address(target[0].partition("%")[0]) for *_, target in targets}
    held = listening(port)
    of_family = {
        name
        for name, address in held.items()
        for one in wanted
        if address.version == one.version and (address == one or address.is_unspecified or one.is_unspecified)
    }
    return of_family or {name for name, address in held.items() if address.is_unspecified}


def opened(process):
    """What a process has open; nothing where it has ended or is not ours to look into."""
    with contextlib.suppress(OSError):
        for each in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield os.readlink(each)


def holders(sockets):
    """(unit, "name (pid N, unit)") of each process that has one of these sockets."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        if sockets.isdisjoint(opened(process)):
            continue
        with contextlib.suppress(OSError):
            name = (process / "comm").read_text().strip()
            unit = (process / "cgroup").read_text().strip().rpartition("/")[2]
            told = f"{name} (pid {process.name}, {unit})" if unit else f"{name} (pid {process.name})"
            found.add((unit, told))
    return sorted(found)


def unable(instances, ours):
    """The instances that could not listen, with why and because of whom.

    `ours` is {unit: instance} of what is deployed. Instances are deployed in this order: what our own units hold is
    free, but not what one holds that comes later and is still listed.
    """
    names = [str(name) for name, _, _ in instances]
    for place, (name, host, port) in enumerate(instances):
        if not str(port).isdigit() or not 0 < int(port) < 65536:
            continue  # told by another check
        targets = addresses(str(host), int(port))
        why = why_not(targets, int(port))
        found = holders(in_the_way(targets, int(port))) if why == "taken" else []
        free = {unit for unit, instance in ours.items() if instance not in names[place + 1 :]}
        if why and not (found and free.issuperset(unit for unit, _ in found)):
            by = ", ".join(told for _, told in found) or "a process that is not visible here"
            yield {"instance": name, "host": host, "port": int(port), "why": why, "by": by}


path = Path(sys.argv[1])
deployed = {
    json.loads(record.read_text())["unit"]: record.parent.name
    for record in Path(sys.argv[3]).glob("*/instance.json")
}
print(
    json.dumps(
        {
            "machine": platform.machine(),
            "systemd": Path("/run/systemd/system").is_dir(),
            # module_utils/sm120/vocabulary.py stands before this; sglang_model says what is wrong with a folder
            "vocab_size": vocabulary_at(sys.argv[1]),  # noqa: F821
            "model_begun": path.is_dir() and any(path.iterdir()),
            "unable_to_listen": list(unable(json.loads(sys.argv[2]), deployed)),
        }
    )
)
