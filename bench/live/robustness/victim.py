"""A client that streams one answer after the other, in a process of its own, so that what others compute does not look like a pause of the server.

    KEY=… python -m bench.live.robustness.victim URL

Each line of the output is the time at which a piece of text came, in seconds of the monotonic clock, which all processes share.
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


async def main(url: str) -> None:
    """Stream for ever."""
    headers = {"Authorization": f"Bearer {os.environ['KEY']}"}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as http:
        while True:
            try:
                async with http.post("/v1/chat/completions", json=BODY) as reply:
                    async for line in reply.content:
                        if line.startswith(b"data: {"):
                            print(time.monotonic(), flush=True)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                print(f"the victim's stream broke: {type(error).__name__}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.5)


class Victim:
    """The bench's side of the process, which streams from this server until the block ends."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key
        self._worst_s, self._came_s = 0.0, time.monotonic()

    async def __aenter__(self) -> Victim:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.live.robustness.victim", self._url),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"KEY": self._key},
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            now_s = float(line)
            self._worst_s, self._came_s = max(self._worst_s, now_s - self._came_s), now_s

    def take_gap_ms(self) -> float:
        """Return the longest time without text since the last call, in ms, including a gap that lasts."""
        gap_s, self._worst_s = max(self._worst_s, time.monotonic() - self._came_s), 0.0
        return gap_s * 1e3


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
