"""A small HTTP client for one server: bearer key, a limit on every call, certificates verified,
nothing secret in errors."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .redact import redact

# What a status page can hold; a server that sends more without end must not fill our memory.
MAX_BODY_BYTES = 32 * 1024 * 1024
# What a 401 of the server means, in the names that an operator has.
KEY_REFUSED = "the API key is missing or wrong (sglang_server_api_key, or api_key of the instance)"


class UrlError(ValueError):
    """The URL or the key cannot be used; the message says why, and does not show the key."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, taken apart once."""

    scheme: str
    host: str
    port: int
    prefix: str

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_url(url: str) -> Address:
    """Take a base URL apart, or say what is wrong with it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise UrlError(f"url: wanted http://HOST:PORT or https://HOST:PORT, found {redact(url)!r}")
    if parts.username or parts.password:
        raise UrlError("url: must not hold a user or password; give the key as api_key")
    try:
        port = parts.port
    except ValueError as error:
        raise UrlError(f"url: {error}") from None
    if port == 0:
        raise UrlError("url: wanted a port from 1 to 65535, found 0")
    if not parts.hostname:
        raise UrlError(f"url: no host in {redact(url)!r}")
    if parts.query or parts.fragment:
        raise UrlError("url: wanted the server's base address, found a query or fragment")
    default = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme, parts.hostname, port or default, parts.path.rstrip("/"))


def tls_context(ca_path: str | None = None) -> ssl.SSLContext:
    """Certificates are always verified; a private authority is given as a file."""
    return ssl.create_default_context(cafile=ca_path)


@dataclass(frozen=True)
class Answer:
    """What came back. `status` 0: nothing did, and `error` says why in one word of `refused`, `timeout`,
    `reset`, `tls`, `dns` or `other`; `detail` is the text of it."""

    status: int
    body: bytes
    seconds: float
    error: str | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200

    def json(self) -> Any:
        """The body as JSON, or None when it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, UnicodeDecodeError):
            return None

    def text(self, limit: int = 300) -> str:
        return self.body[:limit].decode("utf-8", "replace").strip()


def _kind(error: BaseException) -> str:
    # The order matters: several of these are OSErrors too.
    if isinstance(error, ssl.SSLError):
        return "tls"
    if isinstance(error, socket.gaierror):
        return "dns"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, (ConnectionError, http.client.RemoteDisconnected, http.client.IncompleteRead)):
        return "reset"
    return "other"


class Client:
    """One server and its key. Every call opens its own connection: a hung one cannot poison the next."""

    def __init__(self, url: str, api_key: str | None = None, *, ca_path: str | None = None) -> None:
        self.address = parse_url(url)
        # http.client refuses the header too, and shows it.
        if api_key and not re.fullmatch(r"[!-~]+", api_key):
            raise UrlError(
                "wanted the API key as one line of printable ASCII without spaces, found something else (not shown); "
                "a key read from a file often has a line end: take it off"
            )
        self._key = api_key
        self._tls = tls_context(ca_path) if self.address.scheme == "https" else None

    @property
    def secrets(self) -> tuple[str | None, ...]:
        return (self._key,)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def redact(self, text: str) -> str:
        return redact(text, self.secrets)

    def _connection(self, timeout_seconds: float) -> http.client.HTTPConnection:
        at = self.address
        if self._tls is not None:
            return http.client.HTTPSConnection(at.host, at.port, timeout=timeout_seconds, context=self._tls)
        return http.client.HTTPConnection(at.host, at.port, timeout=timeout_seconds)

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_seconds: float, limit: int = MAX_BODY_BYTES
    ) -> Answer:
        """One request within `timeout_seconds` in all, the body's trickle included; only a server that trickles its
        headers gets more. Never raises for what a server does."""
        started = time.monotonic()
        deadline = started + timeout_seconds

        def left() -> float:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("the answer did not end in time")
            return seconds

        connection = self._connection(timeout_seconds)
        data = None if body is None else json.dumps(body).encode()
        headers = self.headers() | ({"Content-Type": "application/json"} if data is not None else {})
        try:
            connection.connect()
            sock = connection.sock
            sock.settimeout(left())
            connection.request(method, self.address.prefix + path, data, headers)
            sock.settimeout(left())
            response = connection.getresponse()
            parts = bytearray()
            while len(parts) < limit and not response.isclosed():
                sock.settimeout(left())
                piece = response.read1(65536)
                if not piece:
                    if response.length:  # what was promised and did not come; read1 does not tell
                        raise http.client.IncompleteRead(bytes(parts), response.length)
                    break
                parts += piece
            return Answer(response.status, bytes(parts), time.monotonic() - started)
        except (OSError, http.client.HTTPException) as error:
            detail = self.redact(f"{type(error).__name__}: {error}".rstrip(": "))
            return Answer(0, b"", time.monotonic() - started, _kind(error), detail)
        finally:
            connection.close()

    def get(self, path: str, *, timeout_seconds: float) -> Answer:
        return self.call("GET", path, timeout_seconds=timeout_seconds)

    def post(self, path: str, body: Any, *, timeout_seconds: float) -> Answer:
        return self.call("POST", path, body, timeout_seconds=timeout_seconds)

    def get_either(self, *paths: str, timeout_seconds: float) -> Answer:
        """The first of several names of one page that is not a 404: upstream renames its pages."""
        answer = self.get(paths[0], timeout_seconds=timeout_seconds)
        for path in paths[1:]:
            if answer.status != 404:
                break
            answer = self.get(path, timeout_seconds=timeout_seconds)
        return answer
