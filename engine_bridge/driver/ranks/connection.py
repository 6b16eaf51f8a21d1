"""Connects a newly built engine of several ranks with them, and its tiers with their caches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine_bridge.driver.in_process import reuses_kv, scheduler_of
from engine_bridge.driver.kv.layer_groups import LayerFacts, layout_of
from engine_bridge.driver.ranks.calls import LATE_S, Ranks, RanksCopier
from engine_bridge.policy.limits.model_support import CannotHave

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers


class LateAnswers:
    """Asks the ranks for the copies made since the last step, while no request runs whose next step would bring the answer.

    Args:
        copier: hears their answers.
        is_busy: returns whether requests run or wait.
    """

    def __init__(
        self,
        copier: RanksCopier,
        is_busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copier, self._is_busy, self._clock = copier, is_busy, clock
        self._looked_s = -math.inf

    def has_work(self) -> bool:
        """Return whether it is time to look."""
        return self.wait_s() == 0

    def wait_s(self) -> float | None:
        """Return the seconds until the next look; None where all have answered."""
        if not self._copier.sent.num_open or self._is_busy():
            return None
        return max(self._looked_s + LATE_S - self._clock(), 0.0)

    def advance(self) -> None:
        """Look, if it is time. Raises RuntimeError where a rank has ended."""
        if self.has_work():
            self._looked_s = self._clock()
            self._copier.ask()


def connect(engine: Any, tiers: KvTiers | None) -> None:
    """Make the ranks of a newly built engine known to it, and let the tiers' copies go through them.

    Raises:
        CannotHave: the ranks keep KV in a form that the tiers cannot hold.
        RankError: a rank cannot map the host memory.
    """
    engine.ranks = ranks = Ranks(engine.engine_core.engine_core.model_executor)
    if tiers is None or not reuses_kv(engine.vllm_config):
        return
    found = ranks.call("overture_layers")
    problems = [each for each in found if not isinstance(each, LayerFacts)]
    if not problems and any(each != found[0] for each in found):
        problems = ["ranks keep their KV in different forms"]
    if problems:
        raise CannotHave({"KV tiers": problems[0]})
    scheduler = scheduler_of(engine)
    copier = RanksCopier(
        ranks,
        len(found),
        lambda: sum(scheduler.get_request_counts()) > 0,
        overlaps=found[0].device_type != "cpu",
    )
    layout = layout_of(scheduler.kv_cache_config, engine.vllm_config)
    tiers.attach(found[0], layout, engine.vllm_config, lambda pool, waiter: copier, len(found))
    assert tiers.store is not None
    pool = tiers.store.pool
    ranks.call("overture_attach", pool.path, pool.num_slots)
