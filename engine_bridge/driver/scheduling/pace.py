"""Keeps steps short: sets vLLM's own bounds of a step before it schedules, and measures how long steps take."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from engine_bridge.core.scheduling.pacer import Pacer, StepBounds
from engine_bridge.core.scheduling.step_times import StepTimes, StepWork
from engine_bridge.driver.carried import facts_of
from engine_bridge.driver.scheduling.step_work import with_ranks, work_of
from engine_bridge.policy.costs.costs import StepTable, TablePrefill
from engine_bridge.protocol.node_facts import Ranks


class Pace:
    """The bounds of one scheduler's steps.

    Args:
        table, times: how long steps take, without and with adapters; corrected by each real step.
        target_s: the longest a step may take; 0: steps are not bounded.
    """

    def __init__(
        self,
        scheduler: Any,
        table: StepTable,
        times: StepTimes,
        target_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.table, self.times = table, times
        self.prefill_s = TablePrefill(table, scheduler.max_num_scheduled_tokens).prefill_s
        """Predicts the seconds of computing a number of a prompt's tokens, in as many steps as they need."""
        self._clock = clock
        self._scheduler = scheduler
        config = scheduler.scheduler_config
        self.pacer: Pacer | None = None
        """None: vLLM's own bounds hold."""
        # Without chunks vLLM takes a prompt whole or not at all.
        if target_s and config.enable_chunked_prefill:
            self.pacer = Pacer(table, target_s, scheduler.max_num_scheduled_tokens)
        self._threshold = config.long_prefill_token_threshold
        self._most_tokens = scheduler.max_num_scheduled_tokens
        self._has_whole_pictures: bool = config.disable_chunked_mm_input
        # Prompts of models with recurrent layers are computed in whole blocks; 1 where a prompt may end a step anywhere.
        is_by_block = scheduler.need_mamba_block_aligned_split
        self._whole_block_tokens: int = scheduler.cache_config.block_size if is_by_block else 1
        # Steps that run or wait for the step before: vLLM's output, its work, and when it began. An engine that schedules ahead has two.
        self._under_way: deque[tuple[Any, tuple[int, int, int], StepWork, float]] = deque()
        self._last_end_s = -math.inf

    def set_bounds(self, bounds: StepBounds, starting: Iterable[Any] = ()) -> None:
        """Make vLLM's next step keep to these bounds. starting: vLLM's requests that may start in it."""
        scheduler, block_tokens = self._scheduler, self._whole_block_tokens
        # Where a model reads a whole picture at each of its tokens, vLLM computes the picture in one step as long as there is room for it.
        if self._has_whole_pictures and any(
            map(_has_picture_ahead, itertools.chain(scheduler.running, starting))
        ):
            bounds = StepBounds(self._most_tokens, None)
        # The bounds count a token for each request that decodes. Its drafts come on top: they would take the room of prompts, and of other requests.
        num_drafts = (
            sum(len(each.spec_token_ids) for each in scheduler.running) if scheduler.num_spec_tokens else 0
        )
        num_tokens = min(bounds.num_tokens + num_drafts, self._most_tokens)
        # Beside the tokens of the requests that run there may be no room for a whole block, of which vLLM computes no part if it fits into a step.
        num_running_tokens = len(scheduler.running) * (1 + scheduler.num_spec_tokens)
        if num_running_tokens < block_tokens - 1 < num_tokens < block_tokens + num_running_tokens:
            num_tokens = block_tokens - 1
        scheduler.max_num_scheduled_tokens = num_tokens
        scheduler.adaptive_long_prefill_threshold = False  # it would raise the bound
        chunk_tokens = self._threshold
        if bounds.chunk_tokens is not None:
            # Where the step holds fewer, long prompts have that much less, for drafts are behind them. vLLM holds all requests that run to this
            # bound, so an answer's token and its drafts must fit in.
            num_too_many = bounds.num_tokens + num_drafts - num_tokens
            chunk_tokens = bounds.chunk_tokens - math.ceil(num_too_many / bounds.num_long)
            chunk_tokens = max(chunk_tokens, 1 + scheduler.num_spec_tokens)
        scheduler.scheduler_config.long_prefill_token_threshold = chunk_tokens

    def decode_s(self, num_requests: int, num_tokens: int) -> float:
        """Predict the seconds of a step in which this many requests with this many tokens in all decode."""
        return self.table.step_s(0, num_requests, num_tokens)

    # -- what steps take ---------------------------------------------------------------------------------------------

    def scheduled(self, output: Any, running: Ranks) -> None:
        """Note that vLLM has scheduled a step. running: adapter ranks of all requests that run."""
        work = work_of(output)
        ranked = with_ranks(output, work, running, self._rank_of)
        self._under_way.append((output, work, ranked, self._clock()))

    def _rank_of(self, request_id: str) -> int:
        return facts_of(self._scheduler.requests[request_id]).rank

    def ended(self, output: Any) -> None:
        """Note that a step has run, and learn from the time that it was alone on the device.

        A step that never ends, because it failed, is forgotten with the next one.
        """
        now = self._clock()
        while self._under_way:
            scheduled, work, ranked, began_s = self._under_way.popleft()
            if scheduled is output:
                seconds = now - max(began_s, self._last_end_s)
                self.table.observe(*work, seconds)
                self.times.observe(ranked, seconds)
                break
        self._last_end_s = now


def _has_picture_ahead(request: Any) -> bool:
    """Return whether a part of a request's pictures is still to be computed."""
    pictures = request.mm_features
    if not pictures:
        return False
    last = pictures[-1].mm_position
    return bool(request.num_computed_tokens < last.offset + last.length)
