from __future__ import annotations

import http.client
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_answers
import sglang_health
import sglang_throughput
from ansible.module_utils.sm120 import http as http_module
from ansible.module_utils.sm120.http import Client, UrlError, parse_url
from conftest import RunModule
from fake_sglang import Fake, page, serve, silence

KEY = "k3y-0123456789"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:30000",
        "ftp://a",
        "http://",
        "http://a:0",
        "http://a:99999",
        "http://u:p@a",
        "http://a/?q=1",
        "http://a:x",
    ],
)
def test_urls_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(UrlError):
        parse_url(url)


def test_urls_are_taken_apart() -> None:
    assert parse_url("http://[::1]:30000/").netloc == "[::1]:30000"
    assert parse_url("https://a.example/x/").port == 443
    assert parse_url("https://a.example/x/").prefix == "/x"


def test_the_key_is_sent_as_bearer_and_shown_nowhere() -> None:
    with serve(Fake()) as fake:
        client = Client(fake.url, KEY)
        assert client.get("/health", timeout_seconds=5).ok
        assert fake.seen[0][1]["authorization"] == f"Bearer {KEY}"
        assert KEY not in client.redact(f"said {KEY}")


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY}\r\nX-Evil: 1", f"{KEY} ", f"{KEY}\N{EURO SIGN}"])
def test_a_key_that_is_no_header_is_refused_and_not_shown(run_module: RunModule, key: str) -> None:
    with pytest.raises(UrlError) as why:
        Client("http://127.0.0.1:1", key)
    assert KEY not in str(why.value)
    for main, given in (
        (sglang_health.main, {}),
        (sglang_throughput.main, {}),
        (sglang_answers.main, {"prompts": ["x"]}),
    ):
        code, told = run_module(main, url="http://127.0.0.1:1", api_key=key, **given)
        assert (code, "wanted the API key as one line" in told["msg"]) == (1, True)
        assert KEY not in str(told["msg"])


def test_the_wait_for_an_answer_is_what_the_request_left_of_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request takes 29 of 30 seconds, by a clock that is put forward: no load on this machine adds to them."""

    def late(_fake: Fake, sock: socket.socket, _body: Any) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n")
        time.sleep(5)

    ahead, waits = 0.0, []
    monkeypatch.setattr(http_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))
    with serve(Fake()) as fake:
        fake.routes["/late"] = late
        client = Client(fake.url)
        plain = client._connection

        def slow(seconds: float) -> http.client.HTTPConnection:
            connection = plain(seconds)
            request, answer = connection.request, connection.getresponse

            def dawdle(*words: Any) -> None:
                nonlocal ahead
                request(*words)
                ahead = 29

            def wait() -> http.client.HTTPResponse:
                waits.append(connection.sock.gettimeout())
                return answer()

            connection.request, connection.getresponse = dawdle, wait  # type: ignore[method-assign]
            return connection

        client._connection = slow  # type: ignore[method-assign]
        answer = client.get("/late", timeout_seconds=30)
    assert answer.error == "timeout"
    assert [seconds for seconds in waits if seconds is None or seconds > 1] == []


def test_errors_have_kinds() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    refused = Client(f"http://127.0.0.1:{port}").get("/", timeout_seconds=5)
    assert (refused.status, refused.error) == (0, "refused")
    with serve(Fake()) as fake:
        fake.routes["/silent"] = silence

        def drop(_fake: Fake, sock: socket.socket, _body: Any) -> None:
            sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc")
            sock.shutdown(socket.SHUT_RDWR)

        fake.routes["/drop"] = drop
        client = Client(fake.url)
        assert client.get("/silent", timeout_seconds=0.2).error == "timeout"
        dropped = client.get("/drop", timeout_seconds=5)
        assert (dropped.status, dropped.error) == (0, "reset")


def test_a_trickle_cannot_outlast_the_limit() -> None:
    def trickle(_fake: Fake, sock: socket.socket, _body: Any) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            sock.sendall(b"x")
            time.sleep(0.05)

    with serve(Fake()) as fake:
        fake.routes["/trickle"] = trickle
        answer = Client(fake.url).get("/trickle", timeout_seconds=0.4)
    assert answer.error == "timeout"
    assert answer.seconds < 15


def test_the_second_name_of_a_page_is_tried_on_404() -> None:
    with serve(Fake()) as fake:
        fake.routes["/old"] = page({"a": 1})
        assert Client(fake.url).get_either("/new", "/old", timeout_seconds=5).json() == {"a": 1}


def test_certificates_are_verified(self_signed: tuple[Path, Path]) -> None:
    certificate, key = self_signed
    with serve(Fake(), tls=(certificate, key)) as fake:
        url = fake.url.replace("http:", "https:").replace("127.0.0.1", "localhost")
        unknown = Client(url).get("/health", timeout_seconds=5)
        known = Client(url, ca_path=str(certificate)).get("/health", timeout_seconds=5)
    assert (unknown.status, unknown.error) == (0, "tls")
    assert known.status == 200


@pytest.mark.parametrize("body", [b"<html>Bad gateway</html>", b"[1]", b'{"text": "x"}'])
def test_an_answer_that_is_none_of_sglangs_is_told(run_module: RunModule, body: bytes) -> None:
    with serve(Fake()) as fake:
        fake.routes["/generate"] = page(body)
        code, told = run_module(sglang_answers.main, url=fake.url, prompts=["x"])
    assert code == 1
    assert "wanted JSON with meta_info" in told["msg"]
    assert body.decode()[:5] in told["msg"]
