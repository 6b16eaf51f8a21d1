"""People who go on with their sessions, on one emulated node: the users of `bench.sim.core.session_cluster`, asking vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

from bench.emulated.node import EmulatedNode, Engine, Job
from bench.emulated.tiers import TierSizes
from bench.sim.core.clock import Clock
from bench.sim.core.session_cluster import Habits, Users
from bench.sim.core.session_node import Turn
from bench.sim.core.steps import StepCost
from bench.sim.core.tiers import SessionKv
from kvtiers.keys import BlockKey


class OneNode:
    """In the place of a cluster of session nodes, for `Users`."""

    def __init__(self, node: EmulatedNode) -> None:
        self.nodes: Sequence[EmulatedNode] = (node,)
        self.node = node

    def place(self, kv: SessionKv, num_blocks: int, at: int) -> None:
        """A session that went on here before the run began: its KV is where the node would keep it."""
        names = self.node.requests.names(kv.session_id, num_blocks)
        tiers, pool = self.node.tiers, self.node.scheduler.kv_cache_manager.block_pool
        if tiers is not None:
            tiers.hollow.place(kv.session_id, [BlockKey(bytes(name)) for name in names])
            left = SimpleNamespace(session_id=kv.session_id, cache_salt=None, block_hashes=names)
            tiers.promoter.remember(left)
        elif self.node.engine.has_prefix_cache and 0 < num_blocks <= pool.get_num_free_blocks():
            blocks = pool.get_new_blocks(num_blocks)
            pool.cache_full_blocks(
                request=SimpleNamespace(block_hashes=names),
                blocks=blocks,
                num_cached_blocks=0,
                num_full_blocks=num_blocks,
                block_size=self.node.engine.block_tokens,
                kv_cache_group_id=0,
            )
            pool.free_blocks(reversed(blocks))

    def advise(
        self, kv: SessionKv, arrival_s: float | None, priority: int, now: float, adapter_id: int | None = None
    ) -> None:
        self.node.advise(kv.session_id, arrival_s, priority)

    def submit(self, turn: Turn) -> None:
        self.node.submit(replace(turn, session=turn.kv.session_id))

    def ended(self, turn: Turn) -> None: ...

    def forget(self, kv: SessionKv) -> None:
        """Nobody says so to a node."""


@dataclass(frozen=True, slots=True)
class Talked:
    """jobs: those that ended after the warm-up. advised: advisories by how they ended. counts: what the dispatcher counted."""

    jobs: list[Job]
    advised: dict[str, int]
    num_steps: int
    counts: dict[str, int]


def talk_on_node(
    cost: StepCost,
    engine: Engine,
    tiers: TierSizes | None,
    habits: Habits,
    num_users: int,
    seed: int,
    span_s: float,
    warm_up_s: float,
    policy: str = "fcfs",
    urgent_tpot_s: float = 0.0,
) -> Talked:
    """So many people talk to one node for so long."""
    clock = Clock()
    node = EmulatedNode(clock, cost, engine, policy, tiers=tiers, urgent_tpot_s=urgent_tpot_s)
    users = Users(clock, OneNode(node), habits, num_users, seed)  # type: ignore[arg-type]  # answers what they ask of a cluster
    node.on_end = lambda job: users.ended(job, clock.now)  # type: ignore[arg-type]  # which look at its arrival
    try:
        users.start()
        clock.run(span_s)
    finally:
        node.close()
    jobs = [job for job in node.ended if job.ended_s >= warm_up_s]
    advised = dict(node.tiers.advised) if node.tiers is not None else {}
    counts = dict(node.scheduling.dispatcher.counts) if node.scheduling is not None else {}
    return Talked(jobs, advised, node.tally.num_steps, counts)
