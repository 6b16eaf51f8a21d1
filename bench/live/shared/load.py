"""Load from a process of its own: chat sockets that stream, or that do nothing. Loopback only, bounded in number and time.

    python -m bench.live.shared.load stream PORT STREAMS TOKENS ROUND
    python -m bench.live.shared.load idle PORT SOCKETS

Prints one JSON line per phase; `idle` holds its sockets until its stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time

import orjson
from websockets.asyncio.client import connect

from bench.live.shared.serving import HOST

LIMIT_S = 120.0
MAX_SOCKETS = 10_000


def prompt_of(number: int, round_number: int) -> str:
    """A prompt that no other stream of any round has, so that nothing is answered from the prefix cache."""
    return f"{round_number * 1000 + number}: my name is Ada. Please tell me a long story about the sea and the wind."


async def one_stream(port: int, number: int, num_tokens: int, round_number: int, go: asyncio.Event) -> int:
    """Stream one answer; returns its completion tokens."""
    async with connect(f"ws://{HOST}:{port}/ws", compression=None, ping_interval=None) as socket:
        await socket.send('{"type":"hello"}')
        await socket.recv()
        await go.wait()
        sampling = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
        message = {"type": "message", "id": f"r{round_number}-{number}-{os.getpid()}", "sampling": sampling}
        await socket.send(orjson.dumps(message | {"content": prompt_of(number, round_number)}).decode())
        while True:
            frame = await socket.recv(decode=False)
            if frame.startswith(b'{"type":"done"'):
                return orjson.loads(frame)["usage"]["completion_tokens"]
            if frame.startswith(b'{"type":"error"'):
                raise RuntimeError(frame.decode())


async def stream(port: int, num_streams: int, num_tokens: int, round_number: int) -> None:
    """Stream answers on `num_streams` sockets at once; print the tokens and the seconds."""
    go = asyncio.Event()
    tasks = [
        asyncio.create_task(one_stream(port, n, num_tokens, round_number, go)) for n in range(num_streams)
    ]
    await asyncio.sleep(0.5)  # all are connected and wait
    started = time.perf_counter()
    go.set()
    async with asyncio.timeout(LIMIT_S):
        counts = await asyncio.gather(*tasks)
    elapsed_s = time.perf_counter() - started
    print(json.dumps({"num_tokens": sum(counts), "elapsed_s": elapsed_s}), flush=True)


async def idle_socket(port: int, key: bytes) -> asyncio.StreamWriter:
    """A chat socket after its hello, by hand: a library's buffers would cost this process more than the server."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=4096)
    writer.write(
        b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: " + key + b"\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 101 " in head, head
    hello = b'{"type":"hello"}'
    writer.write(bytes([0x81, 0x80 | len(hello), 0, 0, 0, 0]) + hello)
    first = await reader.readexactly(2)
    length = first[1]
    if length == 126:
        length = int.from_bytes(await reader.readexactly(2), "big")
    assert b'"ready"' in await reader.readexactly(length)
    return writer


async def idle(port: int, num_sockets: int) -> None:
    """Open silent sockets and hold them until stdin closes."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    writers = []
    async with asyncio.timeout(LIMIT_S):
        for start in range(0, min(num_sockets, MAX_SOCKETS), 100):
            batch = range(start, min(start + 100, num_sockets))
            writers += await asyncio.gather(*(idle_socket(port, b"dGhlIHNhbXBsZSBub25jZQ==") for _ in batch))
    print(json.dumps({"num_sockets": len(writers)}), flush=True)
    await asyncio.wait_for(asyncio.to_thread(sys.stdin.readline), LIMIT_S)
    for writer in writers:
        writer.close()


def main() -> None:
    """Run the load that the command line names."""
    kind, *numbers = sys.argv[1:]
    asyncio.run({"stream": stream, "idle": idle}[kind](*map(int, numbers)))


if __name__ == "__main__":
    main()
