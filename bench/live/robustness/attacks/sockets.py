"""Frames on a chat socket."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from bench.live.robustness.attacks.attacker import (
    MIB,
    Attacker,
    Outcome,
    case,
    json_frame,
    ws_frame,
)


async def sent(attacker: Attacker, frames: bytes) -> str:
    """Send frames after a good hello; return what the server does first: "closed", "error", "answered" or, after 15 seconds, "open"."""
    reader, writer = await attacker.upgraded(hello=True)
    writer.write(frames)
    try:
        async with asyncio.timeout(15.0):
            reply = await reader.read(1 << 16)
    except TimeoutError:
        return "open"
    except ConnectionError:
        reply = b""
    finally:
        writer.close()
    if not reply or reply[0] & 0x0F == 8:
        return "closed"
    return "error" if b'"error"' in reply else "answered"


def frames(name: str, make: Callable[[], bytes], bad: tuple[str, ...] = ("open",)) -> None:
    """Enter an attack that sends these frames."""

    async def attack(attacker: Attacker) -> Outcome:
        """Send the frames."""
        return [await sent(attacker, make())]

    case(name, bad=bad)(attack)


def _fragments() -> bytes:
    return ws_frame(b"x", is_final=False) + ws_frame(b"x", opcode=0, is_final=False) * 200_000


def _typing(num: int, draft: str) -> bytes:
    """Return frames that say that a draft is being typed, each in another session."""
    fields = {"type": "typing", "draft": draft}
    return b"".join(json_frame(fields | {"session_id": f"s{number}"}) for number in range(num))


frames("a frame of 16 MB", lambda: ws_frame(b"x" * (16 * MIB - 14)))
frames("a frame that says it has 2^62 bytes", lambda: ws_frame(b"x", size=1 << 62))
frames("200,000 fragments", _fragments, bad=())
frames("10,000 pings", lambda: ws_frame(b"x" * 100, opcode=9) * 10_000)
frames(
    "a megabyte of nested arrays in a ping",
    lambda: ws_frame(b'{"type":"ping","t":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
)
frames("3,000 frames of typing", lambda: _typing(3000, "word " * 50), bad=())


@case("messages of a megabyte", bad=("open", "stored"))
async def long_messages(attacker: Attacker) -> Outcome:
    """Send messages of a megabyte each: the server refuses them and stores none."""
    found: Outcome = []
    for _ in range(10):
        message = {"type": "message", "id": secrets.token_hex(8), "content": "word " * 200_000}
        found.append(await sent(attacker, json_frame(message)))
    async with attacker.http.get("/api/sessions") as reply:
        kept = (await reply.json())["sessions"]
    stored = [each for each in kept if each["title"] and each["title"].startswith("word word")]
    return [*found, "stored" if stored else "not stored"]


@case("300 sockets of one key")
async def many_sockets_of_one(attacker: Attacker) -> Outcome:
    """Open 300 sockets with one key, then drop them all."""
    pairs = await asyncio.gather(*(attacker.upgraded(hello=True) for _ in range(300)), return_exceptions=True)
    for pair in pairs:
        if not isinstance(pair, BaseException):
            pair[1].transport.abort()
    return ["left"]
