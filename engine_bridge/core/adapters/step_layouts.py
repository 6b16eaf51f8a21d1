"""Which adapters a step lays out itself, though that takes the time of all who run in it: where the engine computes on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from kvtiers.policy.rates import Rate

# Of a step's time, what layouts may make it longer by. Chosen: half of what a cold adapter may cost other streams (E9).
MOST_SHARE = 0.25
# Before anything was measured, in bytes of what is laid out. Chosen: what one core does beside nobody else.
PRIOR_BYTES_PER_S = 2e9


class StepFacts(Struct, frozen=True):
    """Of the step that comes: how many requests run, and what it takes without a layout."""

    num_running: int
    step_s: float


class StepLayouts:
    """Weighs those who run against who waits. Whoever starts now rather than after a layout beside the step gains a step; each who runs loses
    the layout's time. Of one thread.

    Source: ours. CaraServe §4.1 starts at once, as its host has cores that the device does not need.
    """

    def __init__(self, facts: Callable[[], StepFacts]) -> None:
        """facts: asked once a step, if at all."""
        self.rate = Rate(PRIOR_BYTES_PER_S)
        self._ask = facts
        self._facts: StepFacts | None = None
        self._granted_s: dict[int, float] = {}

    def begin(self) -> None:
        """Another step is about to be scheduled."""
        self._facts = None
        self._granted_s.clear()

    def allows(self, adapter_id: int, num_bytes: int, now: float) -> bool:
        """May the step that comes lay this adapter out? The answer stays the same until `begin`. num_bytes: as laid out."""
        if adapter_id in self._granted_s:
            return True
        if self._facts is None:
            self._facts = self._ask()
        facts, layout_s = self._facts, num_bytes / self.rate.at(now)
        if facts.num_running * layout_s > facts.step_s:
            return False
        if sum(self._granted_s.values()) + layout_s > MOST_SHARE * facts.step_s:
            return False
        self._granted_s[adapter_id] = layout_s
        return True
