"""Bodies that are large, malformed, or ask for much."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from bench.live.attacks.attacker import HELLO, MIB, MODEL, Attack, Attacker, Outcome


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
