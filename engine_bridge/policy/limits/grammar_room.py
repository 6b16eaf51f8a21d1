"""How much memory the compiled grammars of running answers may take, and which tenant may take more of it. Pure: callers lock."""

from __future__ import annotations

MIB = 1 << 20
# The memory of a compiled grammar before it has matched anything, and the memory of each state of its lexer. Measured with llguidance 1.7: 0.1 to 2
# MB for grammars of some KiB, 250 bytes for each character of a schema with thousands of properties, 0.9 to 1.6 KB a state.
BASE_BYTES, BYTES_PER_CHAR, BYTES_PER_STATE = MIB, 256, 2048
# The states with which a grammar begins. Measured: JSON schemas need some hundreds, a string of bounded length one for each of its characters.
FIRST_STATES, CHARS_PER_STATE = 2_000, 8
# The largest number of states; llguidance's own default.
MAX_STATES = 250_000
GROWTH = 4
# For each request that a batch may hold, where no setting says otherwise. Chosen: a grammar that has grown once.
DEFAULT_BYTES_PER_SEQUENCE, LEAST_DEFAULT_BYTES = 16 * MIB, 1024 * MIB


def default_room_bytes(max_num_seqs: int) -> int:
    """Return the memory for all grammars of an engine whose batches hold up to `max_num_seqs` requests."""
    return max(LEAST_DEFAULT_BYTES, max_num_seqs * DEFAULT_BYTES_PER_SEQUENCE)


def first_states(num_chars: int) -> int:
    """Return the number of lexer states that a grammar of this length may have at first."""
    return min(FIRST_STATES + num_chars // CHARS_PER_STATE, MAX_STATES)


def most_bytes(num_chars: int, num_states: int) -> int:
    """Return the memory of a compiled grammar of this length once its lexer has all the states that it may have."""
    return BASE_BYTES + num_chars * BYTES_PER_CHAR + num_states * BYTES_PER_STATE


class GrammarRoom:
    """Bytes that tenants hold of one common room.

    A tenant may hold at most as many bytes as it leaves free, so one alone never gets more than half, and another one always finds something.
    Source: dynamic thresholds for shared buffers (Choudhury and Hahne, IEEE/ACM ToN 1998), with a factor of one.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._held_bytes: dict[str, int] = {}

    @property
    def num_held_bytes(self) -> int:
        """The bytes that all tenants hold together."""
        return sum(self._held_bytes.values())

    def take(self, tenant: str, num_bytes: int) -> bool:
        """Give a tenant this many bytes more, which it must give back. Return False, and change nothing, where that is too much."""
        own = self._held_bytes.get(tenant, 0) + num_bytes
        free = self._total_bytes - self.num_held_bytes - num_bytes
        if own > free:
            return False
        self._held_bytes[tenant] = own
        return True

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Take back bytes that this tenant has taken."""
        left = self._held_bytes[tenant] - num_bytes
        if left:
            self._held_bytes[tenant] = left
        else:
            del self._held_bytes[tenant]
