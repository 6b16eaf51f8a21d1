"""The parts of `python -m bench.live.gpu`. Each yields what it found, a dictionary at a time, and starts and ends its own engines."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from bench.emulated.core.traffic import RANKS
from bench.live.correct.checkpoints import folder_of
from bench.live.correct.families import FAMILIES
from bench.live.gpu.tiers import SHAPES, Histories, measure
from bench.live.peers.engine import Settings
from bench.live.peers.play import Answer, Ask, text
from bench.live.peers.worker import Worker
from bench.live.shared.models import ModelShape, adapter_folders
from bench.live.shared.report import last_line
from bench.measures import quantile
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR

Found = Generator[dict[str, Any], None, None]
HISTORIES = Histories()
HYBRID = "granite4"  # Mamba2 beside attention
TURN_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is played. Lengths in tokens.

    Attributes:
        is_dry: the demo model on a CPU.
        correct: prompts that are to come back from every tier.
        prompts: the prompts whose time to the first token is taken.
        beside_streams: how many decode while conversations of `beside_tokens` come to the device, `beside_moves` of them, one a second.
        beside_answer: of each of these streams.
        num_adapters: the adapters that are served; `num_requests` requests ask for them, `requests_per_s` on average.
        copied_mib: of each way of the copies.
    """

    is_dry: bool = False
    correct: Sequence[int] = (300, 2000, 8000)
    streams: Sequence[int] = (1, 16, 64, 256)
    stream_prompt: int = 128
    stream_answer: int = 128
    prompts: Sequence[int] = (2048, 8192, 16384, 32768)
    repeats: int = 3
    beside_streams: int = 32
    beside_answer: int = 640
    beside_tokens: int = 16384
    beside_moves: int = 4
    num_adapters: int = 64
    num_requests: int = 200
    requests_per_s: float = 10.0
    adapter_prompt: int = 256
    adapter_answer: int = 32
    histories: Histories = HISTORIES
    copied_mib: int = 1024


GPU = Sizes()
DRY = Sizes(
    is_dry=True,
    correct=(100, 300),
    streams=(1, 4),
    stream_prompt=32,
    stream_answer=8,
    prompts=(128, 256),
    repeats=1,
    beside_streams=2,
    beside_answer=150,
    beside_tokens=256,
    beside_moves=2,
    num_adapters=5,
    num_requests=10,
    requests_per_s=5.0,
    adapter_prompt=32,
    adapter_answer=4,
    histories=Histories((256, 512, 1024), 2),
    copied_mib=32,
)
LONG = msgspec.structs.replace(SHAPES["8b"], max_model_len=34816)
# On a GPU: some 100,000 tokens in blocks of vLLM's default size, more than 256 streams and the longest prompt need.
NUM_BLOCKS = 6400
ADAPTERS_AT_ONCE = 8


class Run:
    """One run of the bench: how much it plays, and where its files are."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self.sizes = sizes
        self._folder = folder
        self._num_engines = 0

    @contextmanager
    def engine(
        self, kind: str, shape: ModelShape, *, has_weights: bool = True, **more: Any
    ) -> Iterator[Worker]:
        """Start an engine in a separate process; it ends with the block. Raises WorkerFailed. shape: on a GPU."""
        self._num_engines += 1
        folder = self._folder / f"{kind}-{self._num_engines}"
        folder.mkdir()
        if self.sizes.is_dry:
            usual: dict[str, Any] = {"model": str(DEMO_MODEL_DIR), "dtype": "float32", "folder": str(folder)}
            usual |= {"num_blocks": 64, "max_model_len": 1024, "max_num_seqs": 8}
            usual |= {"max_num_batched_tokens": 512, "host_gib": 0.125, "disk_gib": 0.125}
            settings = Settings(**usual | more)
        else:
            usual = {"num_blocks": NUM_BLOCKS, "block_size": None, "max_model_len": shape.max_model_len}
            usual |= {"max_num_seqs": None, "max_num_batched_tokens": None, "device": "cuda"}
            usual |= {"host_gib": 24.0, "disk_gib": 24.0}
            settings = Settings.of(shape, folder, has_weights=has_weights, **usual | more)
        with Worker(folder.name, kind, settings, self._folder) as worker:
            worker.wait_ready()
            yield worker

    def adapters(self, shape: ModelShape, num: int) -> dict[str, Any]:
        """Return the settings of an engine with adapters of ranks 8 to 128. The demo model has five."""
        folders = (
            sorted(path for path in DEMO_ADAPTERS_DIR.iterdir() if path.is_dir())
            if self.sizes.is_dry
            else adapter_folders(shape, [RANKS[number % len(RANKS)] for number in range(num)])
        )
        at_once = 2 if self.sizes.is_dry else ADAPTERS_AT_ONCE
        return {
            "adapters": [(folder.name, str(folder)) for folder in folders[:num]],
            "max_loras": at_once,
            "max_cpu_loras": max(num // 2, at_once),
            "max_lora_rank": max(RANKS),
            "adapter_host_bytes": (1 << 28) if self.sizes.is_dry else (4 << 30),
        }


# -- correctness -------------------------------------------------------------------------------------------------------


def correct(run: Run) -> Found:
    """Answers that must be the same: from each tier, with an adapter cold and warm, and after an engine was built anew."""
    shape = SHAPES["small"]
    settings = run.adapters(shape, len(RANKS))
    names = [name for name, _ in settings["adapters"]]
    with run.engine("ours", shape, **settings) as worker:
        yield {"what": "an adapter cold against warm"} | _cold_against_warm(worker, names)
        yield {"what": "from each tier"} | _from_each_tier(worker, run.sizes.correct)
        yield {"what": "a failed step"} | _after_a_failure(worker, run.sizes.correct[0])


def _cold_against_warm(worker: Worker, names: Sequence[str]) -> dict[str, Any]:
    """Ask each adapter while it is on disk, in host memory and in its slot. No play finds the KV of another."""
    differ = []
    num_like_base = 0
    for name in names:
        prompt = text(200, "adapter", name)
        asked = [Ask(prompt=prompt, max_tokens=16, adapter=name)]
        (base,) = worker.play([Ask(prompt=prompt, max_tokens=16)])
        answers = {}
        for place in ("disk", "host", "slot"):
            worker.call("put", adapters=[name], place=place)
            answers[place] = worker.play(asked)[0].token_ids
        differ += [f"{name} from {place}" for place in answers if answers[place] != answers["slot"]]
        num_like_base += answers["slot"] == base.token_ids
    return {"is_right": not differ, "differ": differ, "num_like_the_base_model": num_like_base}


def _from_each_tier(worker: Worker, lengths: Sequence[int]) -> dict[str, Any]:
    """Ask the same prompt with its KV in each place; the device's memory is overwritten before it comes from another."""
    differ, computed = [], []
    for num_tokens in lengths:
        prompt = text(num_tokens, "tiers", num_tokens)
        first = worker.call("turn", tokens=prompt, max_tokens=TURN_TOKENS)["token_ids"]
        for place in ("device", "host", "disk"):
            worker.call("place", source=place)
            before = worker.call("hits")
            found = worker.call("turn", tokens=prompt, max_tokens=TURN_TOKENS)["token_ids"]
            differ += [f"{num_tokens} from {place}"] if found != first else []
            is_restored = place == "device" or worker.call("hits")[place] > before[place]
            computed += [] if is_restored else [f"{num_tokens} from {place}"]
    return {"is_right": not differ and not computed, "differ": differ, "computed_again": computed}


def _after_a_failure(worker: Worker, num_tokens: int) -> dict[str, Any]:
    """Have a step fail, and ask a prompt whose KV host memory has kept meanwhile."""
    prompt = text(num_tokens, "failure")
    first = worker.call("turn", tokens=prompt, max_tokens=TURN_TOKENS)["token_ids"]
    worker.call("settle")
    told = worker.call("break_a_step", tokens=text(num_tokens, "this fails"))
    before = worker.call("hits")["host"]
    again = worker.call("turn", tokens=prompt, max_tokens=TURN_TOKENS)["token_ids"]
    other = worker.call("turn", tokens=text(num_tokens, "another"), max_tokens=TURN_TOKENS)["token_ids"]
    is_restored = worker.call("hits")["host"] > before
    is_right = again == first and is_restored and len(other) == TURN_TOKENS
    return {"is_right": is_right, "is_restored": is_restored} | told


def hybrid(run: Run) -> Found:
    """The same of a model with recurrent layers."""
    (family,) = [each for each in FAMILIES if each.name == HYBRID]
    dtype = "float32" if run.sizes.is_dry else "bfloat16"
    model = {"model": str(folder_of(family)), "dtype": dtype, "max_model_len": 1024, "num_blocks": 64}
    with run.engine("ours", SHAPES["tiny"], **model, host_gib=0.25, disk_gib=0.25) as worker:
        lengths = [num_tokens for num_tokens in run.sizes.correct if num_tokens < 500]
        yield {"what": "from each tier", "family": HYBRID} | _from_each_tier(worker, lengths)


# -- how fast ----------------------------------------------------------------------------------------------------------


def copies(run: Run) -> Found:
    """Measure the link, in a separate process."""
    device = "cpu" if run.sizes.is_dry else "cuda"
    command = (
        sys.executable,
        "-m",
        "bench.live.gpu.copies",
        f"--device={device}",
        f"--mib={run.sizes.copied_mib}",
    )
    yield {"gb_s": last_line(*command, timeout_s=300)}


def speed(run: Run, kind: str) -> Found:
    """Decoding at several numbers of streams, and times to the first token by where the prompt's KV is."""
    with run.engine(kind, LONG, has_weights=False) as worker:
        for num_streams in run.sizes.streams:
            yield {"what": f"{num_streams} streams"} | _streams(worker, run.sizes, num_streams)
        for num_tokens in run.sizes.prompts:
            yield {"what": f"a prompt of {num_tokens} tokens"} | _first_token(
                worker, kind, run.sizes, num_tokens
            )


def _streams(worker: Worker, sizes: Sizes, num_streams: int) -> dict[str, Any]:
    asks = [
        Ask(prompt=text(sizes.stream_prompt, "stream", num_streams, number), max_tokens=sizes.stream_answer)
        for number in range(num_streams)
    ]
    worker.play(asks)  # compiles and captures kernels and graphs
    return told(worker.play(asks))


def told(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return a play's time per token, the longest wait between two, and its tokens per second."""
    gaps = [after - before for answer in answers for before, after in pairwise(answer.token_s)]
    per_token = [
        (answer.token_s[-1] - answer.token_s[0]) / (len(answer.token_s) - 1)
        for answer in answers
        if len(answer.token_s) > 1
    ]
    took_s = max(answer.token_s[-1] for answer in answers)
    return {
        "tpot_ms": _ms(statistics.median(per_token)),
        "itl_p99_ms": _ms(quantile(gaps, 0.99)),
        "ttft_ms": _ms(statistics.median(answer.ttft_s for answer in answers)),
        "tokens_per_s": round(sum(len(answer.token_ids) for answer in answers) / took_s, 1),
    }


def _first_token(worker: Worker, kind: str, sizes: Sizes, num_tokens: int) -> dict[str, Any]:
    sources = ["computed", "resident", *(("host",) if kind in ("ours", "stock_offload") else ())]
    seconds: dict[str, list[float]] = {source: [] for source in sources}
    # A server leaves room for the answer within the longest context.
    for number in range(sizes.repeats):
        prompt = text(num_tokens, "first token", num_tokens, number)
        for source in sources:
            if source == "host":
                worker.call("place", source="host")
            found = worker.call("turn", tokens=prompt, max_tokens=TURN_TOKENS)
            seconds[source].append(found["ttft_s"])
    return {"ttft_ms": {source: _ms(statistics.median(found)) for source, found in seconds.items()}}


def beside(run: Run, kind: str) -> Found:
    """Streams that decode alone, while conversations are restored from host memory, and while they are promoted for advisories."""
    sizes = run.sizes
    prompts = [text(sizes.beside_tokens, "beside", number) for number in range(sizes.beside_moves)]
    at_s = [0.5 + number for number in range(sizes.beside_moves)]
    restores = [
        Ask(prompt=prompt, max_tokens=2, at_s=begins_s)
        for prompt, begins_s in zip(prompts, at_s, strict=True)
    ]
    with run.engine(kind, LONG, has_weights=False) as worker:
        worker.call("together", asks=_decoding(sizes, "warm"))
        alone = told(worker.call("together", asks=_decoding(sizes, "alone")))
        yield {"what": f"{sizes.beside_streams} streams alone"} | alone
        for prompt in prompts:
            worker.call("turn", tokens=prompt, max_tokens=2)
        yield {"what": "while conversations are restored"} | _disturbed(worker, sizes, alone, asks=restores)
        if kind == "ours":
            sessions = [f"beside-{number}" for number in range(sizes.beside_moves)]
            worker.call("begin", histories=dict.fromkeys(sessions, sizes.beside_tokens))
            advised = list(zip(at_s, sessions, strict=True))
            yield {"what": "while conversations are promoted"} | _disturbed(
                worker, sizes, alone, advised=advised
            )


def _decoding(sizes: Sizes, seed: str) -> list[Ask]:
    return [
        Ask(prompt=text(sizes.stream_prompt, "decodes", seed, number), max_tokens=sizes.beside_answer)
        for number in range(sizes.beside_streams)
    ]


def _disturbed(
    worker: Worker,
    sizes: Sizes,
    alone: Mapping[str, float],
    *,
    asks: Sequence[Ask] = (),
    advised: Sequence[tuple[float, str]] = (),
) -> dict[str, Any]:
    """Play streams while KV comes from host memory to the device, for requests or for advisories, and compare them with streams alone."""
    worker.call("place", source="host")
    is_ours = worker.name.startswith("ours")
    before = worker.call("copied_bytes") if is_ours else 0
    streams = _decoding(sizes, f"{len(asks)} asked, {len(advised)} advised")
    answers = worker.call("together", asks=[*streams, *asks], advised=advised)
    found: dict[str, Any] = told(answers[: len(streams)])
    found |= {
        f"{name}_vs_alone": round(found[name] / alone[name], 3)
        for name in ("tpot_ms", "itl_p99_ms", "tokens_per_s")
    }
    if asks:
        found["restored_ttft_ms"] = _ms(
            statistics.median(answer.ttft_s for answer in answers[len(streams) :])
        )
    if is_ours:
        found["copied_mib"] = round((worker.call("copied_bytes") - before) / 2**20, 1)
    return found


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def adapters(run: Run, kind: str) -> Found:
    """Requests for many adapters that come by and by, most of them cold at first."""
    sizes = run.sizes
    settings = run.adapters(LONG, sizes.num_adapters)
    names = [name for name, _ in settings["adapters"]]
    chance = random.Random("arrivals")
    at_s, asks = 0.0, []
    for number in range(sizes.num_requests):
        at_s += chance.expovariate(sizes.requests_per_s)
        # Small ranks are asked for most, as in Chameleon's law.
        name = names[min(int(chance.expovariate(4.0) * len(names)), len(names) - 1)]
        prompt = text(sizes.adapter_prompt, "adapters", number)
        asks.append(Ask(prompt=prompt, max_tokens=sizes.adapter_answer, at_s=at_s, adapter=name))
    with run.engine(kind, LONG, has_weights=False, has_tiers=False, **settings) as worker:
        worker.call("empty")
        answers = worker.play(asks)
        seconds = [answer.ttft_s for answer in answers]
        yield {
            "what": f"{len(names)} adapters, {sizes.requests_per_s:g} requests/s",
            "ttft_p50_ms": _ms(quantile(seconds, 0.5)),
            "ttft_p99_ms": _ms(quantile(seconds, 0.99)),
            "first_ttft_ms": _ms(seconds[0]),
            "found": worker.call("found"),
        } | {name: value for name, value in told(answers).items() if name != "ttft_ms"}


def over_http(run: Run) -> Found:
    """Histories as a client meets them: computed, resident, from host memory and disk, with advisories and without."""
    name, device = ("dry", "cpu") if run.sizes.is_dry else ("8b", "cuda")
    found = asyncio.run(measure(name, device, run.sizes.histories))
    # With weights that vLLM makes up, answers hardly depend on the prompt: `correct` says more about correctness.
    yield {"is_right": found["tokens_identical"]} | found


PARTS: Mapping[str, Callable[[Run], Found]] = {
    "correct": correct,
    "hybrid": hybrid,
    "copies": copies,
    "beside_ours": partial(beside, kind="ours"),
    "beside_stock": partial(beside, kind="stock_offload"),
    **{name: partial(speed, kind=name) for name in ("ours", "stock", "stock_offload", "ours_off")},
    "adapters_ours": partial(adapters, kind="ours"),
    "adapters_stock": partial(adapters, kind="stock"),
    "http": over_http,
}
"""In the order of what they are worth."""
NEEDS_GPU = frozenset({"stock_offload", "beside_stock"})
"""vLLM's OffloadingConnector copies from and to a GPU only."""
