"""The part of a grammar compiler's error that a client reads."""

from __future__ import annotations

# The compiler's messages may quote the whole grammar.
MAX_REASON_CHARS = 300
UNREADABLE = "the compiler of grammars cannot work with it: write it in another way"


def readable(error: str) -> str:
    """Return the first line of the compiler's error, without its state; a panic of the compiler, which tells a client nothing, becomes UNREADABLE."""
    first = error.strip().split("\n", 1)[0].split(" <state>", 1)[0][:MAX_REASON_CHARS]
    return UNREADABLE if "panic" in first.lower() or not first else first
