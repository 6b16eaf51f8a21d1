"""What steps of a machine take: learned from made-up machines, whose times are known."""

import random
from collections.abc import Iterable

import msgspec
import pytest

from engine_bridge.core.scheduling.step_times import StepSeconds, StepTimes, StepWork
from engine_bridge.policy.costs.costs import StepTable
from engine_bridge.protocol.node_facts import Ranks

# A small GPU, and the same with everything taking twice as long.
MACHINE = StepSeconds(
    fixed_s=0.02, request_s=2e-4, rank_s=1e-5, token_s=2e-7, prompt_token_s=1e-4, prompt_rank_s=1e-6
)
SLOW = StepSeconds(**{name: 2 * value for name, value in msgspec.structs.asdict(MACHINE).items()})
NOISE = 0.05


def works(seed: int, num: int) -> Iterable[StepWork]:
    """Batches of a busy node: some decode, one step of four has some of a prompt."""
    rng = random.Random(seed)
    for _ in range(num):
        ranks = rng.choices((0, 8, 16, 64), k=rng.randrange(1, 33))
        prefill = rng.randrange(16, 512) if rng.random() < 0.25 else 0
        context = sum(rng.randrange(50, 2000) for _ in ranks)
        of_prompt = prefill * rng.choice((0, 8, 64))
        yield StepWork(Ranks(len(ranks), sum(ranks), max(ranks)), context, prefill, of_prompt)


def took(machine: StepSeconds, work: StepWork) -> float:
    decodes = work.decodes
    amounts = (1, decodes.num, decodes.total, *work[1:])
    return sum(a * b for a, b in zip(msgspec.structs.astuple(machine), amounts, strict=True))


def test_a_machine_of_which_nothing_was_known_is_known_after_some_hundred_steps() -> None:
    times, rng = StepTimes(StepSeconds(fixed_s=0.1), "mbgmv"), random.Random("noise 0")
    for work in works(0, 600):
        times.observe(work, took(MACHINE, work) * rng.lognormvariate(0, NOISE))
    others = [(took(MACHINE, work), times.predict(work)) for work in works(99, 300)]
    mean = sum(real for real, _ in others) / len(others)
    assert sum((a - b) ** 2 for a, b in others) < 0.04 * sum((a - mean) ** 2 for a, _ in others)
    found = times.seconds.perf("mbgmv", prompt_tokens=100, answer_tokens=50, error=times.error)
    batch = Ranks(16, 16 * 16, 64)
    real = took(MACHINE, StepWork(batch, 16_000, 0))
    assert found.decode.seconds(batch, 16_000) == pytest.approx(real, rel=0.05)
    assert found.prompt_token_s == pytest.approx(MACHINE.prompt_token_s, rel=0.2)
    assert times.error < 2 * NOISE


def test_what_no_step_tells_stays_as_it_was_measured_ahead_but_for_the_pace_of_the_machine() -> None:
    """Nobody uses an adapter, every step has one request, and the machine is half as fast as its profile says."""
    times = StepTimes(MACHINE, "mbgmv", error=0.05)
    for number in range(3000):
        work = StepWork(Ranks(1), 500 + number % 100, 0)
        times.observe(work, took(SLOW, work))
    assert times.seconds.rank_s == pytest.approx(SLOW.rank_s, rel=0.1)
    assert times.seconds.prompt_token_s == pytest.approx(SLOW.prompt_token_s, rel=0.1)


def test_a_table_of_step_times_is_where_it_begins() -> None:
    def predict(points: Iterable[tuple[int, int, int]]) -> list[float]:
        works = [StepWork(Ranks(decodes), context, prefill) for prefill, decodes, context in points]
        return [took(MACHINE, work) for work in works]

    table = StepTable.of(predict, (0, 64, 512, 2048), (0, 1, 8, 64), (0, 8192, 65536))
    found = StepSeconds.from_table(table, rank_s=1e-5)
    wanted = msgspec.structs.replace(MACHINE, prompt_rank_s=0.0)
    assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(wanted), rel=1e-6)
