"""What a step of this machine takes, by what is in it: begins with what was measured ahead, and is kept up to date by every real step. Pure.

Seconds = fixed + request_s · requests that decode + rank_s · their ranks as the kernel reads them + token_s · tokens of KV that they attend to
+ prompt_token_s · tokens of prompts + prompt_rank_s · (each of those times its adapter's rank).

By least squares over the steps so far, older ones ever less, and each of the six at least a hundredth of what was known ahead. Source: CaraServe §5,
performance models from profiling; departs in learning on, because machines change (other tenants, heat, clocks), and in what a step is made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from msgspec import Struct

from engine_bridge.policy.costs.costs import StepTable, believed
from engine_bridge.protocol.node_facts import KernelName, NodePerf, PerfModel, Ranks

# A step counts half as much as one that came 700 steps later. Chosen: a machine that changes is followed within some thousand steps, under a minute
# of load, and the batches of a quiet minute do not make those of a busy one forgotten.
KEPT_SHARE = 1 - 1 / 1000
# What is known of a machine ahead counts like so many typical steps. Chosen: what no step has told apart stays as it was, in proportion.
PRIOR_STEPS = 3.0
# The times are solved for once in so many steps, by so many rounds from where they were. Chosen: a solution takes 0.3 ms (measured).
SOLVE_EVERY, NUM_ROUNDS = 32, 30
# None of the times falls below this share of what was known ahead: a few steps that were held up can make a prompt seem to cost nothing, and a
# router would then send every prompt to this node. Chosen: no machine gets a hundred times faster.
LEAST_SHARE = 0.01
# Where nothing was measured ahead, steps are believed at once, however far off they are; so are the first few. Chosen.
UNKNOWN_ERROR, NUM_BELIEVED = 1.0, 8
# What a typical step has of each of the six. Chosen: eight chats that decode beside some of a prompt, their adapters of rank 16.
TYPICAL = (1.0, 8.0, 128.0, 4096.0, 128.0, 2048.0)


class StepWork(NamedTuple):
    """What is in a step. prefill_rank_tokens: each token of a prompt times the rank of its request's adapter."""

    decodes: Ranks
    num_context_tokens: int
    num_prefill_tokens: int
    prefill_rank_tokens: int = 0


class StepSeconds(Struct, frozen=True, kw_only=True, gc=False):
    """The six."""

    fixed_s: float
    request_s: float = 0.0
    rank_s: float = 0.0
    token_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_rank_s: float = 0.0

    @classmethod
    def from_table(cls, table: StepTable, rank_s: float = 0.0) -> StepSeconds:
        """Of a table of step times, which knows of no adapters."""
        one_s, eight_s = table.step_s(0, 1, 0), table.step_s(0, 8, 0)
        request_s = max(eight_s - one_s, 0.0) / 7
        return cls(
            fixed_s=max(one_s - request_s, 0.0),
            request_s=request_s,
            rank_s=rank_s,
            token_s=max(table.step_s(0, 8, 8192) - eight_s, 0.0) / 8192,
            prompt_token_s=max(table.step_s(512, 0, 0) - table.step_s(64, 0, 0), 0.0) / 448,
        )

    @property
    def all(self) -> tuple[float, ...]:
        return (
            self.fixed_s,
            self.request_s,
            self.rank_s,
            self.token_s,
            self.prompt_token_s,
            self.prompt_rank_s,
        )

    def perf(self, kernel: KernelName, prompt_tokens: float, answer_tokens: float, error: float) -> NodePerf:
        """As routing has it. prompt_tokens: of a usual prompt, what has to be computed."""
        prompt_s, prompt_rank_s = self.prompt_token_s * prompt_tokens, self.prompt_rank_s * prompt_tokens
        return NodePerf(
            decode=PerfModel(kernel, self.rank_s, self.fixed_s, self.token_s, self.request_s),
            prefill=PerfModel(kernel, prompt_rank_s, self.fixed_s, 0.0, prompt_s),
            prompt_token_s=self.prompt_token_s,
            answer_tokens=answer_tokens,
            error=error,
        )


class StepTimes:
    """Memory is that of a six by six table, whatever is shown to it.

    Args:
        prior: of this machine, as far as it is known.
        error: mean share by which real steps may be off from that.

    Attributes:
        seconds: as they are now; replaced as a whole, for whoever reads them on another thread.
        error: mean share by which steps have differed from what was predicted lately; none counts for more than `costs.OUTLIER_ERRORS` of it.
    """

    def __init__(self, prior: StepSeconds, kernel: KernelName, error: float = UNKNOWN_ERROR) -> None:
        self.seconds, self.kernel, self.error = prior, kernel, error
        self.num_steps = 0
        self._prior, self._now = prior.all, list(prior.all)
        num = len(self._prior)
        self._squares = [[0.0] * num for _ in range(num)]
        self._products = [0.0] * num
        self._pace = [0.0, 0.0]
        typical_s = max(_dot(self._prior, TYPICAL), 1e-9)
        self._ridge = [PRIOR_STEPS * (amount / typical_s) ** 2 for amount in TYPICAL]

    def predict(self, work: StepWork) -> float:
        return _dot(self._now, self._amounts(work))

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long. Steps without work or time are ignored. What is far off moves little, so that a stall is no change of the machine."""
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
        """Errors count relatively: a step of a thousand tokens is no more telling than one of eight."""
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
        """Least squares with none below LEAST_SHARE of what was known ahead, coordinate by coordinate.

        What steps do not tell apart leans on what was known ahead, times by how much the machine as a whole is slower than that.
        """
        slower = self._pace[0] / self._pace[1] if self._pace[1] > 0 else 1.0
        now, squares, ridge = self._now, self._squares, self._ridge
        wanted = [self._products[at] + ridge[at] * slower * before for at, before in enumerate(self._prior)]
        for _ in range(NUM_ROUNDS):
            for at, row in enumerate(squares):
                others = _dot(row, now) - row[at] * now[at]
                now[at] = max((wanted[at] - others) / (row[at] + ridge[at]), LEAST_SHARE * self._prior[at])
        self.seconds = StepSeconds(
            fixed_s=now[0],
            request_s=now[1],
            rank_s=now[2],
            token_s=now[3],
            prompt_token_s=now[4],
            prompt_rank_s=now[5],
        )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return float(sum(map(mul, a, b)))
