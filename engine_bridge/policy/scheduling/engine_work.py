"""The seconds of the whole engine that a request takes, however many run beside it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from engine_bridge.policy.scheduling.pausing import DecodeSeconds
from engine_bridge.protocol.engine_request import LengthGuess

# Requests that run at most on a device that is full. Chosen: vLLM's default of `max_num_seqs`.
MAX_RUNNING = 256
# Answers count half as much as one made 70 answers later, and predictions that are right count like four answers before there is any. Chosen.
KEPT_SHARE, PRIOR_ANSWERS = 0.99, 4.0


class EngineWork:
    """Adds up what a request takes: the steps of its prompt, and its share of the steps of a device that is full of requests like it.

    So the work of many requests is the time that they take together, whatever their order: on an emulated A40 the same to 1% for first come first
    served, the shortest first and the longest first (bench/LOG.md). Neither tokens nor tokens times seconds are: prompts of one size with answers
    that differ by 20 times are nearly equal by the one, and 20 times apart by the other.

    Args:
        num_tokens: tokens that requests may hold together.
        decode_s: predicts the seconds of a step in which this many requests with this many tokens in all decode.
    """

    def __init__(self, num_tokens: int, prefill_s: Callable[[int], float], decode_s: DecodeSeconds) -> None:
        self._num_tokens, self._prefill_s, self._decode_s = num_tokens, prefill_s, decode_s

    def seconds(self, num_prompt_tokens: int, num_prefill_tokens: int, num_answer_tokens: float) -> float:
        """Return the seconds. num_prefill_tokens: the part of the prompt that has to be computed."""
        mean_tokens = num_prompt_tokens + num_answer_tokens / 2
        num_running = min(max(self._num_tokens / max(mean_tokens, 1.0), 1.0), MAX_RUNNING)
        step_s = self._decode_s(int(num_running), int(num_running * mean_tokens))
        return self._prefill_s(num_prefill_tokens) + num_answer_tokens * step_s / num_running


class AnswerMeans:
    """The mean length of answers by the predicted one, which is their median: who predicts longer ones is wrong in another way than with short ones.

    Predictions within a factor of 1.4 are one kind.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}
        """By kind: the sum of answers over their predictions, and how many there are; both fade."""

    def mean(self, guess: LengthGuess) -> float:
        """Return the expected tokens of an answer."""
        total, num = self._sums.get(_kind(guess), (PRIOR_ANSWERS, PRIOR_ANSWERS))
        return guess.p50 * total / num

    def saw(self, guess: LengthGuess, num_tokens: int) -> None:
        """Learn from an answer that has ended."""
        kind = _kind(guess)
        total, num = self._sums.get(kind, (PRIOR_ANSWERS, PRIOR_ANSWERS))
        self._sums[kind] = (
            KEPT_SHARE * total + num_tokens / max(guess.p50, 1),
            KEPT_SHARE * num + 1.0,
        )


def _kind(guess: LengthGuess) -> int:
    return int(2 * math.log2(max(guess.p50, 1)))
