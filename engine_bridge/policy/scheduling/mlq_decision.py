"""Which requests start in one step, by `Mlq`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from engine_bridge.policy.scheduling.mlq_places import Placing
from engine_bridge.policy.scheduling.mlq_plan import Plan, Walk
from engine_bridge.policy.scheduling.queue_policy import (
    NUM_PASSED_OVER,
    Decision,
    DeferReason,
    Running,
    Waiting,
)


class MlqSettings(Struct, frozen=True, kw_only=True):
    """Seconds and counts. All chosen, unless they name a source."""

    max_wait_s: float = 60.0
    """After this wait a request is head of all lanes, and none passes it. Under lasting overload this turns `Mlq` into `Fcfs`."""
    aging_s: float = 0.125
    """After this wait a request is ordered by waiting time over length, ahead of smaller ones that came later. Longer only made tails longer."""
    num_looked_at: int = 16
    """Number of requests behind a blocked head that are looked at for one that may pass."""
    max_bypassed: int = 16
    """Number of times that one head may be passed."""
    max_squashed: int = 1
    """Number of times that one request may be squashed; after that it passes no other."""
    squash_share: float = 0.05
    """The most squashes, as a share of admissions. Source: Chameleon §4.2, whose experiments have at most that share, without enforcing it."""


class Deciding:
    """One decision.

    Args:
        plan: a plan in which nothing is chosen yet.
        arrivals: (arrived_s, request_id) of all waiting requests, in that order.
        num_squashes: the number of squashes allowed.
    """

    def __init__(
        self,
        plan: Plan,
        placing: Placing,
        arrivals: Sequence[tuple[float, str]],
        quotas: Sequence[int],
        num_squashes: int,
        settings: MlqSettings,
    ) -> None:
        self._plan, self._placing, self._arrivals = plan, placing, arrivals
        self._quotas, self._num_squashes, self._settings = quotas, num_squashes, settings
        self._num_passed = 0

    def made(self) -> Decision:
        """Return the requests that start in this step, that are deferred, and that have to leave the device."""
        if self._admit_overdue():
            self._admit_lanes()
        plan = self._plan
        return Decision(
            plan.ids(),
            plan.deferred,
            plan.bypassed,
            self._late_bypassers(),
            "no_slot" if plan.left.slots < 1 else "behind_head",
        )

    def _admit_overdue(self) -> bool:
        """Start the requests that have waited too long, in order of arrival. Return False if one of them does not fit."""
        for arrived_s, request_id in self._arrivals:
            if self._plan.now - arrived_s < self._settings.max_wait_s:
                break
            facts = self._plan.waiting[request_id]
            tokens = self._plan.tokens(facts)
            reason = self._plan.left.refusal(facts)
            if reason is None and tokens > self._plan.spare.num_free:
                reason = "lane_quota"
            if self._is_passed_over(facts, reason):
                continue
            if reason is not None:
                self._defer(facts, reason)
                return False
            self._plan.choose(self._placing.entries[request_id].lane, facts, tokens)
            self._plan.num_overdue += 1
        return True

    def _admit_lanes(self) -> None:
        walks = {
            lane: Walk(queue, self._plan, self._settings.aging_s)
            for lane, queue in enumerate(self._placing.queues)
            if queue.num_waiting and self._plan.left.slots > 0
        }
        lacking = self._phase(walks, self._plan.spare.fits)
        kept = {lane for lane, walk in walks.items() if self._fits_quota(lane, walk.head)}
        pool = {lane: walk for lane, walk in walks.items() if lane in lacking}
        self._phase(pool, lambda lane, tokens: self._plan.spare.fits_pool(lane, tokens, kept))
        self._bypass(walks)

    def _phase(self, walks: Mapping[int, Walk], fits: Callable[[int, int], bool]) -> set[int]:
        """Start heads as long as any lane's fits; return the lanes whose head lacks quota."""
        open_lanes = {lane: walk for lane, walk in walks.items() if walk.head is not None}
        lacking = set()
        while open_lanes and not self._plan.is_full:
            lane = min(open_lanes, key=lambda lane: _rank(lane, open_lanes[lane].head))
            head = open_lanes[lane].head
            if head is None:
                del open_lanes[lane]
                continue
            tokens = self._plan.tokens(head)
            reason = self._plan.left.refusal(head)
            if reason is None and fits(lane, tokens):
                self._plan.choose(lane, head, tokens)
                open_lanes[lane].advance()
                continue
            if self._is_passed_over(head, reason):
                open_lanes[lane].advance()
                continue
            if reason is None:
                lacking.add(lane)
            self._defer(head, reason or "lane_quota")
            del open_lanes[lane]
        return lacking

    def _is_passed_over(self, facts: Waiting, reason: DeferReason | None) -> bool:
        """Note a request whose adapter finds no memory, and return whether requests behind it may start."""
        if reason != "adapter_memory" or not self._plan.left.lacks_adapter_bytes(facts):
            return False
        self._plan.deferred[facts.request_id] = reason
        self._num_passed += 1
        return self._num_passed <= NUM_PASSED_OVER

    def _fits_quota(self, lane: int, head: Waiting | None) -> bool:
        """Return whether the lane's head can start within the lane's own quota some day, so that the lane should not lend the unused part."""
        return head is not None and self._plan.tokens(head) <= self._quotas[lane]

    def _defer(self, head: Waiting, reason: DeferReason) -> None:
        self._plan.deferred[head.request_id] = reason
        # Otherwise small requests that keep coming would fill every step.
        self._plan.is_full |= reason == "step_full" and head.times_deferred > 0
        if reason in ("no_blocks", "adapter_memory"):
            self._plan.blocked.append(head)

    # -- bypass

    def _bypass(self, walks: Mapping[int, Walk]) -> None:
        """Let requests pass their lane's head while it waits for memory.

        None passes when a squash could no longer correct a wrong prediction.
        """
        if not self._plan.blocked or self._plan.is_full or self._num_squashes < 1:
            return
        blocked = {facts.request_id for facts in self._plan.blocked}
        for lane, walk in walks.items():
            # Looking for followers is most of a decision's cost, and there is seldom room for one.
            is_room = (
                min(
                    self._plan.left.slots,
                    self._plan.left.blocks,
                    self._plan.spare.num_free,
                    self._plan.spare.lane_free[lane],
                )
                > 0
            )
            if is_room and walk.head is not None and walk.head.request_id in blocked:
                self._pass(lane, walk, walk.head, self._start_s(walk.head))

    def _start_s(self, head: Waiting) -> float:
        """Return when a blocked head could start, by the predicted ends of the running requests."""
        missing = self._plan.left.needed(head) - self._plan.left.blocks
        return earliest_start_s(missing, self._plan.ends(), self._plan.now)

    def _pass(self, lane: int, walk: Walk, head: Waiting, start_s: float) -> None:
        """Start the requests behind one head that fit and are predicted to end before it could start."""
        passes_left = self._settings.max_bypassed - head.times_bypassed
        if passes_left < 1 or start_s <= self._plan.now:
            return
        followers = walk.ahead(self._settings.num_looked_at)
        followers.sort(key=lambda facts: (facts.priority, not facts.is_warm))
        for facts in followers:
            tokens = self._plan.tokens(facts)
            is_fit = self._plan.left.refusal(facts) is None and self._plan.spare.fits(lane, tokens)
            if passes_left > 0 and is_fit and self._may_pass(facts, start_s, self._plan.now):
                self._plan.choose(lane, facts, tokens)
                self._plan.bypassed[facts.request_id] = head.request_id
                passes_left -= 1

    def _may_pass(self, facts: Waiting, start_s: float, now: float) -> bool:
        return now + facts.duration_s <= start_s and facts.times_squashed < self._settings.max_squashed

    def _late_bypassers(self) -> tuple[str, ...]:
        """Return the fewest late bypassers, the largest first, whose squash lets a blocked head start; none if all together do not suffice."""
        if not self._plan.blocked or self._num_squashes < 1:
            return ()
        late = [each for each in self._plan.ends() if each.is_bypasser and each.due_s < self._plan.now]
        late.sort(key=lambda each: (-each.num_blocks, each.predicted_end_s, each.request_id))
        late = late[: self._num_squashes]
        missing = min(self._plan.left.needed(head) for head in self._plan.blocked) - self._plan.left.blocks
        squash: list[str] = []
        for each in late:
            if missing <= 0:
                break
            squash.append(each.request_id)
            missing -= each.num_blocks
        return tuple(squash) if missing <= 0 else ()


def earliest_start_s(missing: float, ends: Sequence[Running], now: float) -> float:
    """Return when `missing` more blocks are free, if all running requests end as predicted; late ones count as ending now.

    Args:
        missing: blocks that are not free yet.
        ends: in order of predicted_end_s. If all of them do not suffice, the result is the last end.
        now: the time in seconds, on the caller's clock.
    """
    at_s = now
    for each in ends:
        if missing <= 0:
            break
        missing -= each.num_blocks
        at_s = max(each.predicted_end_s, now)
    return at_s


def _rank(lane: int, head: Waiting | None) -> tuple[int, bool, int]:
    """Return the sort key of a lane's head.

    Heads are ordered by priority; then heads that were passed before, so that no other takes the room that was freed for them; then the smallest.
    """
    if head is None:
        return (0, True, lane)
    return (head.priority, head.times_bypassed + head.times_deferred == 0, lane)
