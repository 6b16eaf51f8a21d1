"""A node's work, in the few numbers that routing uses: counted as requests come, start, grow and leave.

Reading it looks at no request, so that it costs the same with one request and with a thousand, and any thread may do so at any time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_bridge.protocol.node_facts import NodeFacts, NodePerf, Ranks

# The weight of one request in the usual sizes: about the last fifty determine them. Chosen.
SMOOTHING = 0.02
# Usual sizes before any request came. Chosen: a question and an answer of a chat.
PRIOR_PROMPT_TOKENS, PRIOR_ANSWER_TOKENS = 256.0, 256.0


class Counted(NamedTuple):
    """The counted facts of a request.

    Attributes:
        num_tokens: of prompt and answer so far. num_prefill_tokens: the part of these that its start has to compute. charged_tokens: of prompt
            and answer, as predicted.
    """

    request_id: str
    rank: int
    num_tokens: int
    num_prefill_tokens: int
    charged_tokens: int
    is_urgent: bool = False


@dataclass(slots=True)
class _Part:
    """The requests that wait, or the requests that run. ranks: replaced as a whole, as other threads read it."""

    ranks: Ranks = field(default_factory=Ranks)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    charged_tokens: int = 0
    num_urgent: int = 0
    _num_by_rank: Counter[int] = field(default_factory=Counter)

    def add(self, one: Counted, sign: int = 1) -> None:
        """Count a request; with `sign` -1, stop counting it."""
        self.num_tokens += sign * one.num_tokens
        self.num_prefill_tokens += sign * one.num_prefill_tokens
        self.charged_tokens += sign * one.charged_tokens
        self.num_urgent += sign * one.is_urgent
        self._num_by_rank[one.rank] += sign
        if not self._num_by_rank[one.rank]:
            del self._num_by_rank[one.rank]
        self.ranks = Ranks(
            self.ranks.num + sign,
            self.ranks.total + sign * one.rank,
            max(self._num_by_rank, default=0),
        )


class LoadTracker:
    """The load of one node. Changed on one thread.

    Attributes:
        prompt_tokens, answer_tokens: tokens that requests usually have to compute before their first token, and to answer.
    """

    def __init__(self) -> None:
        self.prompt_tokens, self.answer_tokens = PRIOR_PROMPT_TOKENS, PRIOR_ANSWER_TOKENS
        self._waiting, self._running = _Part(), _Part()
        self._counted: dict[str, tuple[_Part, Counted]] = {}

    def waits(self, one: Counted | None) -> None:
        """Note that a request came, was preempted, or that more is known of it. None: a request that counts as no load."""
        if one is not None:
            self._move(one, self._waiting)

    def runs(self, one: Counted | None) -> None:
        """Note that a request starts, or is predicted to answer more. None: a request that counts as no load."""
        if one is not None and self._move(one, self._running) is self._waiting:
            self.prompt_tokens += SMOOTHING * (one.num_prefill_tokens - self.prompt_tokens)

    def ended(self, request_id: str, num_answer_tokens: int | None = None) -> None:
        """Note that a request left; with its answer's length, if that says something of others'. Unknown ones are ignored."""
        part, one = self._counted.pop(request_id, (None, None))
        if part is None or one is None:
            return
        part.add(one, -1)
        if num_answer_tokens is not None:
            self.answer_tokens += SMOOTHING * (num_answer_tokens - self.answer_tokens)

    def _move(self, one: Counted, to: _Part) -> _Part | None:
        before, known = self._counted.get(one.request_id, (None, one))
        if before is not None:
            before.add(known, -1)
        to.add(one)
        self._counted[one.request_id] = to, one
        return before

    # -- from any thread -----------------------------------------------------------------------------------------------

    @property
    def running(self) -> Ranks:
        """The adapter ranks of the requests that run."""
        return self._running.ranks

    def facts(self, held_tokens: int, num_free_tokens: int, perf: NodePerf | None = None) -> NodeFacts:
        """Return the node's facts, under an empty name.

        held_tokens: of prompts and answers so far that running requests hold. num_free_tokens: of KV that no running request holds, cached or not.
        """
        waiting, running = self._waiting, self._running
        to_come = max(running.charged_tokens - held_tokens, 0)
        to_come += max(waiting.charged_tokens - waiting.num_tokens, 0)
        return NodeFacts(
            node_id="",
            running=running.ranks,
            queued=waiting.ranks,
            num_tokens=held_tokens + waiting.num_tokens,
            queued_tokens=waiting.num_prefill_tokens,
            answer_tokens=to_come,
            free_tokens=max(num_free_tokens - waiting.num_tokens - to_come, 0),
            num_urgent=waiting.num_urgent + running.num_urgent,
            perf=perf,
        )

    def check_invariants(self) -> None:
        """Check the counts. Raises AssertionError: a request is counted twice or not at all."""
        for part in (self._waiting, self._running):
            ours = [one for where, one in self._counted.values() if where is part]
            assert part.ranks == Ranks(
                len(ours), sum(one.rank for one in ours), max((one.rank for one in ours), default=0)
            ), "ranks"
            assert part.num_tokens == sum(one.num_tokens for one in ours), "tokens"
            assert part.charged_tokens == sum(one.charged_tokens for one in ours), "charges"
            assert part.num_prefill_tokens == sum(one.num_prefill_tokens for one in ours), "prompts"
            assert part.num_urgent == sum(one.is_urgent for one in ours), "urgent ones"
