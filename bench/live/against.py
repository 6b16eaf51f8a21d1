"""This checkout against another one of the project, as their users would feel it: the same requests to both servers, in turns.

    python -m bench.live.against FOLDER [--rounds N] [--quick] [--flags "…"] [--other-flags "…"]

FOLDER is another checkout, say of the commit before a redesign (`git worktree add FOLDER COMMIT`), or `.` and flags, to compare settings. Both
servers run on the interpreter that runs this, with the demo model, its adapters and little device memory; one has work while the other is
idle, and whoever goes second in a round went first in the one before; halfway both are started anew in the other order. A round is, for each server:
  alone    three requests of some 300 tokens, one after the other: time to first token, and per token
  streams  eight answers of 96 tokens at once: time per token of all
  mixed    24 requests of 40 to 900 tokens within two seconds, every third with an adapter: mean and greatest time to first token
  return   twelve chats of some 2,800 tokens, more than the device holds, go on in turns: time to first token, with KV from host memory
and the processor time of all that. A figure is this checkout's over the other's, round by round: the median, and the interval that a bootstrap gives
it at 95%. At most 1.05 with its whole interval it is `no worse`, above 1.05 with all of it `worse`, else `undecided`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import psutil

from bench.intervals import Aim, interval, verdict
from bench.live.peers.client import QUIET_OPENMP, ROOT
from bench.live.report import Progress, report, spread
from bench.live.serving import ServerProcess
from bench.live.soak.server import free_port
from gateway.settings.config import DEMO_ADAPTERS_DIR

REQUEST_TIMEOUT_S = 120.0
TOLERANCE = 0.05
# Device memory for some 16,000 tokens, so that chats that return were pushed out meanwhile.
FLAGS = ("--kv-cache-gib", "0.0625", "--kv-host-gib", "0.5", "--max-num-seqs", "16")
ADAPTERS = sorted(path.name for path in DEMO_ADAPTERS_DIR.iterdir() if path.is_dir())
NUM_CHATS, CHAT_WORDS = 12, 1100
WORDS = "river stone walk quiet seven bright morning letter winter garden sailor window paper island music".split()

Figures = dict[str, list[float]]
"""By name, one a round."""
Arms = dict[str, tuple[Path, str]]
"""Folder and flags of each server, in the order in which they are started."""


def words(rng: random.Random, num: int) -> str:
    return " ".join(rng.choices(WORDS, k=num))


class Checkout(ServerProcess):
    """One server of one checkout."""

    def __init__(self, name: str, folder: Path, data: Path, flags: str) -> None:
        port = free_port()
        command = [sys.executable, "-m", "gateway.cli", "serve", "--port", str(port), *FLAGS]
        command += ["--data-dir", str(data / name), "--adapters-dir", str(folder / "demo/adapters")]
        environ = os.environ | QUIET_OPENMP | {"PYTHONPATH": str(folder)}
        super().__init__([*command, *shlex.split(flags)], port, data / f"{name}.log", folder, environ)
        self.name = name
        self.figures: Figures = {}
        self.chats: list[list[dict[str, str]]] = []

    @property
    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    @property
    def cpu_s(self) -> float:
        return sum(each.user + each.system for each in (one.cpu_times() for one in self._processes))

    @property
    def rss_bytes(self) -> int:
        return sum(each.memory_info().rss for each in self._processes)

    def note(self, **figures: float) -> None:
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)


# -- requests ----------------------------------------------------------------------------------------------------------


async def ask(
    http: aiohttp.ClientSession, server: Checkout, messages: list[dict[str, str]], num_tokens: int, model: str
) -> tuple[float, float, str]:
    """Seconds to the first piece of the answer and to its end, and the answer."""
    body = {"model": model, "messages": messages, "max_tokens": num_tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    began_s, first_s, text = time.perf_counter(), 0.0, ""
    async with http.post(f"{server.url}/v1/chat/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{server.name}: {reply.status} {await reply.text()}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            choices = orjson.loads(line[6:])["choices"]
            piece = choices[0]["delta"].get("content") if choices else None
            if piece:
                first_s = first_s or time.perf_counter() - began_s
                text += piece
    end_s = time.perf_counter() - began_s
    return first_s or end_s, end_s, text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Plays:
    """The same requests for both servers: what differs from round to round is drawn by the round's number."""

    def __init__(self, http: aiohttp.ClientSession, model: str) -> None:
        self._http, self._model = http, model

    async def _ask(
        self, server: Checkout, text: str, num_tokens: int, model: str = ""
    ) -> tuple[float, float, str]:
        return await ask(self._http, server, [user(text)], num_tokens, model or self._model)

    async def alone(self, server: Checkout, number: int) -> None:
        rng = random.Random(f"alone {number}")
        took = [await self._ask(server, words(rng, 220), 32) for _ in range(3)]
        server.note(
            alone_ttft_ms=statistics.median(first_s for first_s, _, _ in took) * 1e3,
            alone_tpot_ms=statistics.median(end_s - first_s for first_s, end_s, _ in took) / 31 * 1e3,
        )

    async def streams(self, server: Checkout, number: int) -> None:
        rng = random.Random(f"streams {number}")
        texts = [words(rng, 40) for _ in range(8)]
        began_s = time.perf_counter()
        await asyncio.gather(*(self._ask(server, text, 96) for text in texts))
        server.note(streams_ms_per_token=(time.perf_counter() - began_s) / (8 * 96) * 1e3)

    async def mixed(self, server: Checkout, number: int) -> None:
        rng = random.Random(f"mixed {number}")

        async def one(at_s: float, text: str, num_tokens: int, model: str) -> float:
            await asyncio.sleep(at_s)
            return (await self._ask(server, text, num_tokens, model))[0]

        jobs = []
        for place in range(24):
            text = words(rng, min(int(rng.lognormvariate(4.6, 0.9)) + 30, 650))
            model = rng.choice(ADAPTERS) if place % 3 == 2 else ""
            jobs.append(one(rng.uniform(0, 2), text, min(int(rng.lognormvariate(4.0, 0.8)) + 4, 160), model))
        ttft_s = await asyncio.gather(*jobs)
        server.note(mixed_ttft_mean_ms=statistics.fmean(ttft_s) * 1e3, mixed_ttft_worst_ms=max(ttft_s) * 1e3)

    async def come_back(self, server: Checkout, number: int) -> None:
        if not server.chats:
            rng = random.Random("chats")
            server.chats = [[user(words(rng, CHAT_WORDS))] for _ in range(NUM_CHATS)]
            for chat in server.chats:
                _, _, text = await ask(self._http, server, chat, 8, self._model)
                chat.append({"role": "assistant", "content": text})
        ttft_s = []
        for place, chat in enumerate(server.chats):
            # What is added is forgotten again: chats stay as long as they are.
            asked = [*chat, user(words(random.Random(f"return {number} {place}"), 12))]
            ttft_s.append((await ask(self._http, server, asked, 4, self._model))[0])
        server.note(return_ttft_ms=statistics.median(ttft_s) * 1e3)

    async def all(self, server: Checkout, number: int) -> None:
        before_s = server.cpu_s
        for play in (self.alone, self.streams, self.mixed, self.come_back):
            await play(server, number)
        server.note(cpu_s=server.cpu_s - before_s)


# -- figures -----------------------------------------------------------------------------------------------------------


def compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Of ratios round by round: median, interval, and what they say."""
    ratios = np.array(ours) / np.array(theirs)
    found = interval(ratios)
    told = {"reached": "no worse", "missed": "worse"}
    said = verdict(found, Aim(1 + TOLERANCE, is_most=True))
    return {"ratio": round(float(np.median(ratios)), 3), "interval": found, "verdict": told.get(said, said)}


@asynccontextmanager
async def servers(arms: Arms, data: Path) -> AsyncIterator[list[Checkout]]:
    """One started after the other, in this order."""
    started: list[Checkout] = []
    with contextlib.ExitStack() as stack:
        for name, (folder, flags) in arms.items():
            started.append(stack.enter_context(Checkout(name, folder, data, flags)))
            await asyncio.to_thread(started[-1].wait, started[-1].is_ready)
        yield started


async def measure_half(arms: Arms, rounds: range, progress: Progress) -> dict[str, Figures]:
    """Each server's figures of these rounds; the one before them warms both up and does not count."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    with tempfile.TemporaryDirectory() as data:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            servers(arms, Path(data)) as both,
        ):
            async with http.get(f"{both[0].url}/v1/models") as reply:
                models = [each["id"] for each in (await reply.json())["data"]]
            plays = Plays(http, next(name for name in models if name not in ADAPTERS))
            for server in both:
                await plays.all(server, rounds.start)
                server.figures.clear()
            for number in rounds:
                for server in both[:: 1 if number % 2 else -1]:
                    await plays.all(server, number + 1)
                progress.say(f"round {number + 1}")
            for server in both:
                server.note(rss_mib=server.rss_bytes / 2**20)
            return {server.name: server.figures for server in both}


async def measure(arms: Arms, num_rounds: int) -> dict[str, Figures]:
    """Half of the rounds on servers that are started in one order, half on others started in the other: who is first may have better memory."""
    progress, half = Progress(), num_rounds // 2
    first = await measure_half(arms, range(half), progress)
    swapped = dict(reversed(arms.items()))
    second = await measure_half(swapped, range(half, num_rounds), progress)
    return {
        server: {name: values + second[server][name] for name, values in figures.items()}
        for server, figures in first.items()
    }


def commit_of(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def rows_of(figures: dict[str, Any], verdicts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, found in verdicts.items():
        ours, theirs = (spread(figures[server][name]) for server in ("this", "other"))
        low, high = found["interval"]
        yield (
            name,
            f"{found['ratio']:.3f}  [{low:.3f}, {high:.3f}]  {found['verdict']}",
            f"{ours} against {theirs}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="another checkout of the project")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--flags", default="", help="of this checkout's server")
    parser.add_argument("--other-flags", default="", help="of the other's")
    parser.add_argument("--quick", action="store_true", help="six rounds")
    args = parser.parse_args()
    other = args.folder.resolve()
    if args.rounds < 2:
        parser.error("two rounds at least: each order of starting has half of them")
    if not (other / "gateway/cli.py").is_file():
        parser.error(f"{args.folder} is no checkout of the project")
    arms = {"this": (ROOT, args.flags), "other": (other, args.other_flags)}
    figures = asyncio.run(measure(arms, 6 if args.quick else args.rounds))
    memory = {name: round(found.pop("rss_mib")[-1]) for name, found in figures.items()}
    verdicts = {name: compared(figures["this"][name], figures["other"][name]) for name in figures["this"]}
    result = {"bench": "against", "other_commit": commit_of(other), "rss_mib": memory, "figures": verdicts}
    result |= {"flags": args.flags, "other_flags": args.other_flags}
    result["num_worse"] = sum(found["verdict"] == "worse" for found in verdicts.values())
    report("This checkout against another one", list(rows_of(figures, verdicts)), result)


if __name__ == "__main__":
    main()
