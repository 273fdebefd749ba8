"""A model hub over HTTP, as far as its client asks: the repository's files with hashes, and their bytes by range.

What it is told to do wrong, it does: refuse readers without the token, cut a transfer, serve other bytes, name a size
that no disk has. Every request is recorded.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "lab/tiny"
LARGE_BYTES = 100_000  # from this size on a file is stored as LFS, and has a SHA-256


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Hub:
    """The repository and what is to go wrong with it."""

    files: dict[str, bytes]
    commit: str = COMMIT
    token: str = ""
    cut_at: dict[str, int] = field(default_factory=dict)  # where in the file every connection is cut
    served: dict[str, bytes] = field(default_factory=dict)  # other bytes than those that are listed
    sizes: dict[str, int] = field(default_factory=dict)  # sizes that are told and not true
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    url: str = ""

    def sibling(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        size = self.sizes.get(name, len(content))
        told: dict[str, Any] = {"rfilename": name, "size": size, "blobId": git_hash(content)}
        if len(content) >= LARGE_BYTES:
            told["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
        return told

    def gets(self, name: str) -> list[tuple[str, str, str | None]]:
        return [each for each in self.requests if each[0] == "GET" and each[1].endswith(f"/{name}")]

    @contextmanager
    def running(self) -> Iterator[Hub]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    """https://huggingface.co/docs/hub/api: model info at a revision, and resolve."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        body = json.dumps({"error": code}).encode()
        self.answer(status, body, X_Error_Code=code, X_Error_Message=code, Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.refuse(401, "RepoNotFound")  # as the hub says it to a stranger
        info = re.fullmatch(r"/api/models/(.+)/revision/(.+)", path)
        resolve = re.fullmatch(r"/(.+?/.+?)/resolve/([^/]+)/(.+)", path)
        found = info or resolve
        repository, revision = found.group(1, 2) if found else (None, None)
        if repository != REPOSITORY:
            return self.refuse(404, "RepoNotFound")
        if revision != hub.commit:
            return self.refuse(404, "RevisionNotFound")
        if info:
            told = {
                "id": REPOSITORY,
                "sha": hub.commit,
                "siblings": [hub.sibling(name) for name in hub.files],
            }
            return self.answer(200, json.dumps(told).encode(), Content_Type="application/json")
        assert resolve is not None
        name = resolve[3]
        return self.serve(name) if name in hub.files else self.refuse(404, "EntryNotFound")

    def serve(self, name: str) -> None:
        hub = self.hub
        listed, content = hub.sibling(name), hub.served.get(name, hub.files[name])
        headers = {
            "ETag": f'"{listed["lfs"]["sha256"] if "lfs" in listed else listed["blobId"]}"',
            "X_Repo_Commit": hub.commit,
            "Accept_Ranges": "bytes",
        }
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        if asked:
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        cut = hub.cut_at.get(name)
        if cut is None or self.command == "HEAD":
            return self.answer(206 if asked else 200, body, **headers)
        self.send_response(206 if asked else 200)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content[start:cut])
        self.close_connection = True
        return None
