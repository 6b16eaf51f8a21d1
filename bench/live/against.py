"""This checkout against another one of the project, as their users would feel it: the same requests to both servers, in turns.

    python -m bench.live.against FOLDER [--rounds N] [--quick] [--flags "…"]

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

import asyncio
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil

from bench.intervals import Aim, interval, verdict
from bench.live.shared.asking import Streamed, streamed
from bench.live.shared.report import ROOT, Progress, commit_of, options, report, spread
from bench.live.shared.rounds import in_turn
from bench.live.shared.serving import QUIET_OPENMP, OvertureServer
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
    """Return `num` random words."""
    return " ".join(rng.choices(WORDS, k=num))


class Checkout(OvertureServer):
    """The server of one checkout, and its figures by name, one a round."""

    def __init__(self, name: str, folder: Path, data: Path, flags: str) -> None:
        own = (f"--data-dir={data / name}", f"--adapters-dir={folder / 'demo/adapters'}")
        log = data / f"{name}.log"
        super().__init__(log, *FLAGS, *own, *shlex.split(flags), checkout=folder, **QUIET_OPENMP)
        self.name = name
        self.figures: Figures = {}
        self.chats: list[list[dict[str, str]]] = []

    @property
    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    @property
    def cpu_s(self) -> float:
        """Processor time of the server and its children so far, in seconds."""
        return sum(each.user + each.system for each in (one.cpu_times() for one in self._processes))

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the server and its children."""
        return sum(each.memory_info().rss for each in self._processes)

    def note(self, **figures: float) -> None:
        """Add one value to each of these figures."""
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)


# -- requests ----------------------------------------------------------------------------------------------------------


def user(text: str) -> dict[str, str]:
    """Return a message of the user with this text."""
    return {"role": "user", "content": text}


class Plays:
    """The same requests for both servers: what differs from round to round is drawn by the round's number."""

    def __init__(self, http: aiohttp.ClientSession, model: str) -> None:
        self._http, self._model = http, model

    async def _ask(
        self, server: Checkout, num_tokens: int, *messages: dict[str, str], model: str = ""
    ) -> Streamed:
        """Return the answer to a chat; its TTFT is that of its end where it has no text. Raises RuntimeError."""
        body = {"model": model or self._model, "messages": messages, "max_tokens": num_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        answer = await streamed(self._http, f"{server.url}/v1/chat/completions", body)
        return msgspec.structs.replace(answer, ttft_s=answer.ttft_s or answer.end_s)

    async def alone(self, server: Checkout, number: int) -> None:
        """Ask three questions one after the other."""
        rng = random.Random(f"alone {number}")
        answers = [await self._ask(server, 32, user(words(rng, 220))) for _ in range(3)]
        server.note(
            alone_ttft_ms=statistics.median(answer.ttft_s for answer in answers) * 1e3,
            alone_tpot_ms=statistics.median(answer.end_s - answer.ttft_s for answer in answers) / 31 * 1e3,
        )

    async def streams(self, server: Checkout, number: int) -> None:
        """Ask eight questions at once."""
        rng = random.Random(f"streams {number}")
        texts = [words(rng, 40) for _ in range(8)]
        began_s = time.perf_counter()
        await asyncio.gather(*(self._ask(server, 96, user(text)) for text in texts))
        server.note(streams_ms_per_token=(time.perf_counter() - began_s) / (8 * 96) * 1e3)

    async def mixed(self, server: Checkout, number: int) -> None:
        """Ask questions of many lengths within two seconds, some with an adapter."""
        rng = random.Random(f"mixed {number}")

        async def one(at_s: float, text: str, num_tokens: int, model: str) -> float:
            """Ask one question at its time; return its TTFT in seconds."""
            await asyncio.sleep(at_s)
            return (await self._ask(server, num_tokens, user(text), model=model)).ttft_s

        jobs = []
        for place in range(24):
            text = words(rng, min(int(rng.lognormvariate(4.6, 0.9)) + 30, 650))
            model = rng.choice(ADAPTERS) if place % 3 == 2 else ""
            jobs.append(one(rng.uniform(0, 2), text, min(int(rng.lognormvariate(4.0, 0.8)) + 4, 160), model))
        ttft_s = await asyncio.gather(*jobs)
        server.note(mixed_ttft_mean_ms=statistics.fmean(ttft_s) * 1e3, mixed_ttft_worst_ms=max(ttft_s) * 1e3)

    async def come_back(self, server: Checkout, number: int) -> None:
        """Continue chats that other chats have pushed off the device."""
        if not server.chats:
            rng = random.Random("chats")
            server.chats = [[user(words(rng, CHAT_WORDS))] for _ in range(NUM_CHATS)]
            for chat in server.chats:
                answer = await self._ask(server, 8, *chat)
                chat.append({"role": "assistant", "content": answer.text})
        ttft_s = []
        for place, chat in enumerate(server.chats):
            # The question is not kept, so that chats stay equally long.
            question = user(words(random.Random(f"return {number} {place}"), 12))
            ttft_s.append((await self._ask(server, 4, *chat, question)).ttft_s)
        server.note(return_ttft_ms=statistics.median(ttft_s) * 1e3)

    async def all(self, server: Checkout, number: int) -> None:
        """Play everything on one server and note its processor time."""
        before_s = server.cpu_s
        for play in (self.alone, self.streams, self.mixed, self.come_back):
            await play(server, number)
        server.note(cpu_s=server.cpu_s - before_s)


# -- figures -----------------------------------------------------------------------------------------------------------


def compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the median and the interval of the ratios round by round, and the verdict."""
    ratios = np.array(ours) / np.array(theirs)
    found = interval(ratios)
    told = {"reached": "no worse", "missed": "worse"}
    said = verdict(found, Aim(1 + TOLERANCE, is_most=True))
    return {"ratio": round(float(np.median(ratios)), 3), "interval": found, "verdict": told.get(said, said)}


async def measure_half(arms: Arms, rounds: range, progress: Progress) -> dict[str, Figures]:
    """Each server's figures of these rounds; the one before them warms both up and does not count."""
    with ExitStack() as stack:
        data, both = Path(stack.enter_context(tempfile.TemporaryDirectory())), []
        for name, (folder, flags) in arms.items():
            server = stack.enter_context(Checkout(name, folder, data, flags))
            server.wait(server.is_ready)
            both.append(server)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_TIMEOUT_S)) as http:
            async with http.get(f"{both[0].url}/v1/models") as reply:
                models = [each["id"] for each in (await reply.json())["data"]]
            plays = Plays(http, next(name for name in models if name not in ADAPTERS))
            for server in both:
                await plays.all(server, rounds.start)
                server.figures.clear()
            for number in rounds:
                for server in in_turn(both, number + 1):
                    await plays.all(server, number + 1)
                progress.say(f"round {number + 1}")
        for server in both:
            server.note(rss_mib=server.rss_bytes / 2**20)
        return {server.name: server.figures for server in both}


async def measure(arms: Arms, num_rounds: int) -> dict[str, Figures]:
    """Return the figures of all rounds: half on servers started in one order, half in the other, because the first one may get better memory."""
    progress, half = Progress(), num_rounds // 2
    first = await measure_half(arms, range(half), progress)
    swapped = dict(reversed(arms.items()))
    second = await measure_half(swapped, range(half, num_rounds), progress)
    return {
        server: {name: values + second[server][name] for name, values in figures.items()}
        for server, figures in first.items()
    }


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__, quick="six rounds")
    parser.add_argument("folder", type=Path, help="another checkout of the project")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--flags", default="", help="of this checkout's server")
    args = parser.parse_args()
    other = args.folder.resolve()
    if args.rounds < 2:
        parser.error("two rounds at least: each order of starting has half of them")
    if not (other / "gateway/cli.py").is_file():
        parser.error(f"{args.folder} is no checkout of the project")
    arms = {"this": (ROOT, args.flags), "other": (other, "")}
    figures = asyncio.run(measure(arms, 6 if args.quick else args.rounds))
    memory = {name: round(found.pop("rss_mib")[-1]) for name, found in figures.items()}
    verdicts = {name: compared(figures["this"][name], figures["other"][name]) for name in figures["this"]}
    result = {"bench": "against", "other_commit": commit_of(other), "rss_mib": memory, "figures": verdicts}
    result["flags"] = args.flags
    result["num_worse"] = sum(found["verdict"] == "worse" for found in verdicts.values())
    rows = [
        (
            name,
            "{:.3f}  [{:.3f}, {:.3f}]  {}".format(found["ratio"], *found["interval"], found["verdict"]),
            " against ".join(spread(figures[server][name]) for server in ("this", "other")),
        )
        for name, found in verdicts.items()
    ]
    report("This checkout against another one", rows, result)


if __name__ == "__main__":
    main()
