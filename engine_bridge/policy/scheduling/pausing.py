"""Which requests pause so that urgent ones decode within their SLO, and which resume. Pure: facts in, decision out, seconds throughout.

Others are paused only while a step that decodes for all is predicted to take longer than an urgent request may wait for a token, and only as many
as that needs. Source: SYMPHONY §3.5, "selectively pause low-priority requests only when their execution impacts latency"; it does not say which
requests pause, for how long, and how they resume: that is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

# Resumed requests must keep a step within this share of the SLO: predictions err by a tenth, and none is to be paused again at once. Chosen.
RESUME_SHARE = 0.9
# Where the SLO cannot be kept even so, pausing must save this share of a step, or others would be paused for nothing. Chosen: as predictions err.
MIN_GAIN = 0.1
# A request may be paused for as long as it has run, and this many seconds more: so pauses at most double an answer's time and add these seconds,
# whatever comes. A share of its time and not an age, so that long answers and short ones lose alike and no request's pause grows with the queue of
# urgent ones. Chosen.
GRACE_S = 2.0
# A request that could not be paused for this many seconds runs on: coming back costs a restore. Chosen.
MIN_PAUSE_S = 1.0

DecodeSeconds = Callable[[int, int], float]
"""Returns the predicted seconds of a step that decodes for this many requests, over this many tokens of context in total."""


class Batch(Struct, frozen=True, gc=False):
    """Requests that decode together, and the tokens that they hold."""

    num_requests: int = 0
    num_tokens: int = 0

    def plus(self, num_tokens: int) -> Batch:
        """Return the batch with one more request."""
        return Batch(self.num_requests + 1, self.num_tokens + num_tokens)


class Other(Struct, frozen=True, kw_only=True, gc=False):
    """A request that is not urgent.

    Attributes:
        paused_s: its total time paused; for a request that has not begun, the time since it was first kept from starting.
    """

    request_id: str
    priority: int
    arrived_s: float
    num_tokens: int
    ran_s: float
    paused_s: float

    @property
    def left_s(self) -> float:
        """The seconds for which it may be paused yet."""
        return self.ran_s + GRACE_S - self.paused_s


class PauseDecision(Struct, frozen=True):
    """The decision for a step. pause: running requests, in any order. resume: paused requests, in this order."""

    pause: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()


def decide(
    decode_s: DecodeSeconds, slo_s: float, urgent: Batch, running: Sequence[Other], paused: Sequence[Other]
) -> PauseDecision:
    """Return which requests pause now, and which resume.

    The last in order of `priority`, and of equals the last to arrive, are paused first, and the first to arrive resumes first: it ends some day, and
    so does every request after it. Without urgent requests all resume. decode_s: predicts the seconds of a step. slo_s: that a step may take while an
    urgent request decodes. running: the requests that are not urgent.
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
    """Return which of the requests that could start now and are not urgent wait, because they would be paused at once.

    decode_s, slo_s: as for `decide`. urgent: that run or start now. running: all requests that continue to run, with the urgent ones.
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
    """Return whether it pays to decode for `alone` in place of all together."""
    together_s = decode_s(together.num_requests, together.num_tokens)
    if together_s <= slo_s:
        return False
    alone_s = decode_s(alone.num_requests, alone.num_tokens)
    return alone_s <= max(slo_s, (1 - MIN_GAIN) * together_s)


def _most(decode_s: DecodeSeconds, limit_s: float, batch: Batch, others: Sequence[Other]) -> int:
    """Return how many of the first others a step may decode for beside the batch. Halving: 8 look-ups for 256 requests."""
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
