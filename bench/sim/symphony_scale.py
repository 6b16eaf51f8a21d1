"""A thousand nodes and a million sessions in virtual time: `python -m bench.sim symphony --part scale`.

A coarser node than the tables': an answer's steps all take what `StepCost` gives for the batch and the context at its start, memory never ends, and
links serve one transfer after another. What stays: users, sessions, leads, advisories that are routed and move KV (network between machines, PCIe to
the device), `FullCost` for requests whose KV is late. A router looks at the session's node and at four drawn ones, not at a thousand.

Nodes are split into cells with routers of their own, one for each process: a session stays in its cell, as it would behind a balancer of sessions.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from bench.sim.core.calibration import A100
from bench.sim.core.conversations import Chats, Exchange
from bench.sim.core.models import LLAMA3_8B
from bench.sim.core.session_node import StepPrefill
from bench.sim.core.shapes import BLOCK_TOKENS, VLLM
from bench.sim.core.steps import StepCost
from bench.sim.core.tables import Workers
from engine_bridge.policy.kv.restore_method import FullCost
from engine_bridge.policy.nodes.routing import RequestEstimate, RoutingPolicy
from engine_bridge.protocol.node_facts import NodeFacts, Ranks
from kvtiers.policy.restore import Action, RestoreFacts

NUM_NODES, NUM_SESSIONS, NUM_CELLS = 1000, 1_000_000, 2
NODES_PER_HOST = 4
NETWORK_BYTES_PER_S = 12.5e9
# Beside the session's own. Source of the idea: the power of a few choices (Mitzenmacher, 2001).
NUM_DRAWN = 4
# Sessions begin at this rate for each node. Chosen: some 100 at a node at a time, about what the tables' nodes serve
# within the paper's latency.
SESSIONS_PER_S = 0.27
LOOK_EVERY_S = 10.0


@dataclass(slots=True, eq=False)
class _Node:
    host: int
    link_free_s: float = 0.0
    num_running: int = 0
    num_expected: int = 0
    num_context: int = 0


@dataclass(slots=True, eq=False)
class _Session:
    """step: what happens to it next: 0 types, 1 sends, 2 has its answer."""

    num_turns: int
    exchange: Exchange
    step: int = 0
    num_tokens: int = 0
    home: int = -1
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellOutcome:
    num_events: int
    num_turns: int
    took_s: float
    virtual_s: float
    counts: dict[str, int]
    ttft_mean_s: float
    imbalance: float
    most_live: int


def _facts_of(node_id: str, node: _Node) -> NodeFacts:
    """Numbers of requests, which is all that SYMPHONY's router knows of a node."""
    return NodeFacts(
        node_id=node_id,
        running=Ranks(node.num_running),
        queued=Ranks(node.num_expected),
        num_tokens=0,
        queued_tokens=0,
        free_tokens=0,
    )


class Cell:
    """Nodes behind one router, with sessions that come at random.

    Args:
        routing: chooses among the session's node, which comes first, and drawn ones.
    """

    def __init__(
        self, num_nodes: int, num_sessions: int, seed: int, chats: Chats, routing: RoutingPolicy
    ) -> None:
        gpu = replace(A100, link_share=0.8)
        self.cost = StepCost(gpu, LLAMA3_8B)
        self.nodes = [_Node(at // NODES_PER_HOST) for at in range(num_nodes)]
        self.counts: Counter[str] = Counter()
        self._network_free_s = [0.0] * (num_nodes // NODES_PER_HOST + 1)
        self._restore = FullCost(prefill=StepPrefill(self.cost, VLLM.step_tokens))
        self._rng = random.Random(f"cell {seed}")
        self._chats, self._routing = chats, routing
        self._num_sessions = num_sessions
        self._heap: list[tuple[float, int, _Session | None]] = []
        self._ids = itertools.count()
        self._ttft_s = 0.0
        self._ratios: list[float] = []
        self._num_live = self._most_live = 0

    def run(self) -> CellOutcome:
        began = time.perf_counter()
        num_events, now, next_look_s = 0, 0.0, LOOK_EVERY_S
        heap, steps = self._heap, (self._type, self._send, self._answered)
        self._push(0.0, None)
        while heap:
            now, _, session = heapq.heappop(heap)
            num_events += 1
            if session is None:
                self._begin(now)
            else:
                steps[session.step](session, now)
            if now >= next_look_s:
                next_look_s = now + LOOK_EVERY_S
                self._look()
        took_s = time.perf_counter() - began
        num_turns = self.counts["turns"]
        return CellOutcome(
            num_events=num_events,
            num_turns=num_turns,
            took_s=took_s,
            virtual_s=now,
            counts=dict(self.counts),
            ttft_mean_s=self._ttft_s / max(num_turns, 1),
            imbalance=statistics.median(self._ratios) if self._ratios else float("nan"),
            most_live=self._most_live,
        )

    def _push(self, at_s: float, session: _Session | None) -> None:
        heapq.heappush(self._heap, (at_s, next(self._ids), session))

    def _look(self) -> None:
        """While sessions still begin: later, nodes empty."""
        if self.counts["sessions"] < self._num_sessions:
            running = [node.num_running for node in self.nodes]
            self._ratios.append(max(running) / max(statistics.median(running), 0.5))

    def _begin(self, now: float) -> None:
        rng = self._rng
        self.counts["sessions"] += 1
        self._num_live += 1
        self._most_live = max(self._most_live, self._num_live)
        self._type(_Session(self._chats.num_turns(rng), self._chats.exchange(rng)), now)
        if self.counts["sessions"] < self._num_sessions:
            self._push(now + rng.expovariate(SESSIONS_PER_S * len(self.nodes)), None)

    # -- a turn --------------------------------------------------------------------------------------------------------

    def _type(self, session: _Session, now: float) -> None:
        """Typing begins: its advisory chooses a node, and KV moves there."""
        at = self._choose(session)
        node = self.nodes[at]
        node.num_expected += 1
        session.ready_s = now
        if session.num_tokens:
            session.ready_s = self._move(session, node, at, now)
        session.home, session.step = at, 1
        self._push(now + session.exchange.lead_s, session)

    def _choose(self, session: _Session) -> int:
        rng, num = self._rng, len(self.nodes)
        places = [int(rng.random() * num) for _ in range(NUM_DRAWN)]
        if session.home >= 0:
            places.append(session.home)
        facts = [_facts_of(str(at), self.nodes[at]) for at in places]
        ask = RequestEstimate(request_id="", num_prompt_tokens=0, num_answer_tokens=0, home=str(session.home))
        route = self._routing.route(ask, facts)
        assert route.node_id is not None, "all nodes are open"
        return int(route.node_id)

    def _move(self, session: _Session, node: _Node, at: int, now: float) -> float:
        """When its KV will be on the device. On the node that it was at it is still there."""
        if at == session.home:
            self.counts["stayed"] += 1
            return now
        num_bytes = session.num_tokens * LLAMA3_8B.kv_bytes_per_token
        ready_s = now
        if self.nodes[session.home].host != node.host:
            self.counts["moved_to_another_machine"] += 1
            begun_s = max(now, self._network_free_s[node.host])
            ready_s = self._network_free_s[node.host] = begun_s + num_bytes / NETWORK_BYTES_PER_S
        link_bytes_per_s = self.cost.gpu.achieved_link_bytes_per_s
        node.link_free_s = max(ready_s, node.link_free_s) + num_bytes / link_bytes_per_s
        return node.link_free_s

    def _send(self, session: _Session, now: float) -> None:
        exchange, node = session.exchange, self.nodes[session.home]
        num_cached, wait_s = session.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS, 0.0
        if session.ready_s > now:
            num_cached, wait_s = self._late(session, num_cached, session.ready_s - now)
        num_prompt = session.num_tokens + exchange.num_prompt_tokens
        node.num_expected -= 1
        node.num_running += 1
        session.num_tokens = num_prompt + exchange.num_answer_tokens
        node.num_context += session.num_tokens
        step_s = self.cost.step_s((), node.num_running, node.num_context)
        prefill_s = self._restore.prefill.prefill_s(num_prompt - num_cached, num_cached)  # type: ignore[union-attr]
        ttft_s = wait_s + max(prefill_s, step_s)
        self._ttft_s += ttft_s
        self.counts["turns"] += 1
        session.step = 2
        self._push(now + ttft_s + (exchange.num_answer_tokens - 1) * step_s, session)

    def _late(self, session: _Session, num_tokens: int, left_s: float) -> tuple[int, float]:
        """Tokens that are not computed, and seconds to wait for them."""
        self.counts["late"] += 1
        num_bytes = num_tokens * LLAMA3_8B.kv_bytes_per_token
        decision = self._restore.decide(
            RestoreFacts(
                num_blocks=num_tokens // BLOCK_TOKENS,
                num_ready_blocks=0,
                num_tail_tokens=session.exchange.num_prompt_tokens,
                block_size_tokens=BLOCK_TOKENS,
                block_bytes=BLOCK_TOKENS * LLAMA3_8B.kv_bytes_per_token,
                num_layers=LLAMA3_8B.num_layers,
                num_ready_layers=0,
                disk_bytes_done=0,
                disk_bytes_left=num_bytes,
                disk_bytes_ahead=0,
                waited_s=0.0,
                prefill_s_per_token=None,
                disk_bytes_per_s=num_bytes / left_s,
                host_bytes_per_s=self.cost.gpu.achieved_link_bytes_per_s,
            )
        )
        if decision.action is Action.LOAD and not decision.num_blocks:
            self.counts["recomputed"] += 1
            return 0, 0.0
        return num_tokens, left_s

    def _answered(self, session: _Session, now: float) -> None:
        node = self.nodes[session.home]
        node.num_running -= 1
        node.num_context -= session.num_tokens
        session.num_turns -= 1
        if session.num_turns == 0 or session.num_tokens > self._chats.max_tokens:
            self._num_live -= 1
            return
        read_s = session.exchange.read_s
        session.exchange, session.step = self._chats.exchange(self._rng), 0
        self._push(now + read_s, session)

    def check_invariants(self) -> None:
        """Raises AssertionError unless everybody has been served and nothing is held any more."""
        for node in self.nodes:
            assert (node.num_running, node.num_expected, node.num_context) == (0, 0, 0), "a node is not empty"
        assert self._num_live == 0, "sessions were lost"


def run_cell(
    num_nodes: int, num_sessions: int, seed: int, chats: Chats, routing: RoutingPolicy
) -> CellOutcome:
    cell = Cell(num_nodes, num_sessions, seed, chats, routing)
    outcome = cell.run()
    cell.check_invariants()
    return outcome


def measure(
    workers: Workers,
    seed: int,
    chats: Chats,
    routing: RoutingPolicy,
    num_nodes: int = NUM_NODES,
    num_sessions: int = NUM_SESSIONS,
) -> dict[str, Any]:
    """Figures of all cells together; events a second are those of all processes, over the longest one's time."""
    began = time.perf_counter()
    num = NUM_CELLS
    seeds = range(seed * num, (seed + 1) * num)
    cells: list[CellOutcome] = workers.map(
        run_cell, [num_nodes // num] * num, [num_sessions // num] * num, seeds, [chats] * num, [routing] * num
    )
    wall_s = time.perf_counter() - began
    counts: Counter[str] = Counter()
    for cell in cells:
        counts.update(cell.counts)
    num_turns = counts["turns"]
    return {
        "num_nodes": num_nodes,
        "num_sessions": counts["sessions"],
        "num_turns": num_turns,
        "num_events": sum(cell.num_events for cell in cells),
        "events_per_s": round(sum(cell.num_events for cell in cells) / wall_s),
        "wall_s": round(wall_s, 1),
        "virtual_s": round(max(cell.virtual_s for cell in cells)),
        "most_live_sessions": sum(cell.most_live for cell in cells),
        "ttft_mean_s": round(sum(cell.ttft_mean_s * cell.num_turns for cell in cells) / num_turns, 4),
        "late_share": round(counts["late"] / num_turns, 6),
        "moved_share": round(counts["moved_to_another_machine"] / num_turns, 4),
        "imbalance_max_over_median": [round(cell.imbalance, 3) for cell in cells],
        "made_by": f"{type(routing).__name__} + FullCost, coarser node by StepCost({A100.name}, {LLAMA3_8B.name}), {chats.name}",
    }
