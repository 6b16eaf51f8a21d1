"""Attacks of one client, as data: what each sends, and what it then waits for. Loopback only; each is bounded in number and time.

A case is a coroutine that gets an `Attacker` and returns what came: HTTP statuses, or words such as "closed" for connections.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MODEL = "overture-demo"
HELLO = [{"role": "user", "content": "Hello!"}]
LIMIT_S = 60.0
MIB = 1 << 20

Outcome = list[int | str]
Attack = Callable[["Attacker"], Awaitable[Outcome]]


@dataclass
class Attacker:
    """A client that means harm. http: with its key. port: of the server."""

    http: aiohttp.ClientSession
    port: int
    key: str
    answers: list[str] = field(default_factory=list)

    async def post(self, path: str, body: Any, **options: Any) -> int | str:
        """The status of one call, its body read; "cut" where the server closed the connection. body: bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        try:
            async with self.http.post(path, data=data, headers=headers, **options) as reply:
                text = await reply.read()
                self.answers.append(text[:300].decode(errors="replace"))
                return reply.status
        except (aiohttp.ClientError, ConnectionError) as error:
            self.answers.append(type(error).__name__)
            return "cut"

    async def chat(self, **fields: Any) -> int | str:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 16} | fields
        return await self.post("/v1/chat/completions", body)

    async def raw(self, *parts: bytes, wait_s: float = 20.0) -> Outcome:
        """What a connection of bytes gets: the status of the first answer, "closed" when the server ends it, "open" when it does not in `wait_s`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(wait_s):
                first = await reader.read(1 << 16)
                status = int(first.split(b" ", 2)[1]) if first.startswith(b"HTTP/1.1 ") else "closed"
                return [status]
        except TimeoutError:
            return ["open"]
        except (ConnectionError, ValueError, IndexError):
            return ["closed"]
        finally:
            writer.close()

    def head(self, method: str, path: str, *headers: str, key: bool = True) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *headers]
        if key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode()

    async def upgraded(self, *, hello: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A chat socket by hand, with or without its hello."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
        writer.write(
            self.head("GET", "/ws", *upgrade, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", key=False)
        )
        await reader.readuntil(b"\r\n\r\n")
        if hello:
            writer.write(ws_frame(json.dumps({"type": "hello", "api_key": self.key}).encode()))
            await reader.read(1 << 16)
        return reader, writer


def ws_frame(
    payload: bytes, *, opcode: int = 1, is_masked: bool = True, is_final: bool = True, size: int | None = None
) -> bytes:
    """A client's frame. size: what its head says it holds, where that is a lie."""
    length = len(payload) if size is None else size
    head = bytes([(0x80 if is_final else 0) | opcode])
    mask_bit = 0x80 if is_masked else 0
    if length < 126:
        head += bytes([mask_bit | length])
    elif length < 1 << 16:
        head += bytes([mask_bit | 126]) + struct.pack(">H", length)
    else:
        head += bytes([mask_bit | 127]) + struct.pack(">Q", length)
    return head + (bytes(4) if is_masked else b"") + payload


async def closing(reader: asyncio.StreamReader, wait_s: float = 15.0) -> str:
    """ "closed" once the server has ended the connection, else "open"."""
    try:
        async with asyncio.timeout(wait_s):
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        return "open"
    except ConnectionError:
        pass
    return "closed"


# -- grammars --------------------------------------------------------------------------------------------------------


def rule_chain(num: int) -> str:
    rules = "\n".join(f'r{number}: "a" r{number + 1}' for number in range(num))
    return f'start: r0\n{rules}\nr{num}: "b"\n'


def ebnf_chain(num: int) -> str:
    rules = "\n".join(f'r{number} ::= "a" r{number + 1}' for number in range(num))
    return f'root ::= r0\n{rules}\nr{num} ::= "b"\n'


def reference_chain(num: int) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"d{number}": {
            "type": "object",
            "properties": {"x": {"$ref": f"#/$defs/d{number + 1}"}},
            "required": ["x"],
        }
        for number in range(num)
    }
    return {"$defs": defs | {f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def all_of(num: int) -> dict[str, Any]:
    return {
        "allOf": [
            {"type": "object", "properties": {f"p{number}": {"type": "string"}}} for number in range(num)
        ]
    }


def nested(num: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(num):
        schema = {"type": "array", "items": schema}
    return schema


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def grammar(text: str, **fields: Any) -> Attack:
    async def attack(attacker: Attacker) -> Outcome:
        return [await attacker.chat(structured_outputs={"grammar": text}, **fields)]

    return attack


def structured(**structured_outputs: Any) -> Attack:
    async def attack(attacker: Attacker) -> Outcome:
        return [await attacker.chat(structured_outputs=structured_outputs)]

    return attack


def schema(value: Any) -> Attack:
    async def attack(attacker: Attacker) -> Outcome:
        return [await attacker.chat(response_format=json_schema(value))]

    return attack


async def schema_in_responses(attacker: Attacker) -> Outcome:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": all_of(10_000)}}
    body = {"model": MODEL, "input": "Hello!", "max_output_tokens": 16, "text": text, "store": False}
    return [await attacker.post("/v1/responses", body | {"stream": is_stream}) for is_stream in (False, True)]


async def schema_in_messages(attacker: Attacker) -> Outcome:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 16}
    config = {"format": {"type": "json_schema", "schema": all_of(10_000)}}
    return [await attacker.post("/v1/messages", body | {"output_config": config})]


async def chain_in_streams(attacker: Attacker) -> Outcome:
    body = {"structured_outputs": {"grammar": rule_chain(1500)}, "stream": True}
    return list(await asyncio.gather(*(attacker.chat(**body) for _ in range(8))))


async def many_slow_grammars(attacker: Attacker) -> Outcome:
    """Then a harmless one, which must still be answered."""
    slow = [{"enum": [f"{number}-{value}" for value in range(9000)]} for number in range(6)]
    calls = [attacker.chat(response_format=json_schema(each)) for each in slow]
    return [*await asyncio.gather(*calls), await attacker.chat(response_format={"type": "json_object"})]


AMBIGUOUS = 'start: a\na: a a | a a a | "x"'
MORE_AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "" | "x" | "y"'


async def ambiguous_often(attacker: Attacker) -> Outcome:
    fields = {"structured_outputs": {"grammar": MORE_AMBIGUOUS}, "max_tokens": 400, "n": 16}
    return [await attacker.chat(**fields)]


async def evil_tools(attacker: Attacker) -> Outcome:
    tool = {"type": "function", "function": {"name": "f", "parameters": reference_chain(1000)}}
    choice = {"type": "function", "function": {"name": "f"}}
    return [
        await attacker.chat(tools=[tool], tool_choice="required"),
        await attacker.chat(tools=[tool], tool_choice=choice),
    ]


async def many_triggers(attacker: Attacker) -> Outcome:
    """Each is compared with each structure."""
    tag = {
        "triggers": [f"<{number}" for number in range(5000)],
        "structures": [{"begin": f"<{4999 - number}>", "schema": {}, "end": "</>"} for number in range(1000)],
    }
    return [await attacker.chat(structured_outputs={"structural_tag": json.dumps(tag)})]


async def in_the_background(attacker: Attacker) -> Outcome:
    """Stored or not, as vLLM's two checks of it read the word."""
    text = {"format": {"type": "json_schema", "name": "x", "schema": reference_chain(300)}}
    body = {"model": MODEL, "input": "Hello!", "background": True, "text": text}
    return [await attacker.post("/v1/responses", body | {"store": store}) for store in (True, False, "false")]


# -- large and malformed bodies --------------------------------------------------------------------------------------


def body(path: str, make: Callable[[], Any], **options: Any) -> Attack:
    """One call whose body is made when its turn comes."""

    async def attack(attacker: Attacker) -> Outcome:
        return [await attacker.post(path, make(), **options)]

    return attack


def fields(make: Callable[[], dict[str, Any]]) -> Attack:
    """A chat call with more fields."""

    async def attack(attacker: Attacker) -> Outcome:
        return [await attacker.chat(**make())]

    return attack


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 4} | more


async def malformed(attacker: Attacker) -> Outcome:
    chat = "/v1/chat/completions"
    bodies: list[Any] = [
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}, False]},
        {"model": MODEL, "messages": [None]},
        {"model": MODEL, "messages": HELLO, "structured_outputs": "json_object"},
        {"model": MODEL, "messages": HELLO, "response_format": {"type": "json_schema"}},
        {
            "model": MODEL,
            "messages": HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"schema": 7}},
        },
        {"model": MODEL, "messages": HELLO, "logit_bias": {"x": "y"}},
        {"model": MODEL, "messages": HELLO, "tools": [{}]},
        {"model": MODEL, "messages": HELLO, "stream_options": 3, "stream": True},
        {
            "model": MODEL,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
                }
            ],
        },
        {"model": {"a": 1}, "messages": HELLO},
        [],
        b"[" * 100_000,
        b'{"model": "\xff"}',
        b'{"model":"overture-demo","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"overture-demo","messages":[],"temperature":1e999}',
        b'{"model":"overture-demo","messages":[],"seed":' + b"9" * 100_000 + b"}",
        b"{" + b'"a":' * 1000 + b"1" + b"}" * 1000,
    ]
    return [await attacker.post(chat, each) for each in bodies]


async def other_doors_malformed(attacker: Attacker) -> Outcome:
    sent: list[tuple[str, Any]] = [
        ("/v1/responses", {"model": MODEL, "input": [{"role": "user"}]}),
        ("/v1/responses", {"model": MODEL, "input": {"a": 1}}),
        ("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": "x" * 100_000}),
        (
            "/v1/messages",
            {"model": MODEL, "messages": [{"role": "user", "content": [False]}], "max_tokens": 4},
        ),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": "x"}),
        ("/v1/completions", completion(prompt=[[1], "x", None])),
        ("/v1/completions", completion(prompt=[-1, 10**12])),
        ("/v1/completions", completion(prompt={"a": 1})),
        ("/v1/advisories", {"session_id": "x" * 1000}),
        ("/v1/advisories", {"actions": [{}] * 1000}),
        ("/api/sessions", {"title": "x" * MIB}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "some-organisation/some-adapter"}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/dev"}),
        ("/v1/unload_lora_adapter", {"lora_name": ["x"]}),
    ]
    return [await attacker.post(path, value) for path, value in sent]


async def compressed_bomb(attacker: Attacker) -> Outcome:
    import zlib

    packed = zlib.compress(b'{"a":"' + b"x" * (256 * MIB) + b'"}')
    return [await attacker.post("/v1/chat/completions", packed, headers={"Content-Encoding": "deflate"})]


async def odd_numbers(attacker: Attacker) -> Outcome:
    values = (
        {"n": 10**9},
        {"logprobs": True, "top_logprobs": 10**6},
        {"max_tokens": 10**30},
        {"temperature": -1},
        {"seed": 2**70},
    )
    return [await attacker.chat(**value) for value in values]


async def all_logprobs(attacker: Attacker) -> Outcome:
    more = {"logprobs": True, "top_logprobs": 20, "n": 32, "max_tokens": 200, "ignore_eos": True}
    return [await attacker.chat(**more)]


async def many_answers(attacker: Attacker) -> Outcome:
    return [await attacker.post("/v1/completions", completion(prompt=["a"] * 64, n=4))]


async def a_flood_of_calls(attacker: Attacker) -> Outcome:
    return list(await asyncio.gather(*(attacker.chat(max_tokens=2) for _ in range(400))))


async def searches(attacker: Attacker) -> Outcome:
    queries = ("x" * MIB, '" OR 1=1 --', "%" * 5000, "\x00", "a b c * NEAR( ", "ab")
    statuses: Outcome = []
    for query in queries:
        try:
            async with attacker.http.get("/api/sessions", params={"q": query, "limit": "-1"}) as reply:
                statuses.append(reply.status)
        except aiohttp.ClientError:
            statuses.append("cut")
    return statuses


async def odd_paths(attacker: Attacker) -> Outcome:
    heads = [
        attacker.head("GET", "/static/../../../../etc/passwd", "Connection: close"),
        attacker.head("GET", "/static/%2e%2e/%2e%2e/etc/passwd", "Connection: close"),
        attacker.head("GET", "/api/sessions/%00%ff", "Connection: close"),
        attacker.head("GET", "/" + "a" * 60_000, "Connection: close"),
        attacker.head("GET", "/healthz", "X: " + "y" * 60_000, "Connection: close"),
        attacker.head("GET", "/healthz", *(f"X-{number}: y" for number in range(5000)), "Connection: close"),
        attacker.head("BREW", "/healthz", "Connection: close"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"\r\n" * 10_000,
    ]
    return [status for head in heads for status in await attacker.raw(head)]


# -- connections -----------------------------------------------------------------------------------------------------


async def half_heads(attacker: Attacker) -> Outcome:
    """3,000 connections that never finish their head: all are closed in time, and health answers meanwhile."""
    part = attacker.head("GET", "/healthz")[:-2]
    pairs = await _open(attacker.port, 3000, part)
    async with attacker.http.get("/healthz") as reply:
        health = reply.status
    states = await asyncio.gather(*(closing(reader, 20.0) for reader, _ in pairs))
    for _, writer in pairs:
        writer.close()
    return [health, *sorted(set(states))]


async def _open(port: int, num: int, first: bytes) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    pairs = []
    for start in range(0, num, 100):
        opened = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", port) for _ in range(min(100, num - start))),
            return_exceptions=True,
        )
        for pair in opened:
            if not isinstance(pair, BaseException):
                pair[1].write(first)
                pairs.append(pair)
    return pairs


def frames_before_hello(num: int, num_bytes: int) -> Attack:
    async def attack(attacker: Attacker) -> Outcome:
        opened = await asyncio.gather(
            *(attacker.upgraded(hello=False) for _ in range(num)), return_exceptions=True
        )
        pairs = [pair for pair in opened if not isinstance(pair, BaseException)]
        for _, writer in pairs:
            writer.write(ws_frame(b"x" * num_bytes, size=16 * MIB))
        states = await asyncio.gather(*(closing(reader) for reader, _ in pairs))
        for _, writer in pairs:
            writer.transport.abort()
        return list(sorted(set(states))) or ["refused"]

    return attack


async def slow_body(attacker: Attacker) -> Outcome:
    head = attacker.head(
        "POST", "/v1/chat/completions", "Content-Type: application/json", "Content-Length: 1000"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", attacker.port)
    writer.write(head + b"{")
    state = await closing(reader, 40.0)
    writer.close()
    return [state]


async def lying_length(attacker: Attacker) -> Outcome:
    kind = "Content-Type: application/json"
    long = attacker.head("POST", "/v1/chat/completions", kind, "Content-Length: 99999999999")
    chunks = attacker.head("POST", "/v1/chat/completions", kind, "Transfer-Encoding: chunked")
    both = attacker.head(
        "POST", "/v1/chat/completions", kind, "Content-Length: 5", "Transfer-Encoding: chunked"
    )
    negative = attacker.head("POST", "/v1/chat/completions", kind, "Content-Length: -1")
    return [
        *await attacker.raw(long),
        *await attacker.raw(chunks + b"zz\r\n"),
        *await attacker.raw(both + b"0\r\n\r\n"),
        *await attacker.raw(negative),
    ]


async def pipelined(attacker: Attacker) -> Outcome:
    return await attacker.raw(attacker.head("GET", "/healthz") * 2000)


async def unread_stream(attacker: Attacker) -> Outcome:
    """A stream whose client reads nothing."""
    value = json.dumps(
        {"model": MODEL, "messages": HELLO, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    ).encode()
    head = attacker.head(
        "POST", "/v1/chat/completions", "Content-Type: application/json", f"Content-Length: {len(value)}"
    )
    plain = socket.create_connection(("127.0.0.1", attacker.port))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    plain.sendall(head + value)
    await asyncio.sleep(5.0)
    plain.close()
    return ["left"]


async def connects_and_leaves(attacker: Attacker) -> Outcome:
    for _ in range(20):
        pairs = await _open(attacker.port, 100, b"")
        for _, writer in pairs:
            writer.transport.abort()
    return ["left"]


async def wrong_keys(attacker: Attacker) -> Outcome:
    async def one(number: int) -> int | str:
        return await attacker.post(
            "/v1/chat/completions", {}, headers={"Authorization": f"Bearer ov-{number:043d}"}
        )

    return sorted(set(await asyncio.gather(*(one(number) for number in range(500)))), key=str)


# -- chat sockets ----------------------------------------------------------------------------------------------------


def frames(*sent: bytes, wait_s: float = 15.0) -> Attack:
    """Frames after a good hello, then the server's closing or its error."""

    async def attack(attacker: Attacker) -> Outcome:
        reader, writer = await attacker.upgraded(hello=True)
        for each in sent:
            writer.write(each)
        try:
            async with asyncio.timeout(wait_s):
                reply = await reader.read(1 << 16)
        except TimeoutError:
            return ["open"]
        except ConnectionError:
            reply = b""
        finally:
            writer.close()
        if not reply or reply[0] & 0x0F == 8:
            return ["closed"]
        return ["error" if b'"error"' in reply else "answered"]

    return attack


def message(content: str, **more: Any) -> bytes:
    value = {"type": "message", "id": secrets.token_hex(8), "content": content} | more
    return ws_frame(json.dumps(value).encode())


async def unmasked(attacker: Attacker) -> Outcome:
    return await frames(ws_frame(b'{"type":"ping"}', is_masked=False))(attacker)


async def fragments(attacker: Attacker) -> Outcome:
    """Each of one byte."""
    pieces = [ws_frame(b"x", is_final=False)] + [ws_frame(b"x", opcode=0, is_final=False)] * 200_000
    return await frames(b"".join(pieces))(attacker)


async def typing_flood(attacker: Attacker) -> Outcome:
    sent = [
        ws_frame(json.dumps({"type": "typing", "session_id": f"s{number}", "draft": "word " * 50}).encode())
        for number in range(3000)
    ]
    return await frames(*sent)(attacker)


async def long_messages(attacker: Attacker) -> Outcome:
    """Of a megabyte each: refused, and not kept."""
    outcomes = [await frames(message("word " * 200_000))(attacker) for _ in range(10)]
    async with attacker.http.get("/api/sessions") as reply:
        kept = (await reply.json())["sessions"]
    stored = [each for each in kept if each["title"] and each["title"].startswith("word word")]
    return [*(outcome[0] for outcome in outcomes), "stored" if stored else "not stored"]


async def many_sockets_of_one(attacker: Attacker) -> Outcome:
    pairs = await asyncio.gather(*(attacker.upgraded(hello=True) for _ in range(300)), return_exceptions=True)
    for pair in pairs:
        if not isinstance(pair, BaseException):
            pair[1].transport.abort()
    return ["left"]


@dataclass(frozen=True)
class Case:
    """An attack and what may come of it; `bad`: outcomes that mean harm, beside statuses of 500 and more."""

    name: str
    attack: Attack
    bad: tuple[str, ...] = ("open",)


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

CASES = (
    *(
        Case(f"grammar of {num:,} chained rules", grammar(rule_chain(num)))
        for num in (1500, 5000, 10_000, 20_000, 50_000)
    ),
    Case("EBNF of 50,000 chained rules", grammar(ebnf_chain(50_000))),
    *(
        Case(f"schema of {num:,} chained references", schema(reference_chain(num)))
        for num in (300, 700, 1000, 3000)
    ),
    Case("schema with 2,000 allOf", schema(all_of(2000))),
    Case("schema with 10,000 allOf in responses", schema_in_responses),
    Case("schema with 10,000 allOf in messages", schema_in_messages),
    Case("schema nested 400 deep", schema(nested(400))),
    Case("schema that refers to itself", schema({"$ref": "#"})),
    Case("choice of 200,000", structured(choice=[f"choice {number}" for number in range(200_000)])),
    Case("choice of 10,000", structured(choice=[f"choice {number}" for number in range(10_000)])),
    Case(
        "grammar of 20,000 alternatives",
        grammar("start: " + " | ".join(f'"w{number}"' for number in range(20_000))),
    ),
    Case("regex with large bounds", structured(regex="(a+)+{1,100000}b")),
    Case("regex with nested bounds", structured(regex="((a{1,900}){1,900}){1,900}")),
    Case("regex of a megabyte", structured(regex="(a|b)" * 200_000)),
    Case(
        "pattern with nested bounds in a schema",
        schema({"type": "string", "pattern": "((a{1,900}){1,900}){1,900}"}),
    ),
    Case("schema of half a megabyte", schema({"enum": [f"value {number}" for number in range(30_000)]})),
    Case("enum of 5 MB", schema({"enum": [f"value {number}" for number in range(300_000)]})),
    Case("ambiguous grammar", grammar(AMBIGUOUS, max_tokens=400)),
    Case("more ambiguous grammar", grammar(MORE_AMBIGUOUS, max_tokens=400)),
    Case("ambiguous grammar, 16 answers", ambiguous_often),
    Case("eight streams with a fatal grammar", chain_in_streams),
    Case("slow grammars, then a harmless one", many_slow_grammars),
    Case("tools with 1,000 chained references", evil_tools),
    Case("1,024 prompts × 64", body(COMPLETIONS, lambda: completion(prompt=["a"] * 1024, n=64))),
    Case("64 prompts × 4", many_answers),
    Case("a bad word of 5 MB", fields(lambda: {"bad_words": ["x" * 5 * MIB]})),
    Case("a million bad words", fields(lambda: {"bad_words": ["x"] * 1_000_000})),
    Case(
        "500,000 entries of logit_bias",
        fields(lambda: {"logit_bias": {str(number): 1 for number in range(500_000)}}),
    ),
    Case(
        "40,000 entries of logit_bias",
        fields(lambda: {"logit_bias": {str(number): 1 for number in range(40_000)}}),
    ),
    Case("40,000 stop strings", fields(lambda: {"stop": [f"stop {number}" for number in range(40_000)]})),
    Case("a stop string of 5 MB", fields(lambda: {"stop": "x" * 5 * MIB})),
    Case("odd numbers", odd_numbers),
    Case("20 log probabilities of 32 answers", all_logprobs),
    Case(
        "15 MB prompt, truncated",
        body(COMPLETIONS, lambda: completion(prompt="x " * (15 << 19), truncate_prompt_tokens=100)),
    ),
    Case("15 MB prompt", body(COMPLETIONS, lambda: completion(prompt="x " * (15 << 19)))),
    Case("15 MB of white space", body(COMPLETIONS, lambda: completion(prompt=" " * (15 << 20)))),
    Case("60,000 characters of one word", body(COMPLETIONS, lambda: completion(prompt="é" * 30_000))),
    Case("100,000 messages", body(CHAT, lambda: {"model": MODEL, "messages": HELLO * 100_000})),
    Case("10,000 messages", body(CHAT, lambda: {"model": MODEL, "messages": HELLO * 10_000})),
    Case("2,000 messages", body(CHAT, lambda: {"model": MODEL, "messages": HELLO * 2000, "max_tokens": 2})),
    Case("800,000 unknown fields", body(CHAT, lambda: {f"f{number}": 1 for number in range(800_000)})),
    Case("40,000 unknown fields", fields(lambda: {f"f{number}": 1 for number in range(40_000)})),
    Case("5 million token ids", body(COMPLETIONS, lambda: b'{"prompt":[' + b"1," * 5_000_000 + b"1]}")),
    Case("49,000 token ids", body(COMPLETIONS, lambda: completion(prompt=[1] * 49_000))),
    Case(
        "10,000 tools",
        fields(
            lambda: {
                "tools": [
                    {"type": "function", "function": {"name": f"f{number}"}} for number in range(10_000)
                ]
            }
        ),
    ),
    Case(
        "a template of the client's own",
        fields(lambda: {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}),
    ),
    Case("a grammar of 200,000 line ends", grammar("\n" * 200_000)),
    Case("5,000 triggers of a structural tag", many_triggers),
    Case("answers by the thousand, as a text", fields(lambda: {"n": "16384"})),
    Case(
        "repetitions of any size",
        fields(
            lambda: {
                "repetition_detection": {"min_pattern_size": 1, "max_pattern_size": 10**6, "min_count": 2}
            }
        ),
    ),
    Case("responses in the background", in_the_background),
    Case("malformed chat calls", malformed),
    Case("malformed calls at other doors", other_doors_malformed),
    Case("a compressed bomb", compressed_bomb),
    Case("400 calls at once", a_flood_of_calls),
    Case("searches", searches),
    Case("odd paths and heads", odd_paths),
    Case("3,000 halves of a head", half_heads),
    Case("40 halves of a frame before hello", frames_before_hello(40, 12 * MIB)),
    Case("200 halves of a frame before hello", frames_before_hello(200, 4 * MIB)),
    Case("a body that stops", slow_body),
    Case("lengths that lie", lying_length),
    Case("2,000 requests in a row, unread", pipelined),
    Case("a stream that nobody reads", unread_stream),
    Case("2,000 connections that leave at once", connects_and_leaves),
    Case("500 wrong keys", wrong_keys),
    Case("a frame without a mask", unmasked, bad=("open", "answered", "error")),
    Case("a frame of 16 MB", frames(ws_frame(b"x" * (16 * MIB - 14)))),
    Case("a frame that says it has 2^62 bytes", frames(ws_frame(b"x", size=1 << 62))),
    Case("200,000 fragments", fragments, bad=()),
    Case("10,000 pings", frames(ws_frame(b"x" * 100, opcode=9) * 10_000)),
    Case("a reserved opcode", frames(ws_frame(b"x", opcode=5)), bad=("open", "answered")),
    Case("binary that is no text", frames(ws_frame(b"\xff\xfe", opcode=1)), bad=("open", "answered")),
    Case(
        "a megabyte of nested arrays in a ping",
        frames(ws_frame(b'{"type":"ping","t":' + b"[" * 500_000 + b"]" * 500_000 + b"}")),
    ),
    Case("3,000 frames of typing", typing_flood, bad=()),
    Case("messages of a megabyte", long_messages, bad=("open", "stored")),
    Case("300 sockets of one key", many_sockets_of_one),
)
assert len({case.name for case in CASES}) == len(CASES)
