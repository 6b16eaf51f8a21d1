"""What became of the requests that one arm of `bench.live.scheduling` was asked."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.live.peers.play import Answer, Ask
from bench.measures import quantile

NUM_CLASSES = 4


@dataclass
class Seen:
    """Times and tokens of all requests of one arm. weighted: of each request at its end, the time since arrival over the time since the start."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    weighted: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    preemptions: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    play_s: float = 0.0

    def add(self, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
        """Add the answers of one play."""
        self.play_s += max(answer.token_s[-1] for answer in answers)
        self.ttft_s += [answer.ttft_s for answer in answers]
        for ask, answer in zip(asks, answers, strict=True):
            assert len(answer.token_ids) == ask.max_tokens, "an answer is not whole"
            self.num_tokens += ask.max_tokens
            self.sizes.append(len(ask.prompt) + ask.max_tokens)
            times = answer.token_s
            self.e2e_s.append(times[-1] - ask.at_s)
            # A request that starts in the step that was under way when it came has not waited.
            self.weighted.append(self.e2e_s[-1] / (times[-1] - max(answer.started_s, ask.at_s)))
            if len(times) > 1:
                self.tpot_s.append((times[-1] - times[0]) / (len(times) - 1))

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second."""
        return self.num_tokens / self.play_s

    @property
    def turnaround_mean_s(self) -> float:
        """Mean time from arrival to end, in seconds."""
        return statistics.mean(self.e2e_s)

    @property
    def weighted_turnaround(self) -> float:
        """Mean of the time since arrival over the time since the start."""
        return statistics.mean(self.weighted)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for the report."""
        return {
            "ttft_p50_ms": ms(quantile(self.ttft_s, 0.5)),
            "ttft_p99_ms": ms(quantile(self.ttft_s, 0.99)),
            "ttft_mean_ms": ms(statistics.mean(self.ttft_s)),
            "tpot_p50_ms": ms(quantile(self.tpot_s, 0.5)),
            "tpot_p99_ms": ms(quantile(self.tpot_s, 0.99)),
            "e2e_mean_ms": ms(self.turnaround_mean_s),
            "weighted_turnaround": round(self.weighted_turnaround, 3),
            "num_requests": len(self.ttft_s),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "preemptions": dict(self.preemptions),
        }

    def class_means_s(self) -> list[float]:
        """Mean TTFT by quartile of size. Arms have the same requests, so the quartiles are the same."""
        limits = [quantile(self.sizes, place / NUM_CLASSES) for place in range(1, NUM_CLASSES)]
        classes: list[list[float]] = [[] for _ in range(NUM_CLASSES)]
        for size, ttft_s in zip(self.sizes, self.ttft_s, strict=True):
            classes[sum(size > limit for limit in limits)].append(ttft_s)
        return [statistics.mean(found) for found in classes]


def ms(seconds: float) -> float:
    """Return seconds as milliseconds, rounded."""
    return round(seconds * 1e3, 1)


def change(ours: float, other: float) -> float:
    """Return by which share `ours` is above `other`."""
    return round(ours / other - 1, 3)
