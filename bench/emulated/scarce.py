"""Advisories where device and host memory hold few of the conversations that are typed in: the traffic of `bench.live.kv.advisory --source disk`.

    python -m bench.emulated scarce [--quick] [--seeds N] [--seed N] [--jobs N]

One node of vLLM's scheduler with our classes, in virtual time. Twenty people, with conversations of 4,096 to 16,384 tokens at 16 KiB a token, read an
answer and type a question for as long as a run lasts; two streams of others decode beside them. The device holds a fifth of the conversations, host
memory a tenth, a disk of 1.2 GB/s all; steps, copies and disk are about those of two cores. Six people type at a time, and so the device has no room
for all of them. Counted is who asks after the warm-up. Arms, the same people to each:
  none      no advisories
  advised   typing is announced when it begins; when the question will come nobody says
  timed     it says that, too: what one who knows the future makes of this memory (`bound`)

The last line is JSON. Of each figure: median over seeds. `ttft_vs_none_p50`, `_p99`: TTFT of follow-ups with advisories over that without;
`bound_…`: the same of `timed`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.clock import Clock
from bench.emulated.core.hardware import Gpu
from bench.emulated.core.models import Model
from bench.emulated.core.node import EmulatedNode, Engine, Job
from bench.emulated.core.steps import StepCost
from bench.emulated.core.tiers import TierSizes
from bench.emulated.table import Bench, Table
from bench.live.kv.advisory_disk import (
    ANSWER_TOKENS,
    ANSWER_WORDS,
    BLOCK_SIZE,
    DEVICE_SHARE,
    HOST_SHARE,
    MOST_TOKENS,
    NEW_TOKENS,
    NUM_STREAMS,
    SHAPE,
    first_lengths,
)
from bench.live.kv.people import human_times
from bench.live.peers.play import STREAM_ANSWER_TOKENS, STREAM_PROMPT_TOKENS
from bench.measures import quantile
from engine_bridge.policy.kv.guesses import MARGIN_SHARE
from kvtiers.keys import BlockKey

MODEL = Model(
    "4 kB a token and layer",
    4,
    256,
    512,
    4,
    4,
    2048,
    MOST_TOKENS + 1024,
    counted_kv_bytes=SHAPE.kv_token_bytes,
)
# About two cores: 10 ms a step, copies at 5 GB/s; prompts take so long that nothing is computed which the disk has.
DEVICE = Gpu(
    "two cores", 3e11, 20e9, 1 << 34, 5e9, flops_share=1.0, memory_share=1.0, link_share=1.0, step_s=0.01
)
DISK_BYTES_PER_S = 1.2e9
SPAN_S, QUICK_SPAN_S, WARM_UP_S = 240.0, 160.0, 80.0
# At the beginning everybody is in the middle of reading or typing, within so long. Chosen: about what both take.
PHASE_S = 36.0
ARMS = ("none", "advised", "timed")


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    arm: str
    span_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """One follow-up.

    missing_blocks: of its KV, that the device lacked when it came; earlier_blocks: of conversations typed in for longer, and
    its own.
    """

    ttft_s: float
    missing_blocks: int
    earlier_blocks: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run's. room_blocks: of the device, for conversations that are expected."""

    asked: list[Asked]
    room_blocks: int


class People:
    """Twenty people who read, type and ask, and two streams beside them."""

    def __init__(self, point: Point) -> None:
        self.arm, self.clock = point.arm, Clock()
        self.lengths = first_lengths()
        num_blocks = sum(length // BLOCK_SIZE + 1 for length in self.lengths.values())
        self.device_blocks = int(num_blocks * DEVICE_SHARE)
        block_bytes = BLOCK_SIZE * MODEL.kv_bytes_per_token
        self.node = EmulatedNode(
            self.clock,
            StepCost(DEVICE, MODEL),
            Engine(self.device_blocks, BLOCK_SIZE, max_tokens=MODEL.max_tokens),
            "fcfs",
            tiers=TierSizes(int(num_blocks * HOST_SHARE) * block_bytes, DISK_BYTES_PER_S),
        )
        self.node.on_end = self.ended
        self.asked: list[tuple[float, Asked]] = []
        self._asking: dict[str, tuple[str, int, int]] = {}
        self._typing_since: dict[str, float] = {}
        self._chance, self._num_asked = random.Random(point.seed), 0
        for session, length in self.lengths.items():
            self.place(session, length // BLOCK_SIZE)
            self.read_and_type(session, 0.0, self._chance.random() * PHASE_S)
        for _ in range(NUM_STREAMS):
            self.stream()

    def place(self, session: str, num_blocks: int) -> None:
        """Put a session's earlier KV on the disk."""
        tiers, names = self.node.tiers, self.node.requests.names(session, num_blocks)
        assert tiers is not None and tiers.hollow.disk is not None
        tiers.hollow.disk.keep([BlockKey(bytes(name)) for name in names])
        left = SimpleNamespace(session_id=session, cache_salt=None, block_hashes=names, sampling_params=None)
        tiers.promoter.remember(left)  # type: ignore[arg-type]  # all that it looks at

    def stream(self) -> None:
        """Begin another answer of a stream."""
        self.submit("stream", STREAM_PROMPT_TOKENS, STREAM_ANSWER_TOKENS)

    def submit(self, kind: str, num_prompt: int, num_answer: int, session: str = "") -> str:
        """Send a request now. Return its id."""
        self._num_asked += 1
        name = f"{kind}{self._num_asked}"
        self.node.submit(Arrival(name, self.clock.now, num_prompt, num_answer, session=session))
        return name

    def read_and_type(self, session: str, now: float, phase_s: float = 0.0) -> None:
        """Let a person read the last answer, of which `phase_s` have passed, and type."""
        read_s, type_s = human_times(self._chance, ANSWER_WORDS)
        begins_s, asks_s = (max(now + after_s - phase_s, now) for after_s in (read_s, read_s + type_s))
        self.clock.at(begins_s, lambda now: self.begin_to_type(session, asks_s))
        self.clock.at(asks_s, lambda now: self.ask(session))

    def begin_to_type(self, session: str, asks_s: float) -> None:
        """Let a person begin to type, which the arm may announce."""
        self._typing_since[session] = self.clock.now
        if self.arm in ("advised", "timed"):
            self.node.advise(session, asks_s - self.clock.now if self.arm == "timed" else None)

    def ask(self, session: str) -> None:
        """Send the question, and note the KV that the device lacks for it."""
        length, since_s = self.lengths[session], self._typing_since.pop(session, self.clock.now)
        # Nothing has computed with the last token, and so it has no KV.
        names = self.node.requests.names(session, (length - 1) // BLOCK_SIZE)
        pool = self.node.scheduler.kv_cache_manager.block_pool
        num_there = next(
            (at for at, name in enumerate(names) if pool.get_cached_block(name, [0]) is None), len(names)
        )
        earlier = [other for other, began_s in self._typing_since.items() if began_s <= since_s]
        num_earlier = sum(self.lengths[other] // BLOCK_SIZE for other in earlier) + len(names)
        name = self.submit("question", length + NEW_TOKENS, ANSWER_TOKENS, session)
        self._asking[name] = session, len(names) - num_there, num_earlier

    def ended(self, job: Job) -> None:
        """Let the person read an answer, or the stream go on."""
        found = self._asking.pop(job.arrival.request_id, None)
        if found is None:
            self.stream()
            return
        session, num_missing, num_earlier = found
        self.lengths[session] += NEW_TOKENS + ANSWER_TOKENS
        self.asked.append((job.arrival.at_s, Asked(job.ttft_s, num_missing, num_earlier)))
        self.read_and_type(session, self.clock.now)


def serve(point: Point) -> Outcome:
    """Play one point."""
    people = People(point)
    try:
        people.clock.run(point.span_s)
    finally:
        people.node.close()
    return Outcome(
        [asked for at_s, asked in people.asked if at_s >= WARM_UP_S],
        int(people.device_blocks * (1 - MARGIN_SHARE)),
    )


def typing_part(bench: Bench) -> None:
    """Find what announcing gains, and what a clairvoyant gains (`bound_`)."""
    of = {arm: Point(arm, bench.size) for arm in ARMS}
    bench.play(of.values())
    for (arm, prefix), percent in product((("advised", ""), ("timed", "bound_")), (50, 99)):

        def ttft_s(outcome: Outcome, share: float = percent / 100) -> float:
            """Return this quantile of the follow-ups' TTFT."""
            return quantile([asked.ttft_s for asked in outcome.asked], share)

        place = (f"{prefix}ttft_vs_none_p{percent}",)
        bench.figure(place, bench.ratios(of[arm], of["none"], ttft_s), unit="ratio")


TABLE = Table(
    "emulated-scarce",
    "Advisories where memory is scarce",
    serve,
    {"typing": typing_part},
    (SPAN_S, QUICK_SPAN_S),
    f"{QUICK_SPAN_S:.0f} s of talk",
)
