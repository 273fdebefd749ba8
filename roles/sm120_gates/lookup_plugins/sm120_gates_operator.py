"""Who runs this ansible-playbook, and whether the holder of a lock still does."""

from __future__ import annotations

import getpass
import multiprocessing
import os
import socket
from contextlib import suppress
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
name: sm120_gates_operator
short_description: The holder of a lock on the SM120 gates, seen from this controller
description:
  - Tells who runs this ansible-playbook, and whether the run that holds a lock is dead.
options:
  _terms:
    description: The lock that sm120_gates_info found, or null.
    required: false
"""

RETURN = """
_raw:
  description: >-
    One dict with C(operator) (the lock that this run takes) and C(dead_lock) (the id of the lock given, when
    its holder ran on this controller since its last boot, among the processes that are seen here, and is gone;
    else empty).
  type: list
  elements: dict
"""


def _started(pid: int) -> str | None:
    """When a process started, which tells a reused process number from the old one; None: it is gone."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").is_file():
        try:
            return stat.read_text().rpartition(")")[2].split()[19]
        except (FileNotFoundError, ProcessLookupError):  # the second, where it ends while its file is read
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"


def _where(host: str) -> str:
    """Where process numbers mean the same. A name alone does not tell: containers and clones share it."""
    seen = [host]
    for file in (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")):
        with suppress(OSError):
            seen.append(file.read_text().strip())
    with suppress(OSError):
        seen.append(str(Path("/proc/self/ns/pid").readlink()))
    return sha256(" ".join(seen).encode()).hexdigest()[:12]


def _operator() -> dict[str, Any]:
    main = multiprocessing.parent_process()
    pid = os.getpid() if main is None else main.pid
    started = _started(pid) or "unknown"
    host = socket.gethostname()
    where = _where(host)
    return {
        "id": sha256(f"{where} {pid} {started}".encode()).hexdigest()[:12],
        "user": getpass.getuser(),
        "host": host,
        "where": where,
        "pid": pid,
        "pid_started": started,
        "since": datetime.now(tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def _dead(lock: dict[str, Any], me: dict[str, Any]) -> bool:
    return lock.get("where") == me["where"] and _started(lock["pid"]) != lock["pid_started"]


class LookupModule(LookupBase):
    """lookup('sm120_gates_operator', gates.lock)"""

    def run(self, terms: list[Any], variables: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        me = _operator()
        lock = terms[0] if terms else None
        return [{"operator": me, "dead_lock": lock["id"] if lock and _dead(lock, me) else ""}]
