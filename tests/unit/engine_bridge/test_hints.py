import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.predict import hints
from engine_bridge.predict.hints import read_body, read_conversation, text_hints
from engine_bridge.protocol.asked import CONTEXT_HINTS, NOTHING_ASKED, TEXT_HINTS, Asked


def named(hints: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(TEXT_HINTS + CONTEXT_HINTS, hints, strict=False))


@pytest.mark.parametrize(
    ("question", "name", "value"),
    [
        ("one two three", "question_words", math.log1p(3)),
        ("What? Why?", "question_marks", math.log1p(2)),
        ("a\nb\nc", "lines", math.log1p(2)),
        ("12 ab", "digits", 0.4),
        ("Write 200 words.", "tokens_asked_for", math.log1p(200 * 4 / 3)),
        ("a two-paragraph answer", "tokens_asked_for", math.log1p(200)),
        ("Two words, then three sentences", "tokens_asked_for", math.log1p(75)),
        ("9999999999999 words", "tokens_asked_for", 0.0),
        ("words of wisdom", "tokens_asked_for", 0.0),
        ("Answer with YES or NO, only", "brief", 2.0),
        ("How many? In one word!", "brief", 2.0),
        ("Explain in detail how to write an essay", "long", 5.0),
        ("a list of ten tips, with examples", "parts", 3.0),
        ("Summarize, then translate", "same", 2.0),
        ("```python\n```", "code", 3.0),
        ("only " * 50, "brief", 8.0),
        ("a whistle, a listing and justice", "parts", 0.0),
        ("a whistle, a listing and justice", "brief", 0.0),
    ],
)
def test_a_question_gives_the_hint(question: str, name: str, value: float) -> None:
    assert named(text_hints(question))[name] == pytest.approx(value)


CONVERSATION = [("system", "x" * 10), ("user", "Hello?"), ("assistant", "No? No?"), ("user", "List two tips")]


def test_the_doors_read_the_same_from_the_same_conversation() -> None:
    messages = [{"role": role, "content": text} for role, text in CONVERSATION]
    read = read_conversation(CONVERSATION)
    assert read.question == "List two tips" and len(read.hints) == len(TEXT_HINTS) + len(CONTEXT_HINTS)
    least = {"question_marks": 0.0, "parts": 2.0, "tools": 0.0, "num_turns": math.log1p(2)}
    assert named(read.hints).items() >= (least | {"system_chars": math.log1p(10)}).items()
    assert read_body({"messages": messages}) == read
    contents = [[{"type": "text", "text": text}, {"type": "image"}] for _, text in CONVERSATION]
    parts = [message | {"content": content} for message, content in zip(messages, contents, strict=True)]
    assert read_body({"messages": parts}) == read  # OpenAI's and Anthropic's parts
    assert read_body({"system": "x" * 10, "messages": messages[1:]}) == read  # Anthropic
    assert read_body({"instructions": "x" * 10, "input": messages[1:]}) == read  # Responses
    assert read_body({"input": "Hi"}) == read_conversation([("user", "Hi")])
    assert read_body({"prompt": "Hi?"}).hints[: len(TEXT_HINTS)] == text_hints("Hi?")
    for tools, choice, has_tools in (([{}], "auto", 1.0), ([{}], "none", 0.0), ([], None, 0.0)):
        assert named(read_body({"tools": tools, "tool_choice": choice}).hints)["tools"] == has_tools


def test_a_long_question_is_read_at_both_ends_and_its_length_is_known() -> None:
    question = "Please translate: " + "word " * 100_000 + "How many?"
    read = read_conversation([("user", question)])
    assert len(read.question) <= hints.MAX_READ + 1
    found = named(read.hints)
    assert found["same"] == 1.0 and found["brief"] == 1.0
    assert found["question_words"] == pytest.approx(math.log1p(100_004), rel=0.01)


FIELDS = st.sampled_from("messages input prompt system instructions role content text type tools".split())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=20,
)


@given(JSON)
def test_any_body_is_read_into_numbers(body: Any) -> None:
    read = read_body(body)
    assert len(read.hints) == len(NOTHING_ASKED.hints)
    assert all(math.isfinite(hint) and hint >= 0 for hint in read.hints)
    assert json.loads(json.dumps(read.hints)) == list(read.hints)


def asked(system: str, question: str) -> Asked:
    return read_conversation([("system", system), ("user", question)])


def test_what_a_template_is_filled_with_leaves_its_key_as_it_is() -> None:
    summarize = "Summarize the following text, please:"
    one, other = (asked("Be kind.", f"{summarize} {text}") for text in ("A b.", "17 C d"))
    assert one.template == other.template != ""
    assert one.template != asked("Be kind.", "Translate the following text, please: A b.").template
    assert one.template != asked("Be rude.", f"{summarize} A b.").template
    assert one.system == read_body({"instructions": "Be kind.", "input": "Hi"}).system != ""
    assert one.system != asked("Be kind!", "Hello").system and asked("", "Hello").system == ""
    assert NOTHING_ASKED.system == NOTHING_ASKED.template == ""


def test_of_a_call_that_nobody_else_reads_no_text_is_left() -> None:
    kept = asked("My name is Hidden Person", "secretive question of mine").numbers()
    assert kept.words
    assert not any(word in str(kept).lower() for word in ("hidden", "person", "secretive"))
