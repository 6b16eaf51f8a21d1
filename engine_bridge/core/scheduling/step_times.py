"""The time that a step takes on this machine, by its contents: starts from a measurement made ahead, and learns from every real step. Pure.

Seconds = fixed + request_s · requests that decode + rank_s · their ranks as the kernel reads them + token_s · tokens of KV that they attend to
+ prompt_token_s · tokens of prompts + prompt_rank_s · (each of those times its adapter's rank).

Fitted by least squares over the steps so far, where older steps weigh less, and each of the six times is at least a hundredth of the one measured
ahead. Source: CaraServe §5, performance models from profiling; departs in learning continuously, because machines change (other tenants, heat,
clocks), and in the parts that make up a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import astuple

from engine_bridge.policy.costs.costs import StepTable, believed
from engine_bridge.protocol.node_facts import KernelName, NodePerf, PerfModel, Ranks

# A step counts half as much as one made 700 steps later. Chosen: a change of the machine is followed within some thousand steps, under a minute of
# load, and the batches of a quiet minute do not make it forget the batches of a busy one.
KEPT_SHARE = 1 - 1 / 1000
# The measurement made ahead counts like this many typical steps. Chosen: times that no step has told apart keep their proportions.
PRIOR_STEPS = 3.0
# The times are solved for once in this many steps, in this many rounds from where they were. Chosen: a solution takes 0.3 ms (measured).
SOLVE_EVERY, NUM_ROUNDS = 32, 30
# No time falls below this share of the one measured ahead: a few steps that were held up can make a prompt seem to cost nothing, and a router would
# then send every prompt to this node. Chosen: no machine gets a hundred times faster.
LEAST_SHARE = 0.01
# The error assumed where nothing was measured ahead, so that steps are believed at once, however far off they are, and the number of first steps
# that are always believed. Chosen.
UNKNOWN_ERROR, NUM_BELIEVED = 1.0, 8
# The amount of each of the six in a typical step. Chosen: eight chats that decode beside some of a prompt, their adapters of rank 16.
TYPICAL = (1.0, 8.0, 128.0, 4096.0, 128.0, 2048.0)


class StepWork(NamedTuple):
    """The contents of a step. prefill_rank_tokens: the sum over the tokens of prompts of their request's adapter rank."""

    decodes: Ranks
    num_context_tokens: int
    num_prefill_tokens: int
    prefill_rank_tokens: int = 0


class StepSeconds(Struct, frozen=True, gc=False):
    """The six times that make up a step, in seconds, in the order of `TYPICAL`."""

    fixed_s: float
    request_s: float = 0.0
    rank_s: float = 0.0
    token_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_rank_s: float = 0.0

    @classmethod
    def from_table(cls, table: StepTable, rank_s: float = 0.0) -> StepSeconds:
        """Return the times of a table of step times, which knows of no adapters."""
        one_s, eight_s = table.step_s(0, 1, 0), table.step_s(0, 8, 0)
        request_s = max(eight_s - one_s, 0.0) / 7
        return cls(
            fixed_s=max(one_s - request_s, 0.0),
            request_s=request_s,
            rank_s=rank_s,
            token_s=max(table.step_s(0, 8, 8192) - eight_s, 0.0) / 8192,
            prompt_token_s=max(table.step_s(512, 0, 0) - table.step_s(64, 0, 0), 0.0) / 448,
        )

    def perf(self, kernel: KernelName, prompt_tokens: float, answer_tokens: float, error: float) -> NodePerf:
        """Return the times in the form that routing uses. prompt_tokens: the tokens of a usual prompt that have to be computed."""
        prompt_s, prompt_rank_s = self.prompt_token_s * prompt_tokens, self.prompt_rank_s * prompt_tokens
        return NodePerf(
            decode=PerfModel(kernel, self.rank_s, self.fixed_s, self.token_s, self.request_s),
            prefill=PerfModel(kernel, prompt_rank_s, self.fixed_s, 0.0, prompt_s),
            prompt_token_s=self.prompt_token_s,
            answer_tokens=answer_tokens,
            error=error,
        )


class StepTimes:
    """Learns the times of steps. Its memory is a six by six table, however many steps it sees.

    Args:
        prior: this machine's times, as far as they are known.
        error: mean share by which real steps may differ from these.

    Attributes:
        seconds: the times as they are now; replaced as a whole, as other threads read them.
        error: mean share by which steps have differed from their prediction lately; none counts for more than `costs.OUTLIER_ERRORS` of it.
    """

    def __init__(self, prior: StepSeconds, kernel: KernelName, error: float = UNKNOWN_ERROR) -> None:
        self.seconds, self.kernel, self.error = prior, kernel, error
        self.num_steps = 0
        self._prior: tuple[float, ...] = astuple(prior)
        self._now = list(self._prior)
        num = len(self._prior)
        self._squares = [[0.0] * num for _ in range(num)]
        self._products = [0.0] * num
        self._pace = [0.0, 0.0]
        typical_s = max(_dot(self._prior, TYPICAL), 1e-9)
        self._ridge = [PRIOR_STEPS * (amount / typical_s) ** 2 for amount in TYPICAL]

    def predict(self, work: StepWork) -> float:
        """Return the predicted seconds of a step."""
        return _dot(self._now, self._amounts(work))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took this many seconds. Steps without work or time are ignored.

        A time far from the prediction moves little, so that a stall does not count as a change of the machine.
        """
        if not 0 < seconds < math.inf or not (work.decodes.num > 0 or work.num_prefill_tokens > 0):
            return
        amounts = self._amounts(work)
        predicted = max(_dot(self._now, amounts), 1e-9)
        share, self.error = believed(seconds / predicted - 1, self.error)
        if self.num_steps >= NUM_BELIEVED:
            seconds = predicted * (1 + share)
        self._learn(amounts, seconds, max(predicted, seconds))
        self.num_steps += 1
        if self.num_steps % SOLVE_EVERY == 0 or self.num_steps <= NUM_BELIEVED:
            self._solve()

    def _amounts(self, work: StepWork) -> tuple[float, ...]:
        decodes = work.decodes
        read = decodes.num * decodes.most if self.kernel == "bgmv" else decodes.total
        return (
            1.0,
            decodes.num,
            read,
            work.num_context_tokens,
            work.num_prefill_tokens,
            work.prefill_rank_tokens,
        )

    def _learn(self, amounts: Sequence[float], seconds: float, unit_s: float) -> None:
        """Add a step to the sums. Errors count relatively: a step of a thousand tokens weighs no more than one of eight."""
        row, value = [amount / unit_s for amount in amounts], seconds / unit_s
        for at, mine in enumerate(row):
            squares = self._squares[at]
            for other, theirs in enumerate(row):
                squares[other] = KEPT_SHARE * squares[other] + mine * theirs
            self._products[at] = KEPT_SHARE * self._products[at] + mine * value
        known = _dot(self._prior, row)
        self._pace = [
            KEPT_SHARE * self._pace[0] + known * value,
            KEPT_SHARE * self._pace[1] + known * known,
        ]

    def _solve(self) -> None:
        """Solve the least squares, coordinate by coordinate, with no time below LEAST_SHARE of the one measured ahead.

        Times that steps do not tell apart lean on the ones measured ahead, scaled by how much slower the machine as a whole is now.
        """
        slower = self._pace[0] / self._pace[1] if self._pace[1] > 0 else 1.0
        now, squares, ridge = self._now, self._squares, self._ridge
        wanted = [self._products[at] + ridge[at] * slower * before for at, before in enumerate(self._prior)]
        for _ in range(NUM_ROUNDS):
            for at, row in enumerate(squares):
                others = _dot(row, now) - row[at] * now[at]
                now[at] = max((wanted[at] - others) / (row[at] + ridge[at]), LEAST_SHARE * self._prior[at])
        self.seconds = StepSeconds(*now)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return float(sum(map(mul, a, b)))
