"""The size of a request, in one number, so that requests can be divided into lanes. Pure.

Source: Chameleon §4.2, "Admission to the Queues".
"""

from __future__ import annotations

from dataclasses import dataclass

# Source: Chameleon §4.2: output decides the time but is only a guess, so it gets no more than half.
INPUT_WEIGHT, OUTPUT_WEIGHT, RANK_WEIGHT = 0.3, 0.5, 0.2
# After this many requests a maximum has fallen to half, unless a request renewed it. Chosen: a giant is forgotten within minutes at a few per
# second, while a size that one request in a hundred has keeps its maximum to within a third.
HALF_LIFE_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Scale:
    """The maxima against which the three parts are measured, at one time. Tokens, tokens, rank; all at least 1.

    Lane boundaries are valid only on the scale they were fitted on: keep the fit's `Scale` for placing arrivals until the next fit.
    """

    max_input_tokens: float = 1.0
    max_output_tokens: float = 1.0
    max_rank: float = 1.0

    def weighted_size(self, input_tokens: float, output_tokens: float, rank: float) -> float:
        """Return the weighted request size, from 0 to 1. output_tokens: predicted. rank: the adapter's, 0 without one.

        A part above its maximum counts as the maximum.
        Source: Chameleon §4.2 (formula reconstructed: A·in/max_in + B·out/max_out + C·rank/max_rank).
        """
        return (
            INPUT_WEIGHT * min(input_tokens / self.max_input_tokens, 1.0)
            + OUTPUT_WEIGHT * min(output_tokens / self.max_output_tokens, 1.0)
            + RANK_WEIGHT * min(rank / self.max_rank, 1.0)
        )


class WeightedSize:
    """Sizes against running maxima that fade.

    Each request lowers the maxima by a constant factor, to half in `HALF_LIFE_REQUESTS`, and raises the ones that it exceeds. So one giant flattens
    other sizes for a while only, and a quiet night changes nothing. The paper does not say over which requests its maxima are taken.
    """

    def __init__(self) -> None:
        self._fade = 0.5 ** (1 / HALF_LIFE_REQUESTS)
        self._maxima = (1.0, 1.0, 1.0)

    @property
    def scale(self) -> Scale:
        """The maxima as they are now."""
        return Scale(*self._maxima)

    def seen(self, input_tokens: float, output_tokens: float, rank: float) -> None:
        """Note a request that came, or that ended, with its real output. Call it once for each."""
        sizes = (input_tokens, output_tokens, rank)
        largest = [max(size, old * self._fade, 1.0) for size, old in zip(sizes, self._maxima, strict=True)]
        self._maxima = (largest[0], largest[1], largest[2])
