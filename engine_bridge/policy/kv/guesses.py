"""Which expected session's KV deserves device memory, and when. Pure: facts in, decisions out.

An advisory is a guess: its request may come late or never. Its cost is device memory that other sessions' prefixes lie in, and a
copy; its possible saving is the restore that the request would wait for. Guesses with the most to gain per block come first, and no tenant's
flood comes before another tenant's best guess; urgent ones, which need the operator's permission, come before all of them. Source: SYMPHONY §3.3
(cooperative memory), §3.5 and §4.5 (priority); the value per byte is ours.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

from engine_bridge.protocol.node import LIKELY
from engine_bridge.protocol.urgency import is_urgent

# A guess with an arrival time takes device memory this many seconds before it, or this many times its copy's duration. Chosen.
MIN_LEAD_S = 2.0
LEAD_COPIES = 4.0
# The share of the device's blocks that guesses never take, so that recently used KV keeps some room. Chosen.
MARGIN_SHARE = 0.05
# The share of the device's blocks that the pins of one tenant may take together. Chosen: four tenants that pin all they may leave room for requests.
PIN_SHARE = 0.2


class GuessFacts(Struct, frozen=True, kw_only=True):
    """The facts of one expected request.

    Attributes:
        num_blocks: blocks of its prefix that any tier holds.
        probability: that the request comes while it is expected, when that began.
        left: the part of this probability that is left, since it has not come yet.
        priority: lower is earlier, as for requests.
        is_divisible: whether a part of its prefix is of use.
        is_pin: whether it counts for its tenant's share of pins.
        is_ordered: whether the request comes before the tenant's ordered guesses that were issued later.
        arrival_s: a lower bound on the caller's clock; None when it is unknown.
        saved_s: seconds that the request would wait if nothing were moved.
        copy_s: seconds of the engine to move it to the device.
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
    left: float = 1.0
    is_divisible: bool = True
    is_pin: bool = False
    is_ordered: bool = False

    @property
    def is_likely(self) -> bool:
        """Whether its request is likelier to come than not, as long as it has not come by now."""
        return self.probability * self.left > LIKELY


class Target(Struct, frozen=True):
    """How far one guess may come: its first `num_device_blocks` to the device, all of it to host memory."""

    name: str
    num_device_blocks: int


def plan(guesses: Sequence[GuessFacts], num_free_blocks: int, num_blocks: int, now: float) -> list[Target]:
    """Return targets for all guesses, the most deserving first.

    num_free_blocks: of the device's `num_blocks`, those that no running request holds; blocks that guesses already have there are among them, because
    no request holds them either.
    """
    budget = max(num_free_blocks - int(num_blocks * MARGIN_SHARE), 0)
    pins = dict.fromkeys((guess.tenant for guess in guesses), int(num_blocks * PIN_SHARE))
    targets = []
    for guess in _in_turn(guesses):
        wanted = guess.num_blocks if _is_due(guess, now) else 0
        room = min(budget, pins[guess.tenant]) if guess.is_pin else budget
        # A prefix that fits in part is mostly of use in part.
        granted = min(wanted, room) if guess.is_divisible or wanted <= room else 0
        budget -= granted
        pins[guess.tenant] -= granted * guess.is_pin
        targets.append(Target(guess.name, granted))
    return targets


def due_s(guess: GuessFacts) -> float | None:
    """Return when a guess may begin to take device memory, on the caller's clock; None: at once, or never if it can wait."""
    if guess.arrival_s is None or guess.priority != 0:
        return None
    return guess.arrival_s - max(MIN_LEAD_S, LEAD_COPIES * guess.copy_s)


def _is_due(guess: GuessFacts, now: float) -> bool:
    """Return whether a guess may take device memory now.

    Urgent guesses may at once; guesses that can wait stay in host memory. Source: SYMPHONY §4.5, "Prioritization Policy".
    """
    if guess.priority > 0:
        return False
    due = due_s(guess)
    return due is None or now >= due


def _in_turn(guesses: Sequence[GuessFacts]) -> list[GuessFacts]:
    """Return all guesses, the most deserving first: urgent ones before all others.

    A tenant's guesses are ranked by merit. Between tenants a guess counts for its probability, divided by its place among its tenant's guesses: a
    flood from one tenant competes with itself, and a tenant whose guesses seldom come true stands behind others' many good ones. Which of a
    tenant's guesses can wait, and how long its sessions are, weighs nothing against other tenants.
    """
    by_tenant: dict[str, list[GuessFacts]] = defaultdict(list)
    for guess in guesses:
        by_tenant[guess.tenant].append(guess)
    placed: list[tuple[float, int, GuessFacts]] = []
    for own in by_tenant.values():
        own.sort(key=_merit)
        _put_in_order(own)
        likely = max(guess.probability * guess.left for guess in own)
        placed += [(likely / (place + 1), place, guess) for place, guess in enumerate(own)]
    placed.sort(key=lambda item: (not is_urgent(item[2].priority), -item[0], item[1], item[2].issued_s))
    return [guess for _, _, guess in placed]


def _put_in_order(guesses: list[GuessFacts]) -> None:
    """Order a tenant's ordered guesses by issue, in place: per priority, the first issued gets the best place that they have by merit."""
    by_priority: dict[int, list[int]] = defaultdict(list)
    for place, guess in enumerate(guesses):
        if guess.is_ordered:
            by_priority[guess.priority].append(place)
    for places in by_priority.values():
        in_order = sorted((guesses[place] for place in places), key=lambda guess: guess.issued_s)
        for place, guess in zip(places, in_order, strict=True):
            guesses[place] = guess


def _merit(guess: GuessFacts) -> tuple[int, int, float]:
    """Return the sort key of a guess, the least for the best: priority, then seconds saved per block to within a factor of two, then age.

    No finer, because estimates are not: guesses that take turns at being the best would push each other out. The user typing for longest
    will ask soonest, so the oldest guess is first, until its probability to come has halved.
    """
    per_block = guess.probability * guess.saved_s / max(guess.num_blocks, 1)
    num_halved = int(-math.log2(max(guess.left, 1e-12)))
    return guess.priority, num_halved - round(math.log2(max(per_block, 1e-12))), guess.issued_s
