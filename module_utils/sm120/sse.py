"""One streamed answer of SGLang, read as it arrives: exact token counts and times, at the price of one
search per read."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

# Both APIs carry the running count under this name. A prompt or an answer cannot fake it: inside JSON text
# its quotes are escaped, so these bytes only ever stand for the field.
COUNT = b'"completion_tokens":'
FINISH = b'"finish_reason":'  # null until the last event
FINISH_NULL_BYTES = len(FINISH) + len(b" null")
END_OF_EVENT = b"\n\n"
END_OF_STREAM = b"data: [DONE]"
# The chunk framing of one whole event as uvicorn sends it: payload ends in an empty line, then the chunk's
# own CRLF.
END_OF_CHUNK = b"\n\n\r\n"
NUMBER = re.compile(rb" ?\d+")
COUNT_BYTES = len(COUNT)


class StreamError(Exception):
    """The answer cannot be used; the message says why."""


class Stream:
    """Feed it what was received; when `done`, `times`/`counts` hold one entry per read that brought
    tokens."""

    __slots__ = (
        "_chunked",
        "_events",
        "_head",
        "_last_event",
        "_raw",
        "_uncounted",
        "counts",
        "done",
        "error",
        "last_count",
        "latency",
        "started",
        "status",
        "times",
        "usage",
    )

    def __init__(self, started: float = 0.0) -> None:
        self.started = started
        self.times = array("d")
        self.counts = array("l")
        self.last_count = 0
        self.latency = 0.0
        self.status = 0
        self.error: str | None = None
        self.usage: dict[str, Any] = {}
        self.done = False
        self._head = True
        self._chunked = False
        self._raw = b""  # received, not yet a whole chunk
        self._events = b""  # out of the chunks, not yet a whole event
        self._last_event = b""
        self._uncounted = False  # text came without a running count

    def feed(self, buffer: bytearray, view: memoryview, size: int, now: float) -> bool:
        """Take the first `size` bytes of `buffer` (and `view`, the same memory). True when the answer
        has ended."""
        if self._chunked and not self._raw and not self._events and buffer.endswith(END_OF_CHUNK, 0, size):
            # Nearly every read: one whole chunk that is one whole event. Proved by the chunk's own size, so
            # the search below cannot meet a number that a chunk's border cuts in two.
            line = buffer.find(b"\r\n", 0, 10)
            at = buffer.rfind(COUNT, 0, size)
            if line > 0 and at > 0:
                try:
                    count = int(buffer[at + COUNT_BYTES : buffer.find(b",", at, size)])
                    whole = int(buffer[:line], 16) == size - line - 4
                except ValueError:  # the count stands last in its object, or this is no chunk
                    whole = False
                if whole:
                    self._note(count, now)
                    # Only the last event is read again, and to copy every one costs more than this search.
                    finish = buffer.rfind(FINISH, 0, at)
                    if buffer.find(b"null", finish, finish + FINISH_NULL_BYTES) < 0:
                        self._last_event = bytes(view[:size])
                    return False
        return self._feed_slowly(bytes(view[:size]), now)

    def _note(self, count: int, now: float) -> None:
        if count > self.last_count:
            self.times.append(now)
            self.counts.append(count)
            self.last_count = count
        self.latency = now - self.started

    def _feed_slowly(self, data: bytes, now: float) -> bool:
        """Any split of anything: head, chunk sizes, events, the end mark."""
        self._raw += data
        if self._head:
            if not self._take_head():
                return self.done
            if self.status != 200:
                return False  # an error's body runs to the end of the connection
        if self._chunked:
            self._unchunk()
        else:
            self._events += self._raw
            self._raw = b""
        self._take_events(now)
        return self.done

    def _take_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > 65536:
                raise StreamError("no HTTP answer: 64 KiB without an end of header")
            return False
        head = self._raw[:end].lower()
        if not head.startswith(b"http/1.") or not head[9:12].isdigit():
            raise StreamError(f"no HTTP answer: {self._raw[:40]!r}")
        self.status = int(head[9:12])
        self._chunked = b"transfer-encoding: chunked" in head
        self._head = False
        self._raw = self._raw[end + 4 :]
        return True

    def _unchunk(self) -> None:
        raw, at, out = self._raw, 0, []
        while True:
            line = raw.find(b"\r\n", at, at + 24)
            if line < 0:
                break
            try:
                size = int(raw[at:line].split(b";", 1)[0], 16)
            except ValueError:
                raise StreamError(f"broken chunk size {raw[at:line][:20]!r}") from None
            if len(raw) < line + 2 + size + 2:
                break
            out.append(raw[line + 2 : line + 2 + size])
            at = line + 2 + size + 2
        if at:
            self._raw = raw[at:]
            self._events += b"".join(out)

    def _take_events(self, now: float) -> None:
        end = self._events.rfind(END_OF_EVENT)
        if end < 0:
            return
        whole = self._events[:end]
        self._events = self._events[end + 2 :]
        at = whole.rfind(COUNT)
        if at >= 0:
            found = NUMBER.match(whole, at + COUNT_BYTES)
            self._note(int(found[0]) if found else 0, now)
            self._last_event = whole + END_OF_EVENT
        else:
            self.latency = now - self.started
            self._uncounted = self._uncounted or b'"text":' in whole
            if not self._last_event or b'"error"' in whole:
                self._last_event = whole + END_OF_EVENT
        if whole.endswith(END_OF_STREAM):
            self.done = True

    def finish(self) -> None:
        """After the end: read the last event once and hold the counts against it. Sets `usage` or `error`."""
        if self.error:
            return
        if self.status != 200:
            body = (self._raw or self._events)[:300].decode("utf-8", "replace").strip()
            self.error = f"HTTP {self.status}: {body}" if self.status else "no answer"
            return
        if not self.done:
            self.error = f"the answer broke off after {self.last_count} tokens"
            return
        event = self._final_event()
        if event is None:
            self.error = "the stream held no event with a token count"
        elif "error" in event:
            self.error = f"error in the stream: {json.dumps(event['error'])[:300]}"
        else:
            self.usage = _usage(event)
            counted = self.usage["completion_tokens"]
            if self._uncounted:
                self.error = (
                    "this server's stream carries text without a running token count "
                    "(continuous_usage_stats); measure it with api=generate"
                )
            elif counted != self.last_count:
                self.error = f"the last event counts {counted} tokens, the stream showed {self.last_count}"
        self._last_event = b""

    def _final_event(self) -> dict[str, Any] | None:
        for part in reversed(self._last_event.split(END_OF_EVENT)):
            begin = part.find(b"data: {")
            if begin < 0:
                continue
            end = part.rfind(b"}")
            try:
                event = json.loads(part[begin + 6 : end + 1])
            except ValueError:
                continue
            if isinstance(event, dict) and ("error" in event or COUNT in part):
                return event
        return None


def _usage(event: dict[str, Any]) -> dict[str, Any]:
    """Token counts and the reason of the end, from either API's event."""
    if "meta_info" in event:
        meta = event["meta_info"]
        reason = meta.get("finish_reason") or {}
        return {
            "completion_tokens": int(meta["completion_tokens"]),
            "prompt_tokens": int(meta.get("prompt_tokens") or 0),
            "cached_tokens": int(meta.get("cached_tokens") or 0),
            "finish_reason": reason.get("type"),
        }
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return {
        "completion_tokens": int(usage.get("completion_tokens") or 0),
        "prompt_tokens": int(usage.get("prompt_tokens") or 0),
        "cached_tokens": int(details.get("cached_tokens") or 0),
        "finish_reason": None,
    }
