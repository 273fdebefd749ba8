"""A server on loopback that speaks SGLang's HTTP as far as the tests need, with every fault on demand."""

from __future__ import annotations

import json
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def page(value: Any, status: int = 200) -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(
    count: int, total: int, *, api: str = "generate", prompt: int = 4, text: str | None = None
) -> bytes:
    """One event as SGLang 0.5.9 sends it."""
    last = count == total
    if api == "generate":
        meta = {
            "id": "ab",
            "finish_reason": {"type": "length", "length": total} if last else None,
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "cached_tokens": 0,
        }
        shown = "x" * count if text is None else text
        value: dict[str, Any] = {"text": shown, "output_ids": list(range(count)), "meta_info": meta}
    else:
        value = {
            "choices": [{"index": 0, "text": "x" if text is None else text}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": count},
        }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def stream(total: int, *, api: str = "generate", prompt: int = 4, step: int = 1) -> list[bytes]:
    """The events of one answer, the end mark included; `step` tokens per event."""
    counts = [*range(step, total, step), total]
    return [*(event(count, total, api=api, prompt=prompt) for count in counts), DONE]


def whole(events: list[bytes]) -> bytes:
    """The same as one answer on the wire."""
    return HEAD + b"".join(chunk(one) for one in events) + b"0\r\n\r\n"


# What was seen of real servers, where their answers differ.
VERSIONS = ("0.5.8.post1", "0.5.9", "0.5.12", "0.5.15", "0.5.20", "0.5.23")


def _at_least(version: str, least: str) -> bool:
    return tuple(map(int, version.split(".")[:3])) >= tuple(map(int, least.split(".")))


def outlives_its_scheduler(version: str) -> bool:
    """A parent whose scheduler was killed: up to 0.5.9 it lives on and says nothing; later it logs and ends."""
    return not _at_least(version, "0.5.12")


def server_info_of(version: str) -> dict[str, Any]:
    """/server_info as this version gives it, the key in clear text included."""
    graph: Any = {"decode": 0.4} if _at_least(version, "0.5.20") else -0.0
    info: dict[str, Any] = {
        "version": version,
        "status": "ready",
        "api_key": "s3cret",
        "max_running_requests": 64,
        "max_req_input_len": 4090,
        "max_total_num_tokens": 65536,
        "enable_flashinfer_allreduce_fusion": False,
        "internal_states": [
            {"last_gen_throughput": 0.0, "memory_usage": {"weight": 0.1, "kvcache": 0.2, "graph": graph}}
        ],
    }
    if _at_least(version, "0.5.14"):
        info["flashinfer_allreduce_fusion_backend"] = None
    if _at_least(version, "0.5.20"):
        info |= {"startup_time": 12.5, "launch_command": "python -m sglang.launch_server"}
    if _at_least(version, "0.5.23"):
        info["frontend"] = "http"
    return info


def generated_by(version: str, tokens: int) -> dict[str, Any]:
    """An answer of /generate as this version gives it."""
    meta: dict[str, Any] = {
        "id": "ab",
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": 5,
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "output_token_logprobs": [[-1.5, 100 + count, None] for count in range(tokens)],
        "e2e_latency": 0.1,
    }
    if _at_least(version, "0.5.12"):
        meta["num_retractions"] = 0
    else:
        meta |= {"total_retractions": 0, "decode_throughput": 300.0}
    return {"text": "Paris, of course", "output_ids": list(range(100, 100 + tokens)), "meta_info": meta}


def speaking(version: str) -> Fake:
    """A healthy server of that version."""
    fake = Fake("/models/m")
    fake.routes["/server_info"] = page(server_info_of(version))
    # The old names are still there, and logged as deprecated.
    fake.routes["/get_server_info"] = fake.routes["/server_info"]
    fake.routes["/get_model_info"] = fake.routes["/model_info"]
    fake.routes["/metrics"] = page(b'sglang:generation_tokens_total{model_name="m"} 100.0\n')
    if _at_least(version, "0.5.20"):
        fake.routes["/ready"] = page(b"")

    def generate(_fake: Fake, sock: socket.socket, body: Any) -> None:
        sock.sendall(page(generated_by(version, body["sampling_params"]["max_new_tokens"])))

    fake.routes["/generate"] = generate
    return fake


Reply = Callable[["Fake", socket.socket, Any], None]


class Fake:
    """Routes are bytes to send, or functions that talk to the socket themselves."""

    def __init__(self, model_path: str = "/nowhere") -> None:
        self.routes: dict[str, bytes | Reply] = {
            "/health": page(b""),
            "/model_info": page({"model_path": model_path}),
            "/server_info": page({"version": "0.5.9", "max_running_requests": 64, "api_key": "s3cret"}),
        }
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.port = 0
        self.server: socketserver.ThreadingTCPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self, path: str) -> list[Any]:
        return [body for at, _headers, body in self.seen if at == path]


def stream_reply(total: int | None = None, *, delay: float = 0.0, api: str = "generate") -> Reply:
    """Answer a streaming request with the tokens asked for, or with `total` of them."""

    def reply(_fake: Fake, sock: socket.socket, body: Any) -> None:
        asked = body["sampling_params"]["max_new_tokens"] if api == "generate" else body["max_tokens"]
        prompt = len(body["input_ids"] if api == "generate" else body["prompt"])
        sock.sendall(HEAD)
        for one in stream(asked if total is None else total, api=api, prompt=prompt):
            time.sleep(delay)
            sock.sendall(chunk(one))
        sock.sendall(b"0\r\n\r\n")

    return reply


def silence(_fake: Fake, sock: socket.socket, _body: Any) -> None:
    """Take the request and never answer; ends when the client hangs up."""
    while sock.recv(4096):
        pass


@contextmanager
def serve(fake: Fake, tls: tuple[Path, Path] | None = None) -> Iterator[Fake]:
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)

    class Handler(socketserver.BaseRequestHandler):
        def setup(self) -> None:
            if context:
                self.request = context.wrap_socket(self.request, server_side=True)

        def handle(self) -> None:
            data = b""
            while b"\r\n\r\n" not in data:
                piece = self.request.recv(65536)
                if not piece:
                    return
                data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
            while len(body) < int(headers.get("content-length", 0)):
                body += self.request.recv(65536)
            path = lines[0].split()[1]
            value = json.loads(body) if body else None
            fake.seen.append((path, headers, value))
            reply = fake.routes.get(path, page({"detail": "Not Found"}, 404))
            try:
                if isinstance(reply, bytes):
                    self.request.sendall(reply)
                else:
                    reply(fake, self.request, value)
            except OSError:
                return  # the client hung up, which some tests are about

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that refuses the certificate is what some tests are about."""

    with Server(("127.0.0.1", 0), Handler) as server:
        fake.port = server.server_address[1]
        fake.server = server
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
