"""RFC 6455 against our websocket, echoing, over real sockets: cases of our own, and Autobahn's where that suite is installed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.fuzz import autobahn

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
MASK = b"\x37\xfa\x21\x3d"  # the example of §5.7
CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
Frames = list[tuple[int, bytes]]


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0) -> bytes:
    num_bytes = len(payload)
    if num_bytes < 126:
        length = bytes([0x80 | num_bytes])
    elif num_bytes < 1 << 16:
        length = b"\xfe" + num_bytes.to_bytes(2, "big")
    else:
        length = b"\xff" + num_bytes.to_bytes(8, "big")
    masked = bytes(byte ^ MASK[place % 4] for place, byte in enumerate(payload))
    return bytes([0x80 * fin | rsv << 4 | opcode]) + length + MASK + masked


def close(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, code.to_bytes(2, "big") + reason)


def closed(code: int) -> tuple[int, bytes]:
    return CLOSE, code.to_bytes(2, "big")


async def exchange(port: int, data: bytes, cut: int) -> Frames:
    """Send this in pieces of `cut` bytes and read until the server closes; its close frame is the last one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(60):
        writer.write(UPGRADE)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(data), cut):
            writer.write(data[start : start + cut])
            await writer.drain()
        found: Frames = []
        while not found or found[-1][0] != CLOSE:
            first, length = await reader.readexactly(2)
            assert first & 0xF0 == 0x80 and length < 128, (
                "whole, nothing reserved, and a server does not mask"
            )
            if length >= 126:
                length = int.from_bytes(await reader.readexactly(2 if length == 126 else 8), "big")
            found.append((first & 0x0F, await reader.readexactly(length)))
        try:
            assert await reader.read() == b"", "nothing comes after a close frame"
        except ConnectionResetError:
            assert found[-1] == closed(1000), "only who sends on after closing is cut off"
    writer.close()
    return found


BYE = close(1000)
LONG = bytes(range(256)) * 300
CASES: dict[str, tuple[bytes, Frames]] = {
    "empty text": (frame(TEXT) + BYE, [(TEXT, b""), closed(1000)]),
    "text of 125 bytes": (frame(TEXT, b"*" * 125) + BYE, [(TEXT, b"*" * 125), closed(1000)]),
    "text of 126 bytes": (frame(TEXT, b"*" * 126) + BYE, [(TEXT, b"*" * 126), closed(1000)]),
    "binary of 76,800 bytes": (frame(BINARY, LONG) + BYE, [(BINARY, LONG), closed(1000)]),
    "ping": (frame(PING, b"payload") + BYE, [(PONG, b"payload"), closed(1000)]),
    "ten pings": (frame(PING, b"x") * 10 + BYE, [(PONG, b"x")] * 10 + [closed(1000)]),
    "a pong that nobody asked for": (frame(PONG, b"x") + BYE, [closed(1000)]),
    "ping of 126 bytes": (frame(PING, b"x" * 126), [closed(1002)]),
    "fragments": (
        frame(TEXT, b"a", fin=False) + frame(CONT, b"b", fin=False) + frame(CONT, b"c") + BYE,
        [(TEXT, b"abc"), closed(1000)],
    ),
    "empty fragments": (
        frame(TEXT, fin=False) + frame(CONT, fin=False) + frame(CONT) + BYE,
        [(TEXT, b""), closed(1000)],
    ),
    "a ping between fragments": (
        frame(TEXT, b"a", fin=False) + frame(PING, b"?") + frame(CONT, b"b") + BYE,
        [(PONG, b"?"), (TEXT, b"ab"), closed(1000)],
    ),
    "a fragmented ping": (frame(PING, b"a", fin=False) + frame(CONT, b"b"), [closed(1002)]),
    "a continuation of nothing": (frame(CONT, b"a"), [closed(1002)]),
    "a message within a message": (frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"), [closed(1002)]),
    "an empty fragment, then a message": (frame(TEXT, fin=False) + frame(TEXT, b"b"), [closed(1002)]),
    "valid, then a reserved bit": (
        frame(TEXT, b"a") + frame(TEXT, b"b", rsv=4) + frame(PING),
        [(TEXT, b"a"), closed(1002)],
    ),
    "a reserved bit on a ping": (frame(PING, rsv=4), [closed(1002)]),
    "opcode 3": (frame(3, b"a"), [closed(1002)]),
    "opcode 11": (frame(11), [closed(1002)]),
    "no mask": (b"\x81\x01a", [closed(1002)]),
    "UTF-8 cut within a character": (
        frame(TEXT, "κ".encode()[:1], fin=False) + frame(CONT, "κ".encode()[1:]) + BYE,
        [(TEXT, "κ".encode()), closed(1000)],
    ),
    "UTF-8 with a surrogate": (frame(TEXT, b"\xed\xa0\x80"), [closed(1007)]),
    "UTF-8 that ends early": (frame(TEXT, b"\xce"), [closed(1007)]),
    "UTF-8 overlong": (frame(TEXT, b"\xc0\xaf"), [closed(1007)]),
    "close without a code": (frame(CLOSE), [closed(1000)]),
    "close with a reason": (close(1001, b"going"), [closed(1000)]),
    "close with half a code": (frame(CLOSE, b"\x03"), [closed(1002)]),
    "close with a reason that is not UTF-8": (close(1000, b"\xff"), [closed(1007)]),
    "close with 1006": (close(1006), [closed(1002)]),
    "close with 2999": (close(2999), [closed(1002)]),
    "frames behind a close": (BYE + frame(TEXT, b"late") + frame(PING), [closed(1000)]),
    "a message over the limit": (
        b"\x82\xff" + ((16 << 20) + 1).to_bytes(8, "big") + MASK + BYE,
        [closed(1009)],
    ),
    "a length of 63 bits": (b"\x82\xff" + b"\x7f" + b"\xff" * 7 + MASK, [closed(1009)]),
}


async def test_a_client_that_sends() -> None:
    """Whole and in pieces, all at once: after each close frame of the client's the server waits for it to go."""

    async def play(port: int, name: str) -> None:
        data, expected = CASES[name]
        for cut in (len(data), 1 if len(data) < 1000 else 997):
            assert await exchange(port, data, cut) == expected, name

    async with autobahn.echo_server() as url:
        await asyncio.gather(*(play(int(url.rpartition(":")[2]), name) for name in CASES))


@pytest.mark.slow
@pytest.mark.skipif(
    not autobahn.is_installed(), reason="Autobahn's suite is not installed: `make fuzz` does that"
)
async def test_autobahn_finds_nothing(tmp_path: Path) -> None:
    index = await autobahn.run_suite(autobahn.find_python(None), (*autobahn.QUICK, "6.*"), tmp_path)
    found = autobahn.verdicts(index)
    assert len(found) > 200
    assert [case for case, outcome in found.items() if outcome == "failed"] == []
