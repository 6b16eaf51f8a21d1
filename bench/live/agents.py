"""What learned advisories are worth: agents that return after others have pushed their KV from the device, foreseen and not foreseen.

    python -m bench.live.agents [--quick]

One server, two arms in turn on the same kind of run: in one the requests name their agent (`X-Agent-Name`), so that the gateway learns and
advises; in the other they do not, and all else is the same. A run has a planner, a solver that asks three times, and a critic, each with a
history of its own. Before each call somebody else's prompts fill the device, and then nobody asks for a while: that is the time in which KV can
come back, from host memory or from disk. Runs of both arms take turns in pairs, in random order; each begins with histories that are computed
and not counted, and the first pairs, from which the gateway learns, are not counted either.

The last line is JSON. `ttft_ratio`: of the medians of the calls' times with one token to write, with advisories over without;
`ttft_ratio_interval`: 95% of the ratios when pairs of runs are drawn anew 2,000 times. `verdict`: "faster" or "slower" where the interval lies on
one side of 1, else "undecided". `advisories`: the learned ones by how they ended. `cached_share`: of the calls' prompts, what was not computed
again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.live.models import ModelShape, model_folder
from bench.live.report import ROOT, Progress, options, report
from engine_bridge.local_node import LocalNode
from gateway.app import Server, build_services, node_config
from gateway.settings.config import Config

SHAPE = ModelShape(vocab_size=1280, seed=1280, max_model_len=2048)
DEMO = ROOT / "demo/model"
BLOCK_TOKENS, NUM_BLOCKS = 32, 56
HISTORY_WORDS, QUESTION_WORDS, FILL_WORDS = 180, 4, 300
CHAIN = ("planner", "solver", "solver", "solver", "critic")
MODEL = "bench"
AGENTS = tuple(dict.fromkeys(CHAIN))
WORDS = (
    "water light stone river paper green house table north music bread cloud horse glass seven winter".split()
)


@dataclass(frozen=True, slots=True)
class Plan:
    """num_pairs: of runs, counted; num_learned: before them; pause_s: before each call."""

    num_pairs: int = 16
    num_learned: int = 4
    pause_s: float = 0.8


QUICK = Plan(num_pairs=6, num_learned=2)


@dataclass(slots=True)
class Agent:
    """One agent's conversation in one run."""

    session_id: str
    messages: list[dict[str, str]] = field(default_factory=list)


def some_words(rng: random.Random, number: int) -> str:
    return " ".join(rng.choices(WORDS, k=number))


class Bench(Progress):
    def __init__(self, http: aiohttp.ClientSession, plan: Plan) -> None:
        super().__init__()
        self.http = http
        self.plan = plan
        self.cached: dict[bool, list[float]] = defaultdict(list)

    async def ask(
        self, messages: list[dict[str, str]], headers: dict[str, str]
    ) -> tuple[dict[str, Any], float]:
        """The reply, and the seconds it took."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
        start = self.elapsed_s
        async with self.http.post("/v1/chat/completions", json=body, headers=headers) as reply:
            answer = await reply.json()
            if reply.status != 200:
                raise RuntimeError(str(answer))
        return answer, self.elapsed_s - start

    async def fill(self, rng: random.Random) -> None:
        """Have somebody else's prompts push out what lies on the device."""
        for _ in range(2):
            await self.ask([{"role": "user", "content": some_words(rng, FILL_WORDS)}], {})

    async def run(self, name: str, seed: int, *, is_named: bool) -> list[float]:
        """One run of the chain. The seconds of each call."""
        rng = random.Random(f"{seed} {is_named}")
        agents = {agent: Agent(f"{name}:{agent}") for agent in AGENTS}
        for agent in agents.values():
            agent.messages.append({"role": "user", "content": some_words(rng, HISTORY_WORDS)})
            await self.call(agent, {})
        took_s = []
        self.say(f"{name}: histories are there")
        for agent_name in CHAIN:
            await self.fill(rng)
            await asyncio.sleep(self.plan.pause_s)
            agent = agents[agent_name]
            agent.messages.append({"role": "user", "content": some_words(rng, QUESTION_WORDS)})
            headers = {"X-Agent-Name": agent_name, "X-Workflow-Id": name} if is_named else {}
            usage, call_s = await self.call(agent, headers)
            took_s.append(call_s)
            self.cached[is_named].append(
                usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
            )
        return took_s

    async def call(self, agent: Agent, headers: dict[str, str]) -> tuple[dict[str, Any], float]:
        answer, took_s = await self.ask(agent.messages, {"X-Session-Id": agent.session_id, **headers})
        agent.messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "."}
        )
        return answer["usage"], took_s

    async def measure(self) -> list[dict[bool, list[float]]]:
        """Seconds of each pair's calls, by whether they were named."""
        found = []
        for number in range(self.plan.num_learned + self.plan.num_pairs):
            order = random.Random(number).sample([True, False], 2)
            pair = {
                is_named: await self.run(f"run{number}{is_named}", number, is_named=is_named)
                for is_named in order
            }
            is_counted = number >= self.plan.num_learned
            if is_counted:
                found.append(pair)
            else:
                self.cached.clear()
            medians = {name: f"{1e3 * statistics.median(pair[name]):.0f} ms" for name in pair}
            self.say(
                f"pair {number}{'' if is_counted else ', not counted'}: named {medians[True]}, not named {medians[False]}"
            )
        return found


def ratio(pairs: list[dict[bool, list[float]]]) -> float:
    """Of the medians of all calls, named over not named."""
    named, plain = (
        statistics.median(took for pair in pairs for took in pair[which]) for which in (True, False)
    )
    return named / plain


def interval(pairs: list[dict[bool, list[float]]], rng: random.Random) -> tuple[float, float]:
    """95% of the ratios of pairs that are drawn anew with replacement."""
    drawn = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return drawn[50], drawn[1949]


def served_model(folder: Path) -> Path:
    """The bench's model with the demo model's tokenizer, which has a chat template."""
    shutil.copytree(model_folder(SHAPE), folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


async def ended(http: aiohttp.ClientSession) -> dict[str, float]:
    """Learned advisories by how they ended."""
    found: dict[str, float] = {}
    async with http.get("/metrics") as reply:
        for line in (await reply.text()).splitlines():
            if line.startswith("overture_advis") and 'source="learned"' in line and "_created" not in line:
                name, value = line.rsplit(" ", 1)
                found[name] = float(value)
    return found


async def bench(url: str, plan: Plan) -> None:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(120)) as http:
        work = Bench(http, plan)
        pairs = await work.measure()
        advisories = await ended(http)
    low, high = interval(pairs, random.Random(0))
    verdict = "faster" if high < 1 else "slower" if low > 1 else "undecided"
    medians = {
        which: 1e3 * statistics.median(t for pair in pairs for t in pair[which]) for which in (True, False)
    }
    result = {
        "bench": "agents",
        "num_calls_each": len(pairs) * len(CHAIN),
        "ttft_ms": {"advised": round(medians[True], 1), "not_advised": round(medians[False], 1)},
        "ttft_ratio": round(ratio(pairs), 3),
        "ttft_ratio_interval": [round(low, 3), round(high, 3)],
        "verdict": verdict,
        "cached_share": {
            "advised": round(statistics.fmean(work.cached[True]), 3),
            "not_advised": round(statistics.fmean(work.cached[False]), 3),
        },
        "advisories": advisories,
    }
    rows = [
        (
            "median time to the token",
            f"{medians[True]:.0f} against {medians[False]:.0f} ms",
            f"ratio {result['ttft_ratio']}",
        ),
        ("95% interval of the ratio", f"{low:.3f} … {high:.3f}", verdict),
    ]
    report("Learned advisories, with and without", rows, result)


async def serve(folder: Path, plan: Plan) -> None:
    """Measure a server of this process: its command takes no device memory as small as this."""
    config = Config(
        model=str(served_model(folder / "model")),
        served_model_name=MODEL,
        data_dir=folder / "data",
        port=0,
        block_size=BLOCK_TOKENS,
        max_model_len=1536,
        kv_host_gib=0.25,
        kv_disk_gib=4,
        cpu_threads=1,
        learned_advisories=True,
    )
    settings = await asyncio.to_thread(node_config, config)
    engine = msgspec.structs.replace(settings.engine, num_kv_blocks=NUM_BLOCKS)
    node = LocalNode(msgspec.structs.replace(settings, engine=engine))
    async with Server(await build_services(config, node=node)) as server:
        await node.start()
        await bench(server.url, plan)


def main() -> None:
    args = options(__doc__, "six pairs instead of sixteen, two to learn from instead of four").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(Path(folder), QUICK if args.quick else Plan()))


if __name__ == "__main__":
    main()
