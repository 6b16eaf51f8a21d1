"""Connections that are opened, held and left, and heads that lie."""

from __future__ import annotations

import asyncio
import json
import socket

from bench.live.attacks.attacker import HELLO, MIB, MODEL, Attack, Attacker, Outcome, closing, ws_frame


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
