"""A /proc of processes and of the sockets that they listen on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class FakeProc:
    def __init__(self, root: Path) -> None:
        self._root = root
        (root / "net").mkdir()
        for table in ("tcp", "tcp6"):
            (root / "net" / table).write_text("  sl  local_address rem_address   st ...\n")
        self._namespace("self", "pid:[1]")

    def socket(self, address: str, port: int, inode: int, *, state: str = "0A") -> None:
        """`address` as in /proc/net: hexadecimal, in words of the machine's order."""
        table = self._root / "net" / ("tcp" if len(address) == 8 else "tcp6")
        with table.open("a") as file:
            remote = "0" * len(address)
            file.write(
                f"   0: {address}:{port:04X} {remote}:0000 {state} 00000000:00000000 00:00000000 00000000"
                f"     0        0 {inode} 1 0000000000000000 100 0 0 10 0\n"
            )

    def _namespace(self, process: str, namespace: str) -> None:
        (self._root / process / "ns").mkdir(parents=True)
        (self._root / process / "ns/pid").symlink_to(namespace)

    def process(
        self,
        pid: int,
        *,
        name: str = "x",
        parent: int = 1,
        sockets: Iterable[int] = (),
        group: str = "/",
        namespace: str = "pid:[1]",
    ) -> None:
        self._namespace(str(pid), namespace)
        folder = self._root / str(pid)
        (folder / "fd").mkdir()
        (folder / "stat").write_text(f"{pid} ({name}) S {parent} 0 0\n")
        (folder / "cgroup").write_text(f"0::{group}\n")
        for number, inode in enumerate(sockets):
            (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
