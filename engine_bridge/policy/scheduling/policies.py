"""Policies of the queue by name. A new one is one new file and one line here. Pure."""

from __future__ import annotations

from collections.abc import Callable

from engine_bridge.policy.scheduling.baselines import Fair, Fcfs, PriorityOrder, Sjf
from engine_bridge.policy.scheduling.bounded import Bounded
from engine_bridge.policy.scheduling.mlq import Mlq
from engine_bridge.policy.scheduling.queue_policy import QueuePolicy

MakePolicy = Callable[[int], QueuePolicy]
"""Makes a policy, given the number of tokens that requests may hold together."""

POLICIES: dict[str, MakePolicy] = {
    "fcfs": lambda num_tokens: Fcfs(),
    "sjf": lambda num_tokens: Sjf(),
    "priority": lambda num_tokens: PriorityOrder(),
    "fair": lambda num_tokens: Fair(),
    "mlq": Mlq,
    "bounded": Bounded,
}

DEFAULT_POLICY = "bounded"
"""The policy that serves, and so the one that benches measure as ours."""
