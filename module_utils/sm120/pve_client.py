"""A small client of the Proxmox VE API: TLS checked, writes never repeated, tasks waited for.

Secrets live in headers and in one request body; neither is ever part of an error or of the record.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

__all__ = ["Auth", "Client", "PveError", "TaskFailed", "Tls", "Unreachable", "address_problem", "pinned"]

ROOT_USER = "root@pam"
POLL_FIRST_SECONDS = 0.1
POLL_MOST_SECONDS = 2.0
LOST_CONNECTION_SECONDS = 60.0
LOG_TAIL_LINES = 20
TICKET = "/access/ticket"
TRUST = (
    "Give ca_path (/etc/pve/pve-root-ca.pem of the cluster) or fingerprint (pvenode cert info on the node)"
)
MAYBE_DONE = "It may have been carried out all the same: run it again, what is there is read first"
# pveproxy's own codes for a node it cannot reach, beside the usual ones of proxies.
TRANSIENT = frozenset({502, 503, 504, 595, 596, 599})

Params = Mapping[str, "str | int | Sequence[str]"]


class PveError(Exception):
    """The API refused a request."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(PveError):
    """No answer: connection, TLS or time."""


class TaskFailed(PveError):
    """A task ended with something else than OK."""

    def __init__(self, upid: str, exitstatus: str, log: Sequence[str]) -> None:
        tail = "\n".join(f"  {line}" for line in log[-LOG_TAIL_LINES:])
        super().__init__(
            f"task {upid} ended with: {exitstatus}\nlast lines of its log:\n{tail}\n"
            "Mend what they say, then run it again: what is there is read first. "
            f"The whole log, on the node: pvenode task log {upid}"
        )
        self.upid = upid
        self.exitstatus = exitstatus
        self.log = list(log)


@dataclass(frozen=True)
class Auth:
    """Who calls: a token, or a user with a password (which gets a ticket)."""

    user: str
    token_id: str | None = None
    token_secret: str | None = None
    password: str | None = None

    @property
    def is_root(self) -> bool:
        """Root for Proxmox is exactly root@pam with a ticket; root's tokens are not."""
        return self.user == ROOT_USER and self.token_id is None

    @property
    def full_token_id(self) -> str:
        """USER@REALM!NAME, whether the short or the full form was given."""
        token = self.token_id or ""
        return token if "!" in token else f"{self.user}!{token}"

    @property
    def label(self) -> str:
        """Whom an error message names."""
        return self.full_token_id if self.token_id is not None else self.user


def pinned(text: str | None) -> str | None:
    """A SHA-256 as bare hex; colons and what openssl writes before the ``=`` may be there."""
    if not text:
        return None
    digest = text.rpartition("=")[2].replace(":", "").strip().lower()
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError("wanted the SHA-256 of the certificate, 32 pairs of hex digits (pvenode cert info)")
    return digest


def address_problem(host: str, port: int, timeout_seconds: float) -> str:
    """What is wrong with where the API is said to be; empty when nothing is."""
    scheme = re.fullmatch(r"(?:\w+://)?([^/:\s]+)(?::(\d+))?(?:/.*)?", host.strip())
    if not re.fullmatch(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?\]?", host):
        fix = "give a name or an address"
        if scheme is not None:
            fix = f"api_host: {scheme[1]}" + (f", api_port: {scheme[2]}" if scheme[2] else "")
        return f"api_host: wanted a name or an address without scheme and port; found {host!r}. Fix: {fix}"
    if not 1 <= port <= 65535:
        return f"api_port: wanted 1 to 65535; found {port}. Fix: 8006 is Proxmox's"
    if timeout_seconds < 1:
        return f"request_timeout_seconds: wanted 1 or more; found {timeout_seconds}. Fix: 30 is the default"
    return ""


@dataclass(frozen=True)
class Tls:
    """How the server proves who it is."""

    verify: bool = True
    ca_path: str | None = None
    fingerprint: str | None = None  # as pinned() gives it

    def context(self) -> ssl.SSLContext:
        """The SSL context; a pinned fingerprint takes the place of the chain."""
        context = ssl.create_default_context(cafile=self.ca_path)
        if self.ca_path is not None:
            # Proxmox's own CA has extensions that the strict mode of Python 3.13 refuses.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.fingerprint is not None or not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class _Connection(http.client.HTTPSConnection):
    """Compares the certificate with the pinned one before a byte of the request leaves."""

    pinned: str | None = None

    def connect(self) -> None:
        super().connect()
        if self.pinned is None:
            return
        certificate = self.sock.getpeercert(binary_form=True) or b""
        found = hashlib.sha256(certificate).hexdigest()
        if found != self.pinned:
            self.close()
            raise Unreachable(f"its certificate's SHA-256 is {found}, wanted {self.pinned}")


class Client:
    """Requests to one Proxmox VE API, each recorded by method and path."""

    def __init__(self, host: str, port: int, auth: Auth, tls: Tls, timeout_seconds: float = 30) -> None:
        self.host, self.port, self.auth = host, port, auth
        self.requests: list[dict[str, str]] = []
        self._timeout = timeout_seconds
        self._tls = tls
        self._headers: dict[str, str] | None = None
        self._csrf: str | None = None
        self._context = tls.context()

    def _login(self) -> dict[str, str]:
        if self._headers is not None:
            return self._headers
        if self.auth.token_id is not None:
            self._headers = {
                "Authorization": f"PVEAPIToken={self.auth.full_token_id}={self.auth.token_secret}"
            }
            return self._headers
        body = urlencode({"username": self.auth.user, "password": self.auth.password or ""})
        answer = self._exchange("POST", TICKET, body, {}) or {}
        if answer.get("NeedTFA"):
            raise PveError(
                f"{self.auth.user} has a second factor, which an unattended run cannot give; use a token"
            )
        self._csrf = answer["CSRFPreventionToken"]
        self._headers = {"Cookie": f"PVEAuthCookie={answer['ticket']}"}
        return self._headers

    def _exchange(self, method: str, path: str, body: str | None, headers: Mapping[str, str]) -> Any:
        sent = {"Accept": "application/json", **headers}
        if body is not None:
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        where = f"{method} {path.partition('?')[0]} at {self.host}:{self.port}"
        connection: _Connection | None = None
        try:
            connection = _Connection(self.host, self.port, timeout=self._timeout, context=self._context)
            connection.pinned = self._tls.fingerprint
            connection.request(method, f"/api2/json{path}", body=body, headers=sent)
            response = connection.getresponse()
            raw = response.read()
        except Unreachable as problem:
            raise Unreachable(f"{where}: {problem}. {TRUST}") from None
        except ssl.SSLCertVerificationError as problem:
            raise Unreachable(
                f"{where}: the certificate is not trusted ({problem.verify_message}). {TRUST}"
            ) from None
        except (OSError, http.client.HTTPException) as problem:
            done = "" if method == "GET" or path == TICKET else f". {MAYBE_DONE}"
            raise Unreachable(
                f"{where}: no answer ({type(problem).__name__}: {problem}). Check api_host, api_port, the way "
                f"there and pveproxy on the node (systemctl status pveproxy){done}"
            ) from None
        except ValueError as problem:  # its text quotes the header, which holds the secret
            raise PveError(f"{where}: the request cannot be written ({type(problem).__name__})") from None
        finally:
            if connection is not None:
                connection.close()
        return self._decode(where, response.status, response.reason, raw)

    def _decode(self, where: str, status: int, reason: str, raw: bytes) -> Any:
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        if 200 <= status < 300:
            if isinstance(answer, dict) and "data" in answer:
                return answer["data"]
            raise PveError(
                f"{where}: {status}, but that is no answer of a Proxmox API: check api_host and api_port"
            )
        if not isinstance(answer, dict):
            answer = {}
        text = str(answer.get("message") or reason or "").strip()
        details = answer.get("errors")
        if isinstance(details, dict):
            text += "".join(f"; {key}: {str(value).strip()}" for key, value in sorted(details.items()))
        if status == 401:
            text += f" (as {self.auth.label}: check the secret, and that the user or token still exists)"
        elif "detected modified configuration" in text:
            text += ". Someone else changed the VM meanwhile: run it again"
        elif status >= 500 and status != 501:
            text += (
                ". See the node's task log and journal (pvedaemon, pveproxy); if it was passing, run it again"
            )
        raise PveError(f"{where}: {status} {text}", status=status)

    def request(self, method: str, path: str, params: Params | None = None) -> Any:
        """One request; the answer's data."""
        login = self._login()
        headers = dict(login)
        if method != "GET" and self._csrf is not None:
            headers["CSRFPreventionToken"] = self._csrf
        self.requests.append({"method": method, "path": path})
        encoded = urlencode(params, doseq=True) if params else ""
        if method in {"GET", "DELETE"}:
            return self._exchange(method, f"{path}?{encoded}" if encoded else path, None, headers)
        return self._exchange(method, path, encoded, headers)

    def get(self, path: str, params: Params | None = None) -> Any:
        """Read."""
        return self.request("GET", path, params)

    @property
    def writes(self) -> int:
        """How many requests were not reads."""
        return sum(1 for item in self.requests if item["method"] != "GET")

    def wait(self, upid: str, timeout_seconds: float) -> None:
        """Wait for a task; raise when it fails, with its exit status and the end of its log."""
        node = upid.split(":")[1]
        base = f"/nodes/{node}/tasks/{quote(upid, safe='')}"
        deadline = time.monotonic() + timeout_seconds
        pause, lost_since = POLL_FIRST_SECONDS, None
        while True:
            now = time.monotonic()
            try:
                status = self.get(f"{base}/status")
                lost_since = None
            except PveError as problem:
                transient = isinstance(problem, Unreachable) or problem.status in TRANSIENT
                lost_since = now if lost_since is None else lost_since
                if not transient or now - lost_since > LOST_CONNECTION_SECONDS:
                    raise PveError(
                        f"{problem}\nTask {upid} goes on without us; run again: it is waited for first"
                    ) from None
                status = {}
            if status.get("status") == "stopped":
                exitstatus = str(status.get("exitstatus", "unknown"))
                if exitstatus == "OK" or exitstatus.startswith("WARNINGS"):
                    return
                raise TaskFailed(upid, exitstatus, self._log(base))
            if now > deadline:
                raise PveError(
                    f"task {upid} still runs after {timeout_seconds:g} seconds and goes on without us; "
                    "run again: it is waited for first"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_MOST_SECONDS)

    def _log(self, base: str) -> list[str]:
        try:
            lines = self.get(f"{base}/log", {"start": 0, "limit": 5000})
        except PveError as problem:
            return [f"(log not readable: {problem})"]
        return [str(line.get("t", "")) for line in lines or []]
