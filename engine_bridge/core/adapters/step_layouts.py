"""Which adapters a step lays out itself, though that takes the time of all requests that run in it: where the engine computes on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from kvtiers.policy.rates import Rate

# The share of a step's time by which layouts may lengthen it. Chosen: half of the slowdown that a cold adapter may cause other streams (E9).
MOST_SHARE = 0.25
# Layout speed before any was measured, in bytes of the laid-out adapter per second. Chosen: the speed of one core with no other load.
PRIOR_BYTES_PER_S = 2e9


class StepFacts(Struct, frozen=True):
    """The facts of the coming step: the number of running requests, and its duration in seconds without a layout."""

    num_running: int
    step_s: float


class StepLayouts:
    """Weighs the requests that run against the ones that wait. For one thread only.

    A request that starts now, rather than after a layout beside the step, gains a step; each running request loses the time of the layout.

    Source: ours. CaraServe §4.1 starts at once, as its host has cores that the device does not need.
    """

    def __init__(self, facts: Callable[[], StepFacts]) -> None:
        """Take `facts`, which is called at most once a step."""
        self.rate = Rate(PRIOR_BYTES_PER_S)
        self._ask = facts
        self._facts: StepFacts | None = None
        self._granted_s: dict[int, float] = {}

    def begin(self) -> None:
        """Note that another step is about to be scheduled."""
        self._facts = None
        self._granted_s.clear()

    def allows(self, adapter_id: int, num_bytes: int, now: float) -> bool:
        """Return whether the coming step may lay this adapter out. The answer stays the same until `begin`. num_bytes: size as laid out."""
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
