"""A client that means harm: calls, raw connections and frames. Loopback only.

An attack is a coroutine that gets an `Attacker` and returns what came: HTTP statuses, or words such as "closed" for connections.
"""

from __future__ import annotations

import asyncio
import json
import secrets
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
    """A client that means harm.

    Attributes:
        http: with its key. port: of the server.
        word: of this attack alone, to be looked for where no text of a client's belongs.
        others: clients with other keys, by what they are.
    """

    http: aiohttp.ClientSession
    port: int
    key: str
    answers: list[str] = field(default_factory=list)
    word: str = field(default_factory=lambda: f"word{secrets.token_hex(8)}")
    others: dict[str, Attacker] = field(default_factory=dict)

    @property
    def neighbour(self) -> Attacker:
        """Somebody with another key, who means well."""
        return self.others["neighbour"]

    @property
    def operator(self) -> Attacker:
        """With an operator's key."""
        return self.others["operator"]

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
