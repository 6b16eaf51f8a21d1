"""Which expected session's KV deserves device memory, and when. Pure: facts in, decisions out.

An advisory is a guess: its request may come late or never. What it costs is device memory that other sessions' prefixes lie in, and a
copy; what it may save is the restore that the request would wait for. Guesses with the most to gain per block go first, and no tenant's
flood goes before another's best; urgent ones, which only the operator's leave makes, go before all of them. Source: SYMPHONY §3.3 (cooperative
memory), §3.5 and §4.5 (priority); the value per byte is ours.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

from engine_bridge.protocol.urgency import is_urgent

# A guess with an arrival time takes device memory this long before, or so many times its copy's length. Chosen.
MIN_LEAD_S = 2.0
LEAD_COPIES = 4.0
# Of the device's blocks, which guesses never take, so that what was used last keeps some room. Chosen.
MARGIN_SHARE = 0.05


class Tier(enum.Enum):
    """How far up a guess's KV may come now."""

    DEVICE = "device"
    HOST = "host"


class GuessFacts(Struct, frozen=True, kw_only=True):
    """What is known of one expected request.

    num_blocks: of its prefix, as far as any tier holds it. probability: that the request comes while it is expected. priority: lower first, as of
    requests. is_ordered: the request comes before those of the tenant's ordered guesses that were issued later. arrival_s: a lower bound on the
    caller's clock, None when nobody can tell. saved_s: what the request would wait for if nothing were moved. copy_s: what moving it to the device
    takes the engine.
    """

    name: str
    tenant: str
    num_blocks: int
    probability: float
    priority: int
    arrival_s: float | None
    issued_s: float
    saved_s: float
    copy_s: float
    is_ordered: bool = False


class Target(Struct, frozen=True):
    """How far one guess may go: its first `num_device_blocks` to the device, all of it to host memory."""

    name: str
    num_device_blocks: int


def plan(guesses: Sequence[GuessFacts], num_free_blocks: int, num_blocks: int, now: float) -> list[Target]:
    """Targets for all guesses, the most deserving first.

    num_free_blocks: of the device's `num_blocks`, those that no running request holds; blocks that guesses already have there are among
    them, because nothing holds them either.
    """
    budget = max(num_free_blocks - int(num_blocks * MARGIN_SHARE), 0)
    targets = []
    for guess in _in_turn(guesses):
        wanted = guess.num_blocks if _is_due(guess, now) else 0
        # A prefix that fits in part is of use in part.
        granted = min(wanted, budget)
        budget -= granted
        targets.append(Target(guess.name, granted))
    return targets


def due_s(guess: GuessFacts) -> float | None:
    """When a guess may begin to take device memory, on the caller's clock; None: at once, or (one that can wait) never."""
    if guess.arrival_s is None or guess.priority != 0:
        return None
    return guess.arrival_s - max(MIN_LEAD_S, LEAD_COPIES * guess.copy_s)


def _is_due(guess: GuessFacts, now: float) -> bool:
    """Urgent ones go to the device at once, those that can wait stay in host memory. Source: SYMPHONY §4.5, "Prioritization Policy"."""
    if guess.priority > 0:
        return False
    due = due_s(guess)
    return due is None or now >= due


def _in_turn(guesses: Sequence[GuessFacts]) -> list[GuessFacts]:
    """All guesses, the most deserving first: urgent ones before all others.

    A tenant's own stand by merit. Between tenants a guess counts for its probability, divided by its place among its tenant's own: a flood
    from one competes with itself, and one whose guesses seldom come true stands behind others' many good ones. Which of its guesses can wait, and
    what it has in long sessions, weighs nothing against others.
    """
    by_tenant: dict[str, list[GuessFacts]] = defaultdict(list)
    for guess in guesses:
        by_tenant[guess.tenant].append(guess)
    placed: list[tuple[float, int, GuessFacts]] = []
    for own in by_tenant.values():
        own.sort(key=_merit)
        _put_in_order(own)
        likely = max(guess.probability for guess in own)
        placed += [(likely / (place + 1), place, guess) for place, guess in enumerate(own)]
    placed.sort(key=lambda item: (not is_urgent(item[2].priority), -item[0], item[1], item[2].issued_s))
    return [guess for _, _, guess in placed]


def _put_in_order(guesses: list[GuessFacts]) -> None:
    """Of a tenant's guesses of one priority, those that are ordered share the places that they have by merit: the first issued gets the best."""
    by_priority: dict[int, list[int]] = defaultdict(list)
    for place, guess in enumerate(guesses):
        if guess.is_ordered:
            by_priority[guess.priority].append(place)
    for places in by_priority.values():
        in_order = sorted((guesses[place] for place in places), key=lambda guess: guess.issued_s)
        for place, guess in zip(places, in_order, strict=True):
            guesses[place] = guess


def _merit(guess: GuessFacts) -> tuple[int, int, float]:
    """The least is the best: priority, then seconds saved per block to within a factor of two, then who has waited longer.

    No finer, because estimates are not: guesses that take turns at being the best would push each other out. And who has typed for longer
    will ask sooner.
    """
    per_block = guess.probability * guess.saved_s / max(guess.num_blocks, 1)
    return guess.priority, -round(math.log2(max(per_block, 1e-12))), guess.issued_s
