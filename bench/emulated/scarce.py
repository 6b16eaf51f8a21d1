"""Advisories where device and host memory hold few of the conversations that are typed in, on traffic of many kinds.

    python -m bench.emulated scarce [--part default|settings ...] [--quick] [--seeds N] [--seed N] [--jobs N]

One node of vLLM's scheduler with our classes, in virtual time. Twenty people, with conversations whose lengths differ by four times, read an answer
and type a question, again and again; two streams of others decode beside them. The device holds a part of the conversations, host memory another, a
disk all. Everybody takes the same times to read and to type in each arm. Counted are the questions after the warm-up. Arms:
  none      no advisories
  advised   typing is announced when it begins; when the question will come nobody says
  timed     it says that, too, and nothing is announced that does not come: what one who knows the future makes of this memory (`bound`)

Parts:
  default   the traffic of `bench.live.kv.advisory --source disk`: 4,096 to 16,384 tokens of 16 KiB, the device a fifth, host memory a tenth
  settings  one thing or two changed at a time (`SETTINGS`): how long people think, how many type, how many give up, bursts, sizes of memory, speeds
            of disks, models of 8 and 70 billion weights by their published step times

The last line is JSON. Of each figure: median over seeds. `ttft_vs_none_p50`, `_p99`: TTFT of follow-ups with advisories over that without;
`bound_…`: the same of `timed`. `of_clairvoyant_at_default`: what `advised` gains of the mean, for each unit that `timed` gains. Of the settings:
the worst of `ttft_mean_with_vs_without`, `p99` and `others_tokens_per_s`, which is how fast the streams decode with advisories over without.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace

from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.calibration import A100
from bench.emulated.core.clock import Clock
from bench.emulated.core.hardware import Gpu
from bench.emulated.core.models import LLAMA3_8B, Model
from bench.emulated.core.node import EmulatedNode, Engine, Job
from bench.emulated.core.people import remember
from bench.emulated.core.steps import StepCost
from bench.emulated.core.tiers import TierSizes
from bench.emulated.table import Bench, Table
from bench.live.kv.advisory_disk import (
    ANSWER_TOKENS,
    ANSWER_WORDS,
    BLOCK_SIZE,
    NEW_TOKENS,
    NUM_STREAMS,
    SHAPE,
    first_lengths,
)
from bench.live.kv.people import SPREAD, human_times
from bench.live.peers.play import STREAM_ANSWER_TOKENS, STREAM_PROMPT_TOKENS
from bench.measures import quantile
from gateway.advisories.advisories import DEFAULT_TTL_S
from gateway.advisories.precision import Precision
from kvtiers.keys import BlockKey

SMALL = Model(
    "4 kB a token and layer", 4, 256, 512, 4, 4, 2048, 65_536, counted_kv_bytes=SHAPE.kv_token_bytes
)
# About two cores: 10 ms a step, copies at 5 GB/s; prompts take so long that nothing is computed which the disk has.
TWO_CORES = Gpu(
    "two cores", 3e11, 20e9, 1 << 34, 5e9, flops_share=1.0, memory_share=1.0, link_share=1.0, step_s=0.01
)
EIGHT = replace(LLAMA3_8B, max_tokens=65_536)
SEVENTY = Model("llama3-70b", 80, 8192, 28672, 64, 8, 128_256, 65_536)
# Four A100, each with its own link, counted as one: tensor parallelism of four without the cost of exchanging.
FOUR_A100 = replace(
    A100,
    name="4 A100",
    flops=4 * A100.flops,
    memory_bytes_per_s=4 * A100.memory_bytes_per_s,
    memory_bytes=4 * A100.memory_bytes,
    link_bytes_per_s=4 * A100.link_bytes_per_s,
)
# Of a setting's questions, the first of which are not counted: until memory holds what people's habits make it hold.
NUM_QUESTIONS, QUICK_QUESTIONS, WARM_UP_SHARE = 600, 300, 0.25
# People in bursts begin to type within so long of one another, and then are quiet until the next burst. Chosen.
BURST_S, BURST_EVERY_S = 4.0, 30.0
ARMS = ("none", "advised", "timed")


@dataclass(frozen=True, slots=True)
class Setting:
    """The traffic and the machine of one run.

    Attributes:
        shortest_tokens: as `first_lengths` takes it.
        device_share, host_share: the shares of all conversations' KV that fit.
        think_s: the mean of reading and typing, each half of it; None: as people read and type.
        typing_share: the share of questions that are typed; the others come without an announcement.
        given_up_share: the share of typed questions that are never sent.
    """

    model: Model = SMALL
    device: Gpu = TWO_CORES
    shortest_tokens: int = 4096
    device_share: float = 1 / 5
    host_share: float = 1 / 10
    disk_bytes_per_s: float = 1.2e9
    think_s: float | None = None
    typing_share: float = 1.0
    given_up_share: float = 0.0
    is_bursty: bool = False


LARGE = Setting(model=EIGHT, device=A100, shortest_tokens=2048)
SETTINGS = {
    "think 1 s": Setting(think_s=1.0, typing_share=0.5),
    "think 2 s": Setting(think_s=2.0, typing_share=0.5),
    "think 10 s": Setting(think_s=10.0),
    "think 120 s": Setting(think_s=120.0),
    "bursts": Setting(is_bursty=True),
    "30% type": Setting(typing_share=0.3),
    "50% given up": Setting(given_up_share=0.5),
    "80% given up": Setting(given_up_share=0.8),
    "device 10%": Setting(device_share=0.1),
    "device 60%": Setting(device_share=0.6),
    "host 50%": Setting(host_share=0.5),
    "disk 0.3 GB/s": Setting(disk_bytes_per_s=0.3e9),
    "disk 7 GB/s": Setting(disk_bytes_per_s=7e9),
    "8B": LARGE,
    "8B, think 2 s": replace(LARGE, think_s=2.0, typing_share=0.5),
    "8B, think 10 s": replace(LARGE, think_s=10.0),
    "8B, disk 7 GB/s, 50% given up": replace(LARGE, disk_bytes_per_s=7e9, given_up_share=0.5),
    "70B, think 10 s": replace(LARGE, model=SEVENTY, device=FOUR_A100, disk_bytes_per_s=7e9, think_s=10.0),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One run, until `num_questions` questions have been answered."""

    arm: str
    num_questions: int
    setting: Setting = Setting()
    seed: int = 0


class People:
    """Twenty people who read, type and ask, and two streams beside them.

    Attributes:
        ttft_s: of the questions that count.
        stream_token_s: the seconds between tokens, of each answer of a stream.
    """

    def __init__(self, point: Point) -> None:
        setting = self.setting = point.setting
        self.arm, self.clock = point.arm, Clock()
        self.ttft_s, self.stream_token_s = list[float](), list[float]()
        self.num_warm_up, self.num_answered = int(point.num_questions * WARM_UP_SHARE), 0
        self.lengths = first_lengths(setting.shortest_tokens)
        num_blocks = sum(length // BLOCK_SIZE + 1 for length in self.lengths.values())
        block_bytes = BLOCK_SIZE * setting.model.kv_bytes_per_token
        self.node = EmulatedNode(
            self.clock,
            StepCost(setting.device, setting.model),
            Engine(int(num_blocks * setting.device_share), BLOCK_SIZE, max_tokens=setting.model.max_tokens),
            "fcfs",
            tiers=TierSizes(int(num_blocks * setting.host_share) * block_bytes, setting.disk_bytes_per_s),
        )
        self.node.on_end = self.ended
        self._asking: dict[str, str] = {}
        self._advised: dict[str, str] = {}
        self._precision, self._num_asked = Precision(), 0
        # One generator for each person, so that a slower arm does not change people's habits.
        self._chances = {session: random.Random(f"{point.seed} {session}") for session in self.lengths}
        for session, length in self.lengths.items():
            self.place(session, length // BLOCK_SIZE)
            self.read_and_type(session, -self._chances[session].random() * sum(self.times(session)))
        for _ in range(NUM_STREAMS):
            self.stream()

    def place(self, session: str, num_blocks: int) -> None:
        """Put a session's earlier KV on the disk."""
        tiers, names = self.node.tiers, self.node.requests.names(session, num_blocks)
        assert tiers is not None and tiers.hollow.disk is not None
        tiers.hollow.disk.keep([BlockKey(bytes(name)) for name in names])
        remember(tiers, session, names)

    def stream(self) -> None:
        """Begin another answer of a stream."""
        self.submit("stream", STREAM_PROMPT_TOKENS, STREAM_ANSWER_TOKENS)

    def submit(self, kind: str, num_prompt: int, num_answer: int, session: str = "") -> str:
        """Send a request now. Return its id."""
        self._num_asked += 1
        name = f"{kind}{self._num_asked}"
        self.node.submit(Arrival(name, self.clock.now, num_prompt, num_answer, session=session))
        return name

    def times(self, session: str) -> tuple[float, float]:
        """Return for how many seconds a person reads and types next."""
        chance, think_s = self._chances[session], self.setting.think_s
        read_s, type_s = human_times(chance, ANSWER_WORDS)
        if think_s is not None:
            read_s, type_s = (think_s / 2 * chance.lognormvariate(-(SPREAD**2) / 2, SPREAD) for _ in range(2))
        if self.setting.is_bursty:
            now = max(self.clock.now, 0.0)
            read_s = BURST_EVERY_S - now % BURST_EVERY_S + chance.random() * BURST_S
        return read_s, type_s

    def read_and_type(self, session: str, since_s: float) -> None:
        """Let a person read the answer, since `since_s`, and type."""
        chance = self._chances[session]
        read_s, type_s = self.times(session)
        is_typed = chance.random() < self.setting.typing_share
        is_given_up = is_typed and chance.random() < self.setting.given_up_share
        begins_s = max(since_s + read_s, self.clock.now)
        asks_s = max(begins_s + type_s, self.clock.now)
        if is_typed and not (is_given_up and self.arm == "timed"):
            self.clock.at(begins_s, lambda now: self.begin_to_type(session, asks_s))
        if is_given_up:
            self.clock.at(asks_s, lambda now: self.read_and_type(session, now))
        else:
            self.clock.at(asks_s, lambda now: self.ask(session))

    def begin_to_type(self, session: str, asks_s: float) -> None:
        """Let a person begin to type, which the arm may announce."""
        if self.arm == "none":
            return
        now = self.clock.now
        if session in self._advised:
            return  # the word renews the earlier advisory
        wait_s = asks_s - now if self.arm == "timed" else None
        likely = 1.0 if self.arm == "timed" else self._precision.probability("people", "typing", now)
        advisory = self._advised[session] = self.node.advise(session, wait_s, probability=likely)
        self.clock.at(now + DEFAULT_TTL_S, lambda now: self.expire(session, advisory))

    def expire(self, session: str, advisory: str) -> None:
        """Give up an advisory whose question never came."""
        if self._advised.get(session) == advisory:
            del self._advised[session]
            self._precision.note("people", "typing", False, self.clock.now)
            self.node.retract(advisory)

    def ask(self, session: str) -> None:
        """Send the question."""
        if self._advised.pop(session, None) is not None:
            self._precision.note("people", "typing", True, self.clock.now)
        name = self.submit("question", self.lengths[session] + NEW_TOKENS, ANSWER_TOKENS, session)
        self._asking[name] = session

    def ended(self, job: Job) -> None:
        """Let the person read an answer, or the stream go on."""
        session = self._asking.pop(job.arrival.request_id, None)
        if session is None:
            self.stream()
            if self.num_answered >= self.num_warm_up:
                num_gaps = job.arrival.num_answer_tokens - 1
                self.stream_token_s.append((job.ended_s - job.first_token_s) / num_gaps)
            return
        self.lengths[session] += NEW_TOKENS + ANSWER_TOKENS
        self.num_answered += 1
        if self.num_answered > self.num_warm_up:
            self.ttft_s.append(job.ttft_s)
        self.read_and_type(session, self.clock.now)


def serve(point: Point) -> dict[str, float]:
    """Play one point; return the TTFT of the questions that count, the seconds between tokens of streams, and the bytes read from disk."""
    people = People(point)
    try:
        while people.num_answered < point.num_questions:
            people.clock.run(people.clock.now + 1.0)
        assert people.node.tiers is not None and people.node.tiers.hollow.disk is not None
        disk_bytes = people.node.tiers.hollow.disk.reader.bytes_moved
    finally:
        people.node.close()
    return {
        "num_counted": len(people.ttft_s),
        "mean_s": statistics.fmean(people.ttft_s),
        "p50_s": quantile(people.ttft_s, 0.5),
        "p99_s": quantile(people.ttft_s, 0.99),
        "token_s": statistics.fmean(people.stream_token_s),
        "disk_bytes": disk_bytes,
    }


def default_part(bench: Bench) -> None:
    """Find what announcing gains, and what a clairvoyant gains (`bound_`)."""
    of = {arm: Point(arm, int(bench.size)) for arm in ARMS}
    bench.play(of.values())
    for arm, prefix in (("advised", ""), ("timed", "bound_")):
        for figure in ("p50", "p99"):
            bench.figure(
                (f"{prefix}ttft_vs_none_{figure}",),
                bench.ratios(of[arm], of["none"], f"{figure}_s"),
                unit="ratio",
            )
    ours, bound = (bench.ratios(of[arm], of["none"], "mean_s") for arm in ("advised", "timed"))
    gains = [(1 - own) / (1 - best) for own, best in zip(ours, bound, strict=True)]
    bench.figure(("p50_at_default",), bench.ratios(of["advised"], of["none"], "p50_s"), 0.2, unit="ratio")
    bench.figure(("of_clairvoyant_at_default",), gains, 0.6, is_less_better=False, unit="ratio")


def settings_part(bench: Bench) -> None:
    """Find the worst that advisories do to those who are announced, and to others, on traffic of many kinds."""
    settings = {"default": Setting(), **SETTINGS}
    of = {
        (name, arm): Point(arm, int(bench.size), setting)
        for name, setting in settings.items()
        for arm in ARMS[:2]
    }
    bench.play(of.values())
    worst: dict[str, list[float]] = {"ttft_mean_with_vs_without": [], "p99": [], "token_s": []}
    for name in settings:
        ours, theirs = of[name, "advised"], of[name, "none"]
        for figure, measure in zip(worst, ("mean_s", "p99_s", "token_s"), strict=True):
            worst[figure].append(
                bench.figure(("settings", name, figure), bench.ratios(ours, theirs, measure), unit="ratio")
            )
        bench.figure(("settings", name, "disk_bytes"), bench.ratios(ours, theirs, "disk_bytes"), unit="ratio")
    bench.figure(
        ("ttft_mean_with_vs_without_worst",), [max(worst["ttft_mean_with_vs_without"])], 1.02, unit="ratio"
    )
    bench.figure(("p99_worst",), [max(worst["p99"])], 1.05, unit="ratio")
    bench.figure(
        ("others_tokens_per_s_worst",), [1 / max(worst["token_s"])], 0.98, is_less_better=False, unit="ratio"
    )


TABLE = Table(
    "emulated-scarce",
    "Advisories where memory is scarce",
    serve,
    {"default": default_part, "settings": settings_part},
    (NUM_QUESTIONS, QUICK_QUESTIONS),
    f"{QUICK_QUESTIONS} questions in each run",
)
