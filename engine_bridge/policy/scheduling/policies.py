"""Policies of the queue by name. A new one is one new file and one line here. Pure."""

from __future__ import annotations

from collections.abc import Callable

from engine_bridge.policy.scheduling.baselines import Fair, OneOrder
from engine_bridge.policy.scheduling.bounded import Bounded
from engine_bridge.policy.scheduling.mlq import Mlq
from engine_bridge.policy.scheduling.queue_policy import QueuePolicy

MakePolicy = Callable[[int], QueuePolicy]
"""Makes a policy, given the number of tokens that requests may hold together."""

POLICIES: dict[str, MakePolicy] = {
    # First come, first served: vLLM's default, and S-LoRA's.
    "fcfs": lambda num_tokens: OneOrder("fcfs", lambda facts: facts.arrived_s),
    # The shortest by prediction first: μServe's (Qiu et al., 2024), as in Chameleon §5.3. It starves long requests; a baseline.
    "sjf": lambda num_tokens: OneOrder("sjf", lambda facts: facts.duration_s),
    # The lowest priority first, then the earliest: vLLM's other policy.
    "priority": lambda num_tokens: OneOrder("priority", lambda facts: facts.priority, minds_priority=True),
    "fair": lambda num_tokens: Fair(),
    "mlq": Mlq,
    "bounded": Bounded,
}

DEFAULT_POLICY = "bounded"
"""The policy that serves, and so the one that benches measure as ours."""
