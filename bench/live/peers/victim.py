"""Somebody who streams one answer after the other while others do what they want; started by benches that attack a server.

Reads `PORT` on stdin to begin (again with another one to follow a server that was started anew), then answers each empty line with the longest
time in ms that no text came since the last such line. Ends when stdin does. The key is in the environment, as KEY.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import aiohttp

BODY = {
    "model": "overture-demo",
    "messages": [{"role": "user", "content": "Tell me a long story about the sea."}],
    "temperature": 0,
    "max_tokens": 1500,
    "stream": True,
    # A small model soon has nothing more to say: its marks count as text, so that each token is seen.
    "ignore_eos": True,
    "skip_special_tokens": False,
}


class Reader:
    """Notes when text comes."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._last_s = time.monotonic()

    async def read(self, port: int) -> None:
        """Stream for ever from a server."""
        headers = {"Authorization": f"Bearer {os.environ['KEY']}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{port}", headers=headers, timeout=timeout
        ) as http:
            while True:
                try:
                    async with http.post("/v1/chat/completions", json=BODY) as reply:
                        async for line in reply.content:
                            if line.startswith(b"data: {"):
                                self.note()
                except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                    print(f"the victim's stream broke: {type(error).__name__}", file=sys.stderr, flush=True)
                    await asyncio.sleep(0.5)

    def note(self) -> None:
        now = time.monotonic()
        self._worst_s = max(self._worst_s, now - self._last_s)
        self._last_s = now

    def take_gap_ms(self) -> float:
        """What is going on counts, too."""
        gap_s, self._worst_s = max(self._worst_s, time.monotonic() - self._last_s), 0.0
        return gap_s * 1000


async def main() -> None:
    reader = Reader()
    reading: asyncio.Task[None] | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip():
            if reading is not None:
                reading.cancel()
            reader.take_gap_ms()
            reading = asyncio.create_task(reader.read(int(line)))
        else:
            print(round(reader.take_gap_ms(), 1), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
