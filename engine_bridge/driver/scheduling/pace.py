"""Keeps steps short: sets vLLM's own bounds of a step before it schedules, by what the step is predicted to take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine_bridge.driver.step_work import work_of
from engine_bridge.policy.costs import StepTable
from engine_bridge.policy.pacing import StepPace, pace


class Pace:
    """The bounds of one scheduler's steps.

    Args:
        table: what steps take; corrected by each real one.
        target_s: how long a step may take; 0: as long as it does.
        clock: that steps are timed by.
    """

    def __init__(
        self,
        scheduler: Any,
        table: StepTable,
        target_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.table = table
        self._clock = clock
        self._scheduler = scheduler
        config = scheduler.scheduler_config
        # Without it vLLM takes a prompt whole or not at all.
        self._target_s = target_s if config.enable_chunked_prefill else 0.0
        self._most_tokens = scheduler.max_num_scheduled_tokens
        self._threshold = config.long_prefill_token_threshold
        self._work: tuple[int, int, int] | None = None
        self._began_s = 0.0

    def look(self) -> StepPace | None:
        """What the next step takes; None: vLLM's own bounds."""
        if not self._target_s:
            return None
        num_decodes = num_context = 0
        under_way = []
        for request in self._scheduler.running:
            num_context += request.num_computed_tokens
            num_left = request.num_tokens - request.num_computed_tokens
            if num_left > 1:
                under_way.append(num_left)
            else:
                num_decodes += 1
        return pace(self.table, self._target_s, num_decodes, num_context, under_way, self._most_tokens)

    def set_bounds(self, step: StepPace | None, num_starting_tokens: int) -> None:
        """Have vLLM's next step keep to it, given the prompt tokens of those that begin."""
        scheduler = self._scheduler
        if step is None:
            return
        num_decodes = len(scheduler.running) - step.num_prefilling
        scheduler.max_num_scheduled_tokens = min(step.prefill_tokens + num_decodes, self._most_tokens)
        scheduler.adaptive_long_prefill_threshold = False  # it would raise the bound
        is_capped = step.num_prefilling > 0 and num_starting_tokens > 0
        chunk_tokens = step.chunk_tokens(num_starting_tokens) if is_capped else self._threshold
        scheduler.scheduler_config.long_prefill_token_threshold = chunk_tokens

    # -- what steps take ---------------------------------------------------------------------------------------------

    def scheduled(self, output: Any) -> None:
        """vLLM has scheduled a step."""
        self._work = work_of(output)
        self._began_s = self._clock()

    def ended(self) -> None:
        """It has run."""
        if self._work is not None:
            self.table.observe(*self._work, self._clock() - self._began_s)
            self._work = None
