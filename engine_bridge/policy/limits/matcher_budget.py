"""How long the matcher of a grammar may take beside the engine's steps. Pure: the time spent comes in as an argument.

Which tokens a grammar allows next is worked out inside each step, so an ambiguous grammar makes every other stream wait. The grammar may
take a little at each token, and save some of that up for a token that is harder.
"""

from __future__ import annotations

# Seconds of a core. Chosen: an ordinary schema takes 0.02 to 1 ms a token, and a grammar that is ambiguous within the compiler's own limits was
# seen to take 270 ms. Others then wait once, for about SAVED_S at most.
PER_TOKEN_S, SAVED_S = 0.003, 0.3


class MatcherBudget:
    """The time that all answers with one grammar may spend together. left_s: seconds that could be spent at once."""

    def __init__(self) -> None:
        self.left_s = SAVED_S

    @property
    def is_spent(self) -> bool:
        """Whether the grammar's answers must end. Once spent, the budget stays spent."""
        return self.left_s < 0

    def next_token(self) -> None:
        """Note that one answer begins to work out its next token."""
        if not self.is_spent:
            self.left_s = min(self.left_s + PER_TOKEN_S, SAVED_S)

    def spend(self, seconds: float) -> None:
        """Note the seconds that a token has taken so far."""
        self.left_s -= seconds
