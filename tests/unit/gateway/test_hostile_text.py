"""Text that a client chose costs its reader time in proportion to its length, whatever it says."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from gateway.advisories.drafts import whole_words
from gateway.errors import GatewayError
from gateway.sessions.search import excerpt
from gateway.sessions.text import clean_text, title_from
from gateway.turns.protocol import Message, decode, encode, frame_id

MIB = 1 << 20
# What is linear takes a hundredth of it for a megabyte; what is quadratic takes minutes. CPU time, so that a busy machine changes little.
LIMIT_S = 1.0

TEXTS = {
    "one word and a blank": lambda size: "x" * (size - 1) + " ",
    "blanks": lambda size: " " * size,
    "blank lines": lambda size: " \n" * (size // 2),
    "short words": lambda size: "a " * (size // 2),
    "no characters": lambda size: "\0" * size,
    "opening brackets": lambda size: "<" * size,
    "small files": lambda size: "a:\n```\n\n```\n\n" * (size // 14),
    "a file without an end": lambda size: "a:\n```\n" + "\n```x" * (size // 5),
    "a long fence": lambda size: f"a:\n{'`' * (size // 2)}\n" + "\n`" * (size // 4),
}
READERS: dict[str, Callable[[str], Any]] = {
    "a draft's whole words": whole_words,
    "a title": title_from,
    "what is stored": clean_text,
    "an excerpt of a search": lambda text: excerpt("a" * 2000 + "b", text[:8000] + "a" * 8000),
}


def seconds(work: Callable[[], Any]) -> float:
    since = time.thread_time()
    work()
    return time.thread_time() - since


@pytest.mark.parametrize("text", TEXTS)
def test_a_megabyte_of_any_text_is_read_in_proportion_to_its_length(text: str) -> None:
    given = TEXTS[text](MIB)
    for what, read in READERS.items():
        assert seconds(lambda read=read: read(given)) < LIMIT_S, what  # type: ignore[misc]


HALF = r"\ud83d"


@pytest.mark.parametrize(
    "value", ["[]", "{}", "1", '""', "[" * 100 + "]" * 100, f'"{HALF}"', f'"{HALF * 99_999}"']
)
@pytest.mark.parametrize("head", ['{"type":"ping","t":', '{"type":"stop","id":', '{"type":"hello","more":'])
def test_a_frame_of_many_values_costs_no_more_than_its_bytes(head: str, value: str) -> None:
    frame = f"{head}[{','.join([value] * (MIB // (len(value) + 1)))}]}}"

    def read() -> None:
        frame_id(frame)
        try:
            decoded = decode(frame, 2 * MIB)
        except GatewayError:
            return
        encode({"type": "pong", "t": getattr(decoded, "t", None)})

    assert seconds(read) < LIMIT_S / 10


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (HALF, "?"),
        (f"{HALF}{HALF}\\ude00", "?\U0001f600"),
        (r"\ude00\ud83d\n", "??\n"),
        (rf"\\{HALF[1:]}{HALF}", r"\ud83d?"),
    ],
)
def test_half_a_character_of_a_message_is_a_question_mark(written: str, read: str) -> None:
    """A client that cuts a text between the halves of an emoji writes one of them: valid JSON that no UTF-8 text has."""
    frame = decode(f'{{"type":"message","id":"a","content":"Hi {written}"}}', MIB)
    assert isinstance(frame, Message) and frame.content == f"Hi {read}"
