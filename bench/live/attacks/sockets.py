"""Frames on a chat socket."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from bench.live.attacks.attacker import Attack, Attacker, Outcome, ws_frame


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
