"""Who is paused so that urgent requests decode within their SLO, and who goes on. Pure: facts in, decision out, seconds throughout.

Others are paused only while a step that decodes for all is predicted to take longer than an urgent request may wait for a token, and no more of them
than that takes. Source: SYMPHONY §3.5, "selectively pause low-priority requests only when their execution impacts latency"; there nothing is said of
who, for how long, and how they go on: that is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

# Who goes on must leave so much of the SLO: predictions err by a tenth, and nobody is to be paused again at once. Chosen.
RESUME_SHARE = 0.9
# Where the SLO cannot be kept even so, pausing must save this share of a step, or others would stand for nothing. Chosen: as predictions err.
MIN_GAIN = 0.1
# A request may be paused for as long as it has run, and so much more: from pauses, an answer takes at most twice its time and these seconds, whatever
# comes. A share of its time and not an age, so that long answers and short ones lose alike and nobody's pause grows with the queue of urgent ones.
# Chosen.
GRACE_S = 2.0
# Who could not be paused for so long runs on: coming back costs a restore. Chosen.
MIN_PAUSE_S = 1.0

DecodeSeconds = Callable[[int, int], float]
"""What a step is predicted to take that decodes for so many requests, over so many tokens of context in all."""


class Batch(Struct, frozen=True, gc=False):
    """Requests that decode together, and the tokens that they hold."""

    num_requests: int = 0
    num_tokens: int = 0

    def plus(self, num_tokens: int) -> Batch:
        """With one more."""
        return Batch(self.num_requests + 1, self.num_tokens + num_tokens)


class Other(Struct, frozen=True, kw_only=True, gc=False):
    """A request that is not urgent. ran_s: in all. paused_s: in all; of one that has not begun, since it was first kept from it."""

    request_id: str
    priority: int
    arrived_s: float
    num_tokens: int
    ran_s: float
    paused_s: float

    @property
    def left_s(self) -> float:
        """For so long it may be paused yet."""
        return self.ran_s + GRACE_S - self.paused_s


class PauseDecision(Struct, frozen=True):
    """pause: of those that run, in any order. resume: of those paused, in this order."""

    pause: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()


def decide(
    decode_s: DecodeSeconds, slo_s: float, urgent: Batch, running: Sequence[Other], paused: Sequence[Other]
) -> PauseDecision:
    """Who is paused now, and who goes on.

    The last in order of `priority`, and of these who came last, are paused first, and who came first goes on first: it ends some day, and so does
    everybody after it. Without urgent requests all go on.

    Args:
        urgent: those that run.
        running, paused: all others.
    """
    oldest_first = sorted(paused, key=lambda each: each.arrived_s)
    if not urgent.num_requests:
        return PauseDecision(resume=_ids(oldest_first))
    due = [each for each in oldest_first if each.left_s <= 0]
    batch = _joined(urgent, [each for each in running if each.left_s < MIN_PAUSE_S] + due)
    may_pause = sorted(
        (each for each in running if each.left_s >= MIN_PAUSE_S),
        key=lambda each: (each.priority, each.arrived_s),
    )
    together = _joined(batch, may_pause)
    if _is_slow(decode_s, slo_s, batch, together):
        num_kept = _most(decode_s, slo_s, batch, may_pause)
        return PauseDecision(pause=_ids(may_pause[num_kept:]), resume=_ids(due))
    waiting = [each for each in oldest_first if each.left_s > 0]
    num = _most(decode_s, RESUME_SHARE * slo_s, together, waiting)
    return PauseDecision(resume=_ids(due + waiting[:num]))


def kept_from_starting(
    decode_s: DecodeSeconds, slo_s: float, urgent: Batch, running: Batch, starting: Sequence[Other]
) -> frozenset[str]:
    """Of those that could start now, who waits: it would be paused at once.

    Args:
        urgent: those that run or start now.
        running: all that run and go on, these among them.
    """
    kept = set()
    for each in starting:
        together = running.plus(each.num_tokens)
        if each.left_s > 0 and _is_slow(decode_s, slo_s, urgent, together):
            kept.add(each.request_id)
        else:
            running = together
    return frozenset(kept)


def _is_slow(decode_s: DecodeSeconds, slo_s: float, alone: Batch, together: Batch) -> bool:
    """Whether it pays to decode for `alone` in place of for all together."""
    together_s = decode_s(together.num_requests, together.num_tokens)
    if together_s <= slo_s:
        return False
    alone_s = decode_s(alone.num_requests, alone.num_tokens)
    return alone_s <= max(slo_s, (1 - MIN_GAIN) * together_s)


def _most(decode_s: DecodeSeconds, limit_s: float, batch: Batch, others: Sequence[Other]) -> int:
    """How many of the first others a step may decode for beside the batch. Halving: 8 looks for 256 requests."""
    sums = [batch]
    for each in others:
        sums.append(sums[-1].plus(each.num_tokens))
    low, high = 0, len(others)
    while low < high:
        middle = (low + high + 1) // 2
        if decode_s(sums[middle].num_requests, sums[middle].num_tokens) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


def _joined(batch: Batch, others: Sequence[Other]) -> Batch:
    num_tokens = sum(each.num_tokens for each in others)
    return Batch(batch.num_requests + len(others), batch.num_tokens + num_tokens)


def _ids(requests: Sequence[Other]) -> tuple[str, ...]:
    return tuple(each.request_id for each in requests)
