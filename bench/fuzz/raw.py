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
from typing import NamedTuple

ANSWER_WITHIN_S = 20.0  # chosen: for a machine that is busy with something else
MODEL_CALLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
BODY_ROUTES = (*MODEL_CALLS, "/api/sessions", "/v1/advisories", "/v1/load_lora_adapter")
# JSON, or almost.
VALUES = (
    b"\xff",
    b'"\\ud800"',
    b'"\\ud83d\\ude00\\udfff"',
    b'"\xed\xa0\x80"',
    b'"\\u0000"',
    b"1e999",
    b"-1e999",
    b"NaN",
    b"Infinity",
    b"9" * 5000,
    b"-" + b"9" * 25,
    b"18446744073709551616",
    b"1e-400",
    b"-0",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"[[[]]]",
    b'{"":""}',
    b'{"a":1,"a":2}',
    b"[" * 5000 + b"]" * 5000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
)
FIELDS = {
    "/api/sessions": ("title", "adapter"),
    "/v1/advisories": (
        "session_id",
        "model",
        "expected_arrival_s",
        "ttl_s",
        "priority",
        "draft",
        "actions",
    ),
    "/v1/load_lora_adapter": ("lora_name", "lora_path", "load_inplace"),
    "/v1/unload_lora_adapter": ("lora_name", "lora_int_id"),
}
CALL_FIELDS = (
    "model messages prompt input max_tokens max_output_tokens temperature seed stop stream stream_options session_id priority "
    "kv_hints tools tool_choice response_format structured_outputs logit_bias previous_response_id system thinking metadata n "
    "chat_template_kwargs truncate_prompt_tokens text"
).split()


class Case(NamedTuple):
    """One request. may_close: the server need not answer. is_cut: the client goes when it has sent this, before what it announced is whole."""

    name: str
    data: bytes
    may_close: bool = False
    is_cut: bool = False


class Outcome(NamedTuple):
    """What came of a case. status: None where the connection was closed without an answer; 0: nothing came in time."""

    case: Case
    status: int | None

    @property
    def is_fine(self) -> bool:
        if self.status is None:
            return self.case.may_close
        return 200 <= self.status < 500


def cases(key: str) -> Iterator[Case]:
    """All of them. key: an API key that the server takes."""
    authorization = f"Authorization: Bearer {key}\r\n".encode()
    for case in (
        *_framing(),
        *_paths(),
        *_queries(),
        *_values_of_heads(),
        *_heads(),
        *_upgrades(),
        *_bodies(),
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


def _post(
    name: str,
    path: str,
    body: bytes,
    head: bytes = b"",
    *,
    length: object = None,
    may_close: bool = False,
    is_cut: bool = False,
) -> Case:
    if b"Content-Type" not in head:
        head = b"Content-Type: application/json\r\n" + head
    return Case(f"{name}: POST {path}", _request("POST", path, head, body, length), may_close, is_cut)


def _framing() -> Iterator[Case]:
    """Lengths and encodings of the body that are not true."""
    hello = json.dumps(
        {"model": "", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    ).encode()
    chunked = b"Transfer-Encoding: chunked\r\n"
    for path in ("/v1/chat/completions", "/v1/messages", "/api/sessions"):
        yield _post("length too long", path, hello, length=len(hello) + 50, may_close=True, is_cut=True)
        yield _post("length too short", path, hello, length=5)
        for wrong in (-1, "abc", "+5", "0x10", "1e3", "5, 6", "", 10**30, "9" * 5000, "\u0665"):
            yield _post(f"length {str(wrong)[:20]!r}", path, hello, length=wrong, may_close=True, is_cut=True)
        yield _post("two lengths", path, hello, b"Content-Length: 7\r\n", may_close=True, is_cut=True)
        yield _post("length and chunks", path, b"0\r\n\r\n", chunked, length=5)
        for body in (
            b"zz\r\n{}\r\n0\r\n\r\n",
            b"-1\r\n{}\r\n",
            b"5\r\n{}",
            b"2\r\n{}0\r\n\r\n",
            b"f" * 40 + b"\r\n",
        ):
            data = _request("POST", path, chunked, body).replace(
                f"Content-Length: {len(body)}\r\n".encode(), b""
            )
            yield Case(f"chunks {body[:12]!r}: POST {path}", data, may_close=True, is_cut=True)
        for encoding in ("gzip", "deflate", "br", "zstd", "compress", "x-none", "gzip, gzip", "\x00"):
            head = f"Content-Encoding: {encoding}\r\n".encode()
            yield _post(f"not {encoding!r}", path, hello, head, may_close=True)
        bomb = gzip.compress(b"[" * 30_000_000, 9)
        yield _post("gzip bomb", path, bomb, b"Content-Encoding: gzip\r\n", may_close=True)
        yield _post("deflated", path, zlib.compress(b'{"title":5}'), b"Content-Encoding: deflate\r\n")
        yield _post(
            "cut gzip", path, gzip.compress(hello)[:-12], b"Content-Encoding: gzip\r\n", may_close=True
        )
        for encoding in ("utf-16", "utf-32", "utf-8-sig", "latin-1"):
            text = '{"title": "é"}'.encode(encoding)
            yield _post(
                encoding, path, text, f"Content-Type: application/json; charset={encoding}\r\n".encode()
            )
        yield _post("no such charset", path, hello, b"Content-Type: application/json; charset=nonsense\r\n")
        yield _post("odd type", path, hello, b'Content-Type: multipart/form-data; boundary="\r\n')
        yield _post("expects what is not offered", path, hello, b"Expect: the-impossible\r\n")
        yield _post("expects to go on", path, hello, b"Expect: 100-continue\r\n")


def _paths() -> Iterator[Case]:
    odd = [
        "%00",
        "%ff",
        "%ed%a0%80",
        "%",
        "%zz",
        "%2e%2e%2f",
        "a" * 7000,
        "%f0%9f%98%80",
        "%0d%0aX:%20y",
        ";",
        "%25%30",
    ]
    for text in odd:
        for method, path in (
            ("GET", "/api/sessions/{}"),
            ("DELETE", "/api/sessions/{}"),
            ("POST", "/api/sessions/{}/restore"),
            ("GET", "/v1/models/{}"),
            ("POST", "/v1/adapters/{}/pin"),
            ("DELETE", "/v1/adapters/{}/pin"),
            ("GET", "/v1/advisories/{}"),
            ("DELETE", "/v1/advisories/{}"),
            ("GET", "/static/{}"),
            ("GET", "/{}"),
        ):
            target = path.format(text)
            yield Case(f"path {text[:12]!r}: {method} {path}", _request(method, target), may_close=True)
    for target in (
        b"/api/sessions/\x00",
        b"/api/sessions/\xff\xfe",
        b"/static/\x7f",
        b"*",
        b"",
        b"http://[/",
        b"//x",
        b"?",
    ):
        yield Case(f"target {target!r}", _request("GET", target), may_close=True)
    for target in ("http://127.0.0.1/healthz", "http://other.example/healthz", "//other.example/healthz"):
        yield Case(f"target {target}", _request("GET", target), may_close=True)


def _queries() -> Iterator[Case]:
    numbers = [
        "-1",
        "0",
        "1",
        "200",
        "201",
        "1e3",
        "1.0",
        "+5",
        "%2B5",
        "0x10",
        "9" * 5000,
        "%D9%A1",
        "",
        "%00",
        "NaN",
        "1_0",
    ]
    for path in ("/api/sessions", "/v1/engine/state"):
        for number in numbers:
            yield Case(f"limit={number[:12]}: {path}", _request("GET", f"{path}?limit={number}"))
    texts = [
        "%00",
        "%ff",
        "%ed%a0%80",
        "%22",
        "*",
        "NEAR(a",
        "a%22%20OR%20%22b",
        "-",
        "%5C",
        "%25_",
        "x" * 7000,
        "%f0%9f%98%80",
    ]
    for text in texts:
        yield Case(f"q={text[:12]}", _request("GET", f"/api/sessions?q={text}"))
        yield Case(f"before={text[:12]}", _request("GET", f"/api/sessions?before={text}"))
    for cursor in ("WzEsMl0", "W10", "bnVsbA", "WzFlOTk5LCJhIl0", "WyJ4Iiwi_yJd", "=" * 50):
        yield Case(f"before={cursor[:12]}", _request("GET", f"/api/sessions?before={cursor}"))
    yield Case("limit twice", _request("GET", "/api/sessions?limit=1&limit=x&&=&%"))


def _values_of_heads() -> Iterator[Case]:
    body = json.dumps(
        {"model": "", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    ).encode()
    values = [
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"",
        b" ",
        b"x" * 4000,
        b"\xc3\xa9",
        b"a b",
        b"\x7f",
        b"'\";--",
        b"\t",
        b"%00",
    ]
    names = (
        "X-Session-Id",
        "X-Request-Id",
        "X-Agent-Name",
        "X-Workflow-Id",
        "Authorization",
        "X-Api-Key",
        "Origin",
        "Accept",
        "Cookie",
    )
    for name in names:
        for value in values:
            for path in ("/v1/chat/completions", "/v1/messages"):
                head = name.encode() + b": " + value + b"\r\n"
                yield _post(f"{name}={value[:8]!r}", path, body, head, may_close=True)


def _heads() -> Iterator[Case]:
    """Request lines and heads that are none."""
    for host in (
        b"",
        b"[",
        b"a b",
        b"\xff",
        b"127.0.0.1:99999999",
        b"x" * 3000,
        b"127.0.0.1\r\nHost: 127.0.0.2",
    ):
        yield Case(
            f"host {host[:12]!r}",
            b"GET /api/sessions HTTP/1.1\r\nHost: " + host + b"\r\n\r\n",
            may_close=True,
        )
    yield Case("no host", b"GET /api/sessions HTTP/1.1\r\n\r\n", may_close=True)
    for line in (
        b"GET /healthz HTTP/9.9",
        b"GET /healthz",
        b"get /healthz HTTP/1.1",
        b"\x16\x03\x01",
        b"A" * 9000,
        b"GET  /healthz  HTTP/1.1",
    ):
        yield Case(f"line {line[:16]!r}", line + b"\r\nHost: 127.0.0.1\r\n\r\n", may_close=True)
    for head in (
        b"X: " + b"y" * 70_000,
        b"NoColon",
        b": empty",
        b"X : y",
        b" X: y",
        b"X: a\x00b",
        b"X: a\n Y: b",
        b"A: b\r\n" * 3000,
    ):
        yield Case(
            f"head {head[:10]!r}",
            b"GET /api/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n\r\n",
            may_close=True,
        )


def _upgrades() -> Iterator[Case]:
    for head in (
        b"",
        b"Upgrade: websocket\r\n",
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 1\r\n",
    ):
        yield Case(f"upgrade {head[:30]!r}", _request("GET", "/ws", head))
    key = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
    for value in (b"", b"x", b"\xff" * 16, b"A" * 4000):
        yield Case(f"socket key {value[:8]!r}", _request("GET", "/ws", key + value + b"\r\n"), may_close=True)


def _bodies() -> Iterator[Case]:
    """JSON, or almost, in every place that takes a body."""
    for path in BODY_ROUTES:
        for value in VALUES:
            yield _post(f"body {value[:16]!r}", path, value)
    yield from _fields_of_calls()
    for path, names in FIELDS.items():
        base = (
            {"session_id": "s"}
            if path == "/v1/advisories"
            else {"lora_name": "x", "lora_path": "/nowhere"}
            if "lora" in path
            else {}
        )
        for field in names:
            for value in VALUES:
                yield _field(path, base, field, value)


def _fields_of_calls() -> Iterator[Case]:
    for path in MODEL_CALLS:
        start = {
            "model": "",
            "messages": [{"role": "user", "content": "Hi"}],
            "prompt": "Hi",
            "input": "Hi",
            "max_tokens": 1,
            "max_output_tokens": 1,
        }
        wanted = {
            "/v1/completions": ("model", "prompt", "max_tokens"),
            "/v1/responses": ("model", "input", "max_output_tokens"),
        }.get(path, ("model", "messages", "max_tokens"))
        base = {name: start[name] for name in wanted}
        for field in CALL_FIELDS:
            for value in VALUES:
                yield _field(path, base, field, value)


def _field(path: str, base: dict[str, object], field: str, value: bytes) -> Case:
    """A body whose one field has this value, written as it stands."""
    rest = {name: kept for name, kept in base.items() if name != field}
    text = (
        b'{"'
        + field.encode()
        + b'":'
        + value
        + b"".join(
            b"," + json.dumps(name).encode() + b":" + json.dumps(kept).encode() for name, kept in rest.items()
        )
        + b"}"
    )
    return _post(f"{field}={value[:16]!r}", path, text)
