"""Connections that are opened, held and left, and heads that lie."""

from __future__ import annotations

import asyncio

from bench.live.robustness.attacks.attacker import (
    CHAT,
    MIB,
    Attack,
    Attacker,
    Outcome,
    case,
    closing,
    ws_frame,
)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _open(port: int, num: int, first: bytes) -> list[Streams]:
    pairs: list[Streams] = []
    for start in range(0, num, 100):
        opened = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", port) for _ in range(min(100, num - start))),
            return_exceptions=True,
        )
        pairs += [pair for pair in opened if not isinstance(pair, BaseException)]
    for _, writer in pairs:
        writer.write(first)
    return pairs


async def _states(pairs: list[Streams], wait_s: float) -> list[str]:
    """Return what became of the connections, each state once, and leave them."""
    states = await asyncio.gather(*(closing(reader, wait_s) for reader, _ in pairs))
    for _, writer in pairs:
        writer.transport.abort()
    return sorted(set(states))


@case("3,000 halves of a head")
async def half_heads(attacker: Attacker) -> Outcome:
    """3,000 connections that never finish their head: all are closed in time, and health answers meanwhile."""
    pairs = await _open(attacker.port, 3000, attacker.head("GET", "/healthz")[:-2])
    return [await attacker.get("/healthz"), *await _states(pairs, 20.0)]


def frames_before_hello(num: int, num_bytes: int) -> Attack:
    """Return an attack of `num` sockets that each send `num_bytes` bytes of a frame of 16 MB before their hello."""

    async def attack(attacker: Attacker) -> Outcome:
        """Open the sockets and leave their frames unfinished."""
        opened = await asyncio.gather(
            *(attacker.upgraded(hello=False) for _ in range(num)), return_exceptions=True
        )
        pairs = [pair for pair in opened if not isinstance(pair, BaseException)]
        for _, writer in pairs:
            writer.write(ws_frame(b"x" * num_bytes, size=16 * MIB))
        return list(await _states(pairs, 15.0)) or ["refused"]

    return attack


case("40 halves of a frame before hello")(frames_before_hello(40, 12 * MIB))
case("200 halves of a frame before hello")(frames_before_hello(200, 4 * MIB))


@case("2,000 requests in a row, unread")
async def pipelined(attacker: Attacker) -> Outcome:
    """Send thousands of requests on one connection and read no answer."""
    return [await attacker.raw(attacker.head("GET", "/healthz") * 2000)]


@case("2,000 connections that leave at once")
async def connects_and_leaves(attacker: Attacker) -> Outcome:
    """Open thousands of connections and close each at once."""
    for _ in range(20):
        for _, writer in await _open(attacker.port, 100, b""):
            writer.transport.abort()
    return ["left"]


# -- keys --------------------------------------------------------------------------------------------------------------


def _wrong_key(number: int) -> dict[str, str]:
    return {"Authorization": f"Bearer ov-{number:043d}"}


@case("500 wrong keys")
async def wrong_keys(attacker: Attacker) -> Outcome:
    """Try hundreds of keys that do not exist."""
    calls = (attacker.post(CHAT, {}, **_wrong_key(number)) for number in range(500))
    return sorted(set(await asyncio.gather(*calls)), key=str)


@case("calls among 5,000 keys")
async def calls_among_many_keys(attacker: Attacker) -> Outcome:
    """Small calls with a good key, and with keys of a proper form that the server does not know."""
    found: set[int | str] = set()
    for start in range(0, 300, 50):
        calls = [attacker.get("/api/models") for _ in range(50)]
        calls += [attacker.get("/api/models", headers=_wrong_key(start + number)) for number in range(50)]
        found |= set(await asyncio.gather(*calls))
    return sorted(found, key=str)
