"""What pve_gpu_vm says about secrets and addresses that cannot be right, and about servers that are not Proxmox."""

from __future__ import annotations

import hashlib
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pve_gpu_vm
import pytest
from pve_kit import SECRET, Vm, certificate, stub, vm
from pve_stub import Fault

__all__ = ["certificate", "stub", "vm"]

HALVES = [SECRET[:18], SECRET[18:]]
SPLIT = "\n".join(HALVES)


def silent(answer: dict[str, Any]) -> str:
    """A failure that shows no part of the secret, and no error of Python's."""
    assert answer["failed"] is True
    assert not any(part in str(answer) for part in [*HALVES, "Traceback", "Invalid header"])
    return str(answer["msg"])


@pytest.mark.parametrize("blank", ["\n", "\r", "\r\n", " "])
def test_line_ends_around_a_secret_and_a_name_mean_nothing(
    vm: Vm, blank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm.ok(
        state="present",
        api_token_secret=SECRET + blank,
        api_token_id=f"gpu{blank}",
        api_user=f"ansible@pve{blank}",
    )
    monkeypatch.setenv("PVE_API_TOKEN_SECRET", SECRET + blank)
    assert vm.ok(state="present", api_token_secret=None)["changed"] is False


@pytest.mark.parametrize(
    "secret", [SPLIT, SPLIT.replace("\n", "\r"), f"{SECRET}\u20ac", f"{HALVES[0]} {HALVES[1]}"]
)
def test_a_secret_of_several_lines_or_no_ascii_is_refused_and_not_shown(
    vm: Vm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    message = silent(vm(api_token_secret=secret))
    position = next(
        n for n, (one, other) in enumerate(zip(secret, SECRET + "?", strict=False), 1) if one != other
    )
    assert f"{len(secret)} characters" in message
    assert f"position {position}." in message
    path = tmp_path / "token"
    path.write_text(secret, newline="")
    silent(vm(api_token_secret=None, api_token_secret_file=str(path)))
    monkeypatch.setenv("PVE_API_TOKEN_SECRET", secret)
    silent(vm(api_token_secret=None))
    assert vm.stub.requests == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_secret_file_that_is_no_text(vm: Vm, tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(SECRET.encode(encoding))
    silent(vm(api_token_secret=None, api_token_secret_file=str(path)))
    assert vm.stub.requests == []


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ({"api_host": " 127.0.0.1"}, "api_host: 127.0.0.1"),
        ({"api_host": "https://pve1.example.com"}, "api_host: pve1.example.com"),
        ({"api_host": "https://pve1.example.com:8006/"}, "api_host: pve1.example.com, api_port: 8006"),
        ({"api_host": "pve1.example.com:8006"}, "api_host: pve1.example.com, api_port: 8006"),
        ({"api_host": ""}, "a name or an address"),
        ({"api_port": 0}, "api_port"),
        ({"request_timeout_seconds": -1}, "request_timeout_seconds"),
        ({"api_user": "ansible @pve"}, "api_user"),
        ({"api_token_id": "g\npu"}, "api_token_id"),
        ({"fingerprint": "AA:BB"}, "fingerprint"),
    ],
)
def test_addresses_and_names_that_cannot_be_right(vm: Vm, args: dict[str, Any], hint: str) -> None:
    assert hint in silent(vm(**args))
    assert vm.stub.requests == []


def test_an_error_of_another_kind_is_not_quoted(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError(f"PVEAPIToken={SPLIT}")

    monkeypatch.setattr(pve_gpu_vm, "run", broken)
    assert "RuntimeError in broken" in silent(vm())


def test_openssls_line_is_a_fingerprint(vm: Vm, certificate: tuple[Path, Path]) -> None:
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate[0].read_text())).hexdigest().upper()
    pairs = ":".join(digest[index : index + 2] for index in range(0, 64, 2))
    assert vm.ok(ca_path=None, fingerprint=f"sha256 Fingerprint={pairs}")["created"] is True
    other = vm(ca_path=None, fingerprint="00" * 32)
    assert f"SHA-256 is {digest.lower()}, wanted {'00' * 32}" in other["msg"]


class _Page(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    do_GET = do_POST = _serve


@pytest.fixture
def website(certificate: tuple[Path, Path]) -> Iterator[int]:
    """A server that answers everything with a page; its port."""
    server = HTTPServer(("127.0.0.1", 0), _Page)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield int(server.server_address[1])
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_that_is_not_proxmox(vm: Vm, website: int) -> None:
    password = {"api_user": "root@pam", "api_token_id": None, "api_token_secret": None, "api_password": "x y"}
    for args in ({}, password):
        assert "no answer of a Proxmox API" in silent(vm(api_port=website, **args))


@pytest.mark.parametrize(
    ("fault", "next_step"),
    [
        (Fault("POST", "/nodes/pve1/qemu", after=True), "may have been carried out"),
        (Fault("POST", "/nodes/pve1/qemu", status=503, message="busy"), "run it again"),
    ],
)
def test_what_to_do_after_a_failed_write(vm: Vm, fault: Fault, next_step: str) -> None:
    vm.stub.faults.append(fault)
    assert next_step in silent(vm())
