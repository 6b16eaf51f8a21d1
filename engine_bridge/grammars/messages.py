"""What a client reads of an error of the grammars' compiler."""

from __future__ import annotations

# The compiler's messages may quote the whole grammar.
MAX_REASON_CHARS = 300
UNREADABLE = "the compiler of grammars cannot work with it: write it in another way"


def readable(error: str) -> str:
    """The first line of the compiler's error, without its state. What it says of its own code when it gives up means nothing to a client."""
    first = error.strip().split("\n", 1)[0].split(" <state>", 1)[0][:MAX_REASON_CHARS]
    return UNREADABLE if "panic" in first.lower() or not first else first
