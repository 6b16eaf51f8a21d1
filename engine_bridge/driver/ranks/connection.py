"""Connects a newly built engine of several ranks with them, and its tiers with their caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_bridge.driver.in_process import reuses_kv, scheduler_of
from engine_bridge.driver.kv.layer_groups import LayerFacts, layout_of
from engine_bridge.driver.ranks.calls import Ranks, RanksCopier
from engine_bridge.policy.limits.model_support import CannotHave

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers


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
    copier = RanksCopier(ranks, lambda: sum(scheduler.get_request_counts()) > 0)
    layout = layout_of(scheduler.kv_cache_config, engine.vllm_config)
    tiers.attach(found[0], layout, engine.vllm_config, lambda pool, waiter: copier, len(found))
    assert tiers.store is not None
    pool = tiers.store.pool
    ranks.call("overture_attach", pool.path, pool.num_slots)
