"""Requests that no HTTP library sends: lengths that lie, wrong encodings, NUL, numbers without end, lone surrogates.

Each case is the bytes of one request on a connection of its own. An answer of 4xx, or of 2xx where the
input is odd but right, is as it should be; so is a connection that is closed without an answer where the request never came to its end.
"""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from itertools import chain, product
from typing import NamedTuple

ANSWER_WITHIN_S = 20.0  # chosen: for a machine that is busy with something else
HELLO = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
CALLS = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"model": "", "prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"model": "", "input": "Hi", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"model": "", "input": "Hi"},
    "/v1/messages": HELLO,
    "/v1/messages/count_tokens": HELLO,
}
"""Good bodies of calls of the model."""
BODY_ROUTES = (*CALLS, "/api/sessions", "/v1/advisories", "/v1/load_lora_adapter")
# JSON, or almost.
VALUES = (
    *(rb"1e999 -1e999 NaN Infinity 18446744073709551616 1e-400 -0 null true [] {} [[[]]]".split()),
    *(rb'"\ud800" "\ud83d\ude00\udfff" "\u0000" {"":""} {"a":1,"a":2}'.split()),
    b"\xff",
    b'"\xed\xa0\x80"',
    b"9" * 5000,
    b"-" + b"9" * 25,
    b"[" * 5000 + b"]" * 5000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
)
FIELDS = {
    "/api/sessions": ({}, "title adapter"),
    "/v1/advisories": (
        {"session_id": "s"},
        "session_id model expected_arrival_s ttl_s priority draft actions",
    ),
    "/v1/load_lora_adapter": (
        {"lora_name": "x", "lora_path": "/nowhere"},
        "lora_name lora_path load_inplace",
    ),
    "/v1/unload_lora_adapter": ({"lora_name": "x", "lora_path": "/nowhere"}, "lora_name lora_int_id"),
}
"""A good body, or almost, and the fields of which each takes each of VALUES in turn."""
CALL_FIELDS = (
    "model messages prompt input max_tokens max_output_tokens temperature seed stop stream stream_options session_id priority "
    "kv_hints tools tool_choice response_format structured_outputs logit_bias previous_response_id system thinking metadata n "
    "chat_template_kwargs truncate_prompt_tokens text"
)


class Case(NamedTuple):
    """One request. may_close: whether the server may close the connection without an answer."""

    name: str
    data: bytes
    may_close: bool = False
    is_cut: bool = False


class Outcome(NamedTuple):
    """The outcome of a case. `status` is None if the connection was closed without an answer, and 0 if nothing came in time."""

    case: Case
    status: int | None

    @property
    def is_fine(self) -> bool:
        """Whether the server behaved as it should."""
        if self.status is None:
            return self.case.may_close
        return 200 <= self.status < 500


def cases(key: str) -> Iterator[Case]:
    """Return all cases. `key` is an API key that the server accepts."""
    authorization = f"Authorization: Bearer {key}\r\n".encode()
    for case in chain(
        _framing(), _encodings(), _paths(), _queries(), _values_of_heads(), _heads(), _upgrades(), _bodies()
    ):
        # The key goes in behind the request line, so that what follows is reached.
        line, end, rest = case.data.partition(b"\r\n")
        yield case._replace(data=line + end + authorization + rest)


def play(port: int, case: Case) -> Outcome:
    """Send a case to the server on this port of 127.0.0.1 and wait for the status of its first answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_WITHIN_S) as connection:
        try:
            connection.sendall(case.data)
            if case.is_cut:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was closed already; an answer may still be there
        head = b""
        try:
            while b"\r\n" not in head or head.startswith(b"HTTP/1.1 100 "):
                more = connection.recv(4096)
                if not more:
                    return Outcome(case, None)
                head += more
                if head.startswith(b"HTTP/1.1 100 ") and b"\r\n\r\n" in head:
                    head = head.partition(b"\r\n\r\n")[2]
        except TimeoutError:
            return Outcome(case, 0)
        except OSError:
            return Outcome(case, None)
    return Outcome(case, int(head.split()[1]))


def _request(
    method: str, target: str | bytes, head: bytes = b"", body: bytes = b"", length: object = None
) -> bytes:
    """length: what Content-Length says; None: the truth, and nothing for a GET."""
    if length is None and method != "GET":
        length = len(body)
    length_line = f"Content-Length: {length}\r\n".encode() if length is not None else b""
    target = target if isinstance(target, bytes) else target.encode()
    line = method.encode() + b" " + target + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    return line + length_line + head + b"\r\n" + body


def _get(name: str, target: str | bytes, head: bytes = b"", *, may_close: bool = False) -> Case:
    return Case(name, _request("GET", target, head), may_close)


def _post(
    name: str, path: str, body: bytes, head: str | bytes = b"", length: object = None, **case: bool
) -> Case:
    lines = head if isinstance(head, bytes) else f"{head}\r\n".encode()
    if b"Content-Type" not in lines:
        lines = b"Content-Type: application/json\r\n" + lines
    return Case(f"{name}: POST {path}", _request("POST", path, lines, body, length), **case)


BODY_PATHS = ("/v1/chat/completions", "/v1/messages", "/api/sessions")


def _framing() -> Iterator[Case]:
    """Lengths of the body that are not true."""
    hello = json.dumps(HELLO).encode()
    gone = {"may_close": True, "is_cut": True}
    for path in BODY_PATHS:
        yield _post("length too long", path, hello, length=len(hello) + 50, **gone)
        yield _post("length too short", path, hello, length=5)
        for wrong in (-1, *"abc +5 0x10 1e3".split(), "5, 6", "", 10**30, "9" * 5000, "\u0665"):
            yield _post(f"length {str(wrong)[:20]!r}", path, hello, length=wrong, **gone)
        yield _post("two lengths", path, hello, "Content-Length: 7", **gone)
        chunked = b"Transfer-Encoding: chunked\r\n"
        yield _post("length and chunks", path, b"0\r\n\r\n", chunked, length=5)
        for body in (
            b"zz\r\n{}\r\n0\r\n\r\n",
            b"-1\r\n{}\r\n",
            b"5\r\n{}",
            b"2\r\n{}0\r\n\r\n",
            b"f" * 40 + b"\r\n",
        ):
            line = f"Content-Length: {len(body)}\r\n".encode()
            data = _request("POST", path, chunked, body).replace(line, b"")
            yield Case(f"chunks {body[:12]!r}: POST {path}", data, **gone)


def _encodings() -> Iterator[Case]:
    """Encodings of the body that are not true, and such as hold much."""
    hello = json.dumps(HELLO).encode()
    for path in BODY_PATHS:
        for encoding in (*"gzip deflate br zstd compress x-none".split(), "gzip, gzip", "\x00"):
            yield _post(f"not {encoding!r}", path, hello, f"Content-Encoding: {encoding}", may_close=True)
        bomb = gzip.compress(b"[" * 30_000_000, 9)
        yield _post("gzip bomb", path, bomb, "Content-Encoding: gzip", may_close=True)
        yield _post("deflated", path, zlib.compress(b'{"title":5}'), "Content-Encoding: deflate")
        cut = gzip.compress(hello)[:-12]
        yield _post("cut gzip", path, cut, "Content-Encoding: gzip", may_close=True)
        for encoding in ("utf-16", "utf-32", "utf-8-sig", "latin-1"):
            text = '{"title": "é"}'.encode(encoding)
            yield _post(encoding, path, text, f"Content-Type: application/json; charset={encoding}")
        yield _post("no such charset", path, hello, "Content-Type: application/json; charset=nonsense")
        yield _post("odd type", path, hello, 'Content-Type: multipart/form-data; boundary="')
        yield _post("expects what is not offered", path, hello, "Expect: the-impossible")
        yield _post("expects to go on", path, hello, "Expect: 100-continue")


def _paths() -> Iterator[Case]:
    odd = "%00 %ff %ed%a0%80 % %zz %2e%2e%2f %f0%9f%98%80 %0d%0aX:%20y ; %25%30".split()
    routes = (
        "GET /api/sessions/{}",
        "DELETE /api/sessions/{}",
        "POST /api/sessions/{}/restore",
        "GET /v1/models/{}",
        "POST /v1/adapters/{}/pin",
        "DELETE /v1/adapters/{}/pin",
        "GET /v1/advisories/{}",
        "DELETE /v1/advisories/{}",
        "GET /static/{}",
        "GET /{}",
    )
    for text, route in product((*odd, "a" * 7000, "a" * 60_000), routes):
        method, _, path = route.partition(" ")
        yield Case(f"path {text[:12]!r}: {route}", _request(method, path.format(text)), may_close=True)
    for target in (b"/api/sessions/\x00", b"/api/sessions/\xff\xfe", b"/static/\x7f", b""):
        yield _get(f"target {target!r}", target, may_close=True)
    for target in "* http://[/ //x ? http://127.0.0.1/healthz http://other.example/healthz //other.example/healthz".split():
        yield _get(f"target {target}", target, may_close=True)


def _queries() -> Iterator[Case]:
    numbers = "-1 0 1 200 201 1e3 1.0 +5 %2B5 0x10 %D9%A1 %00 NaN 1_0".split()
    for path, number in product(("/api/sessions", "/v1/engine/state"), (*numbers, "9" * 5000, "")):
        yield _get(f"limit={number[:12]}: {path}", f"{path}?limit={number}")
    texts = "%00 %ff %ed%a0%80 %22 * NEAR(a a%22%20OR%20%22b - %5C %25_ %f0%9f%98%80".split()
    for field, text in product(("q", "before"), (*texts, "x" * 7000)):
        yield _get(f"{field}={text[:12]}", f"/api/sessions?{field}={text}")
    for cursor in ("WzEsMl0", "W10", "bnVsbA", "WzFlOTk5LCJhIl0", "WyJ4Iiwi_yJd", "=" * 50):
        yield _get(f"before={cursor[:12]}", f"/api/sessions?before={cursor}")
    yield _get("limit twice", "/api/sessions?limit=1&limit=x&&=&%")


def _values_of_heads() -> Iterator[Case]:
    values = (
        *b"\xff\xfe \xed\xa0\x80 \xc3\xa9 \x7f '\";-- %00".split(),
        b"",
        b" ",
        b"x" * 4000,
        b"a b",
        b"\t",
    )
    names = (
        b"X-Session-Id X-Request-Id X-Agent-Name X-Workflow-Id Authorization X-Api-Key Origin Accept Cookie"
    )
    body = json.dumps(HELLO).encode()
    for name, value, path in product(names.split(), values, ("/v1/chat/completions", "/v1/messages")):
        head = name + b": " + value + b"\r\n"
        yield _post(f"{name.decode()}={value[:8]!r}", path, body, head, may_close=True)


def _heads() -> Iterator[Case]:
    """Request lines and heads that are none."""
    begin = b"GET /api/sessions HTTP/1.1\r\n"
    two_hosts = b"127.0.0.1\r\nHost: 127.0.0.2"
    for host in (b"", b"[", b"a b", b"\xff", b"127.0.0.1:99999999", b"x" * 3000, two_hosts):
        yield Case(f"host {host[:12]!r}", begin + b"Host: " + host + b"\r\n\r\n", may_close=True)
    yield Case("no host", begin + b"\r\n", may_close=True)
    yield Case("nothing but line ends", b"\r\n" * 10_000, may_close=True)
    lines = (b"GET /healthz", b"GET /healthz HTTP/9.9", b"get /healthz HTTP/1.1", b"GET  /healthz  HTTP/1.1")
    for line in (*lines, b"\x16\x03\x01", b"A" * 9000):
        yield Case(f"line {line[:16]!r}", line + b"\r\nHost: 127.0.0.1\r\n\r\n", may_close=True)
    heads = (b"NoColon", b": empty", b"X : y", b" X: y", b"X: a\x00b", b"X: a\n Y: b")
    for head in (*heads, b"X: " + b"y" * 70_000, b"A: b\r\n" * 3000):
        data = begin + b"Host: 127.0.0.1\r\n" + head + b"\r\n\r\n"
        yield Case(f"head {head[:10]!r}", data, may_close=True)


def _upgrades() -> Iterator[Case]:
    upgrade = b"Upgrade: websocket\r\n"
    versions = upgrade + b"Connection: Upgrade\r\nSec-WebSocket-Version: "
    for head in (b"", upgrade, versions + b"1\r\n"):
        yield _get(f"upgrade {head[:30]!r}", "/ws", head)
    for value in (b"", b"x", b"\xff" * 16, b"A" * 4000):
        head = versions + b"13\r\nSec-WebSocket-Key: " + value + b"\r\n"
        yield _get(f"socket key {value[:8]!r}", "/ws", head, may_close=True)


def _bodies() -> Iterator[Case]:
    """JSON, or almost, in every place that takes a body."""
    for path, value in product(BODY_ROUTES, VALUES):
        yield _post(f"body {value[:16]!r}", path, value)
    for value in (b"[" * 100_000, b'{"model":"","messages":[],"seed":' + b"9" * 100_000 + b"}"):
        yield _post(f"long body {value[-16:]!r}", "/v1/chat/completions", value)
    bodies = {path: (base, CALL_FIELDS) for path, base in CALLS.items()} | FIELDS
    for path, (base, names) in bodies.items():
        for field, value in product(names.split(), VALUES):
            rest = {name: kept for name, kept in base.items() if name != field}
            others = b"".join(
                b",%b:%b" % (json.dumps(name).encode(), json.dumps(kept).encode())
                for name, kept in rest.items()
            )
            # The field's value is written as it stands.
            yield _post(f"{field}={value[:16]!r}", path, b'{"%b":%b%b}' % (field.encode(), value, others))
