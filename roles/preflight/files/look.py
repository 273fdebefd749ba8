"""Facts for the checks before anything is touched. Standard input of python3.

Arguments: the model's folder; the instances that are to listen, as JSON [[name, host, port], …]; the folder of what is
deployed here already. Prints JSON.
"""

import errno
import json
import os
import platform
import socket
import sys
from pathlib import Path


def why_not(host, port):
    """What keeps a server from listening there: "taken", "address" (not one of this host's), or nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return "address"
    codes = []
    for family, kind, protocol, _, target in found:
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


def listeners(port):
    """(unit, "name (pid N, unit)") of each process that listens on a port. Read from /proc: ss need not be there."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if sockets.isdisjoint(os.readlink(each) for each in (process / "fd").iterdir()):
                continue
            name = (process / "comm").read_text().strip()
            unit = (process / "cgroup").read_text().strip().rpartition("/")[2]
        except OSError:  # it has ended, or is not ours to look into
            continue
        found.add((unit, f"{name} (pid {process.name}, {unit})" if unit else f"{name} (pid {process.name})"))
    return sorted(found)


def unable(instances, ours):
    """The instances that could not listen, with why and because of whom. What our own units hold is free for us."""
    for name, host, port in instances:
        if not str(port).isdigit() or not 0 < int(port) < 65536:
            continue  # told by another check
        why = why_not(str(host), int(port))
        holders = listeners(int(port)) if why == "taken" else []
        if why and not (holders and ours.issuperset(unit for unit, _ in holders)):
            by = ", ".join(told for _, told in holders) or "a process that is not visible here"
            yield {"instance": name, "host": host, "port": int(port), "why": why, "by": by}


path = Path(sys.argv[1])
deployed = [json.loads(record.read_text()) for record in Path(sys.argv[3]).glob("*/instance.json")]
print(
    json.dumps(
        {
            "machine": platform.machine(),
            "systemd": Path("/run/systemd/system").is_dir(),
            # module_utils/sm120/vocabulary.py stands before this; sglang_model says what is wrong with a folder
            "vocab_size": vocabulary_at(sys.argv[1]),  # noqa: F821
            "model_begun": path.is_dir() and any(path.iterdir()),
            "unable_to_listen": list(unable(json.loads(sys.argv[2]), {each["unit"] for each in deployed})),
        }
    )
)
