"""How large a JSON text is before it is decoded: values and depth.

Decoding holds the interpreter for as long as it takes, in whichever thread: 5 million numbers stop the event loop for half a second. Counting
with numpy does not hold it, so a large text is measured in a thread first, and decoded only if it is within bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

CHUNK_BYTES = 1 << 18
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPEN, _CLOSE, _NEWLINE = tuple(b"[{"), tuple(b"]}"), tuple(b"\r\n")


class JsonShape(NamedTuple):
    """The size of a JSON text. num_values: never below the text's number of values. depth: of arrays and objects within each other."""

    num_values: int
    depth: int


def shape_of(text: bytes) -> JsonShape:
    """Return the shape of a JSON text, in about 5 ns a byte. For a text that is not JSON the result means nothing; it never raises."""
    num_values, depth, deepest = 1, 0, 0
    strings = _Strings()
    data = np.frombuffer(text, np.uint8)
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        inside = strings.inside(chunk)
        opens = ((chunk == _OPEN[0]) | (chunk == _OPEN[1])) & ~inside
        closes = ((chunk == _CLOSE[0]) | (chunk == _CLOSE[1])) & ~inside
        num_values += int(np.count_nonzero((chunk == _COMMA) & ~inside)) + int(np.count_nonzero(opens))
        if opens.any() or closes.any():
            levels = depth + np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32)
            depth, deepest = int(levels[-1]), max(deepest, int(levels.max()))
    return JsonShape(num_values, deepest)


class ValueCounter:
    """Counts the values of a text that comes in pieces: JSON, or server-sent events that hold JSON.

    A line counts as a value, too, as events take time without any. No string of JSON goes on behind the end of a line, so a line that is no
    JSON (a comment of a stream, say) cannot make what follows look like a string.
    """

    def __init__(self) -> None:
        self.num_values = 0
        self._strings = _Strings()

    def add(self, piece: bytes) -> int:
        """Take in the next piece; returns `num_values`, which is never below the number of values so far."""
        chunk = np.frombuffer(piece, np.uint8)
        ends = (chunk == _NEWLINE[0]) | (chunk == _NEWLINE[1])
        inside = self._strings.inside(chunk, ends)
        counted = (chunk == _COMMA) | (chunk == _OPEN[0]) | (chunk == _OPEN[1])
        self.num_values += int(np.count_nonzero((counted & ~inside) | ends))
        return self.num_values


class _Strings:
    """Where the strings of a JSON text are that comes in pieces."""

    def __init__(self) -> None:
        self._is_inside, self._is_escaped = False, False

    def inside(self, chunk: np.ndarray, ends: np.ndarray | None = None) -> np.ndarray:
        """Return which bytes of the next piece are inside a string. ends: those that end a string in any case; None: none do."""
        quotes, self._is_escaped = _real_quotes(chunk, self._is_escaped)
        inside = np.logical_xor.accumulate(quotes) ^ self._is_inside
        if ends is not None and ends.any():
            positions = np.arange(len(chunk), dtype=np.int32)
            last = np.maximum.accumulate(np.where(ends, positions, -1))
            inside ^= np.where(last >= 0, inside[last], False)
        if len(inside):
            self._is_inside = bool(inside[-1])
        return inside


def _real_quotes(chunk: np.ndarray, is_escaped: bool) -> tuple[np.ndarray, bool]:
    """Return where unescaped quotes are, and whether the chunk's last byte escapes the next one.

    is_escaped: whether the chunk's first byte is escaped by the one before.
    """
    quotes = chunk == _QUOTE
    backslashes = np.flatnonzero(chunk == _BACKSLASH)
    if not len(backslashes):
        if is_escaped:
            quotes[0] = False
        return quotes, False
    # Backslashes in a row escape each other in pairs: the last one of an odd row escapes what follows it.
    begins = np.flatnonzero(np.diff(backslashes, prepend=backslashes[0] - 2) != 1)
    lengths = np.diff(np.append(begins, len(backslashes)))
    first = backslashes[begins]
    if is_escaped and first[0] == 0:
        lengths[0] -= 1  # the row's first is itself escaped
    elif is_escaped:
        quotes[0] = False
    after = backslashes[np.append(begins[1:], len(backslashes)) - 1] + 1
    escaped = after[lengths % 2 == 1]
    escapes_next = bool(len(escaped)) and int(escaped[-1]) == len(chunk)
    quotes[escaped[escaped < len(chunk)]] = False
    return quotes, escapes_next
