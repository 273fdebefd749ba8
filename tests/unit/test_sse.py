"""The stream parser: exact counts however the bytes are cut."""

from __future__ import annotations

import random

import pytest
from ansible.module_utils.sm120.sse import Stream, StreamError
from fake_sglang import DONE, HEAD, chunk, event, page, stream, whole

BUFFER = bytearray(1 << 18)
VIEW = memoryview(BUFFER)


def feed(parser: Stream, data: bytes, now: float = 1.0) -> bool:
    BUFFER[: len(data)] = data
    return parser.feed(BUFFER, VIEW, len(data), now)


def read(pieces: list[bytes]) -> Stream:
    parser = Stream(started=0.0)
    for index, piece in enumerate(pieces):
        if feed(parser, piece, float(index + 1)):
            break
    parser.finish()
    return parser


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = [*sorted(at), len(data)]
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False) if b > a]


@pytest.mark.parametrize("api", ["generate", "completions"])
def test_one_event_per_read_is_one_record_per_token(api: str) -> None:
    parser = read([HEAD, *(chunk(one) for one in stream(7, api=api))])
    assert parser.error is None
    assert list(parser.counts) == [1, 2, 3, 4, 5, 6, 7]
    assert list(parser.times) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert parser.latency == 9.0  # [DONE] included
    assert parser.usage["completion_tokens"] == 7
    assert parser.usage["prompt_tokens"] == 4


@pytest.mark.parametrize("api", ["generate", "completions"])
def test_every_single_cut_gives_the_same_counts(api: str) -> None:
    data = whole(stream(12, api=api))
    for position in range(1, len(data)):
        parser = read(cut(data, [position]))
        assert parser.error is None, position
        assert parser.last_count == 12, position


def test_byte_by_byte_sees_every_token() -> None:
    data = whole(stream(12))
    parser = read([data[i : i + 1] for i in range(len(data))])
    assert parser.error is None
    assert list(parser.counts) == list(range(1, 13))


def test_random_cuts_and_foreign_chunk_sizes() -> None:
    rng = random.Random(3)  # noqa: S311 - reproducible cuts
    for _ in range(200):
        body = b"".join(stream(130, step=rng.choice([1, 3])))
        # A proxy may cut the chunks where it likes, in the middle of a number too.
        chunks = cut(body, [rng.randrange(1, len(body)) for _ in range(rng.randrange(40))])
        data = HEAD + b"".join(chunk(piece) for piece in chunks) + b"0\r\n\r\n"
        parser = read(cut(data, [rng.randrange(1, len(data)) for _ in range(rng.randrange(60))]))
        assert parser.error is None
        assert parser.last_count == 130
        assert list(parser.counts) == sorted(set(parser.counts))


def test_a_body_without_chunks() -> None:
    data = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(stream(5))
    parser = read(cut(data, list(range(30, len(data), 17))))
    assert parser.error is None
    assert parser.last_count == 5


def test_text_cannot_fake_the_count() -> None:
    fake = '"completion_tokens":99}}\n\ndata: [DONE]'
    parser = read([HEAD, chunk(event(1, 2, text=fake)), chunk(event(2, 2, text=fake)), chunk(DONE)])
    assert parser.error is None
    assert list(parser.counts) == [1, 2]


def test_several_tokens_in_one_event() -> None:
    parser = read([HEAD, *(chunk(one) for one in stream(10, step=4))])
    assert list(parser.counts) == [4, 8, 10]


@pytest.mark.parametrize("space", [b"", b" "])
def test_a_last_event_with_other_empty_fields_is_still_the_last(space: bytes) -> None:
    def one(count: int, finish: bytes) -> bytes:
        parts = (b'"finish_reason":', finish, b', "matched_stop":', b"null", b', "completion_tokens":')
        return (
            b'data: {"text": "a", "meta_info": {'
            + b"".join(part + space if part.endswith(b":") else part for part in parts)
            + b'%d, "cached_tokens": 0}}\n\n' % count
        )

    last = one(2, b'{"type": "length", "matched": null}')
    parser = read([HEAD, chunk(one(1, b"null")), chunk(last), chunk(DONE)])
    assert parser.error is None
    assert parser.usage["finish_reason"] == "length"
    assert list(parser.counts) == [1, 2]


def test_a_stream_that_breaks_off_is_an_error_with_its_count() -> None:
    parser = read([HEAD, *(chunk(one) for one in stream(9)[:3])])
    assert parser.error is not None
    assert "after 3 tokens" in parser.error


def test_an_http_error_is_kept() -> None:
    parser = read([page({"error": "no"}, 400)])
    assert parser.status == 400
    assert parser.error is not None
    assert "HTTP 400" in parser.error
    assert "no" in parser.error


def test_an_error_event_is_kept() -> None:
    bad = b'data: {"error": {"message": "boom"}}\n\n'
    parser = read([HEAD, chunk(event(1, 5)), chunk(bad), chunk(DONE)])
    assert parser.error is not None
    assert "boom" in parser.error


def test_text_without_running_counts_is_refused() -> None:
    blind = b'data: {"choices": [{"text": "a"}], "usage": null}\n\n'
    final = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\n'
    parser = read([HEAD, chunk(blind), chunk(blind), chunk(final), chunk(DONE)])
    assert parser.error is not None
    assert "api=generate" in parser.error


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH_9\r\n\r\n", b"x" * 70000])
def test_what_is_no_http_is_said(data: bytes) -> None:
    with pytest.raises(StreamError):
        feed(Stream(), data)


def test_a_broken_chunk_size_is_said() -> None:
    parser = Stream()
    with pytest.raises(StreamError):
        feed(parser, HEAD + b"zz\r\nabc\r\n")
