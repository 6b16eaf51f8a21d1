"""A client that means harm: calls, raw connections and frames; and the list of attacks. Loopback only.

An attack is a coroutine that gets an `Attacker` and returns what came: HTTP statuses, or words such as "closed" for connections. The modules of this
package enter theirs into CASES when they are imported: by `@case` in front of a coroutine, and by `sends` and `chats` where it only sends bodies.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MODEL = "overture-demo"
HELLO = [{"role": "user", "content": "Hello!"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIB = 1 << 20

Outcome = list[int | str]
Attack = Callable[["Attacker"], Awaitable[Outcome]]
Body = tuple[str, Any]
"""A path and what is sent there."""


@dataclass(frozen=True)
class Case:
    """An attack and what may come of it; `bad`: outcomes that mean harm, beside statuses of 500 and more."""

    name: str
    attack: Attack
    bad: tuple[str, ...] = ("open",)


CASES: list[Case] = []


def case(name: str, *, bad: tuple[str, ...] = ("open",)) -> Callable[[Attack], Attack]:
    """Enter the attack that follows into CASES. bad: outcomes that mean harm."""

    def enter(attack: Attack) -> Attack:
        """Enter the attack, and return it."""
        CASES.append(Case(name, attack, bad))
        return attack

    return enter


def sends(name: str, make: Callable[[], Sequence[Body]]) -> None:
    """Enter an attack that sends bodies, one after the other. They are made when its turn comes."""

    async def attack(attacker: Attacker) -> Outcome:
        """Send the bodies."""
        return [await attacker.post(path, body) for path, body in make()]

    case(name)(attack)


def chats(name: str, make: Callable[[], dict[str, Any] | Sequence[dict[str, Any]]]) -> None:
    """Enter an attack that asks a chat question, or several in turn, with these fields. They are made when its turn comes."""

    def bodies() -> list[Body]:
        """Return the chat bodies."""
        made = make()
        return [(CHAT, chat_body(fields)) for fields in ([made] if isinstance(made, dict) else made)]

    sends(name, bodies)


def chat_body(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a short chat question with these fields."""
    return {"model": MODEL, "messages": HELLO, "max_tokens": 16} | fields


def completion(**fields: Any) -> Body:
    """Return a short completion with these fields."""
    return COMPLETIONS, {"model": MODEL, "prompt": "Hello", "max_tokens": 4} | fields


@dataclass
class Attacker:
    """A client that means harm.

    Attributes:
        http: a session that sends the attacker's key.
        answers: the beginnings of the server's answers, for the report.
    """

    http: aiohttp.ClientSession
    port: int
    key: str
    answers: list[str] = field(default_factory=list)

    async def post(self, path: str, body: Any, **headers: str) -> int | str:
        """The status of one call, its body read; "cut" where the server closed the connection. body: bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            async with self.http.post(
                path, data=data, headers={"Content-Type": "application/json"} | headers
            ) as reply:
                text = await reply.read()
                self.answers.append(text[:300].decode(errors="replace"))
                return reply.status
        except (aiohttp.ClientError, ConnectionError) as error:
            self.answers.append(type(error).__name__)
            return "cut"

    async def get(self, path: str, **options: Any) -> int | str:
        """The status of a GET; "cut" where the server closed the connection."""
        try:
            async with self.http.get(path, **options) as reply:
                return reply.status
        except aiohttp.ClientError:
            return "cut"

    async def chat(self, **fields: Any) -> int | str:
        """Ask a chat question with these fields of the body; return the status, or "cut"."""
        return await self.post(CHAT, chat_body(fields))

    async def raw(self, data: bytes) -> int | str:
        """Send bytes on a new connection, and return the status of the first answer.

        "closed" if the server ends the connection, "open" if nothing comes within 20 seconds.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(20.0):
                first = await reader.read(1 << 16)
                return int(first.split(b" ", 2)[1]) if first.startswith(b"HTTP/1.1 ") else "closed"
        except TimeoutError:
            return "open"
        except (ConnectionError, ValueError, IndexError):
            return "closed"
        finally:
            writer.close()

    def head(self, method: str, path: str, *headers: str, key: bool = True) -> bytes:
        """Return the bytes of an HTTP head with these header lines and, unless `key` is False, the attacker's key."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *headers]
        if key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode()

    async def upgraded(self, *, hello: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a chat socket by hand, with or without its hello; return its streams."""
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


def ws_frame(payload: bytes, *, opcode: int = 1, is_final: bool = True, size: int | None = None) -> bytes:
    """A client's frame, masked by zeros. size: what its head says it holds, where that is a lie."""
    length = len(payload) if size is None else size
    head = bytes([(0x80 if is_final else 0) | opcode])
    if length < 126:
        head += bytes([0x80 | length])
    elif length < 1 << 16:
        head += bytes([0x80 | 126]) + struct.pack(">H", length)
    else:
        head += bytes([0x80 | 127]) + struct.pack(">Q", length)
    return head + bytes(4) + payload


def json_frame(value: dict[str, Any]) -> bytes:
    """Return the frame of a JSON text."""
    return ws_frame(json.dumps(value).encode())


async def closing(reader: asyncio.StreamReader, wait_s: float = 15.0) -> str:
    """Return "closed" once the server has ended the connection, else "open"."""
    try:
        async with asyncio.timeout(wait_s):
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        return "open"
    except ConnectionError:
        pass
    return "closed"
