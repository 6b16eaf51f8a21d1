import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from engine_bridge.calls.continuity import INCOMPLETE, continue_between_tokens, continue_prompt, ends_with
from gateway.settings.config import DEMO_MODEL_DIR


class DemoTokenizer:
    """The demo model's byte-level BPE, with the two methods that vLLM's tokenizers have."""

    def __init__(self) -> None:
        self.inner = HfTokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids


class SpacingTokenizer(DemoTokenizer):
    """As old SentencePiece models: whatever is encoded gets a space in front."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(" " + text)


DEMO = DemoTokenizer()
FIRST = "<|user|>Hello there, how are you?<|end|><|assistant|>"
ANSWER = "I am well, thank you. Naïve café 🙂!"
SECOND = f"{FIRST}{ANSWER}<|end|><|user|>And now?<|end|><|assistant|>"


def spelt_out(text: str) -> list[int]:
    """Ids of `text` as no tokenizer would give them: one token a byte."""
    return [token for byte in text.encode() for token in BYTES[byte]]


def make_byte_tokens() -> list[list[int]]:
    """The token of each byte; the demo vocabulary has one for all 256 of them (GPT-2's alphabet)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    names = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    return [[DEMO.inner.token_to_id(name)] for name in names]


BYTES = make_byte_tokens()


@pytest.mark.parametrize("num_left", range(12))
def test_ids_of_a_cut_answer_are_known_by_their_end(num_left: int) -> None:
    """Also where the cut is within a character; those of other words are not, nor those of an answer that has gone on since."""
    ids = [*DEMO.encode(FIRST), *spelt_out(ANSWER)]
    ids = ids[: len(ids) - num_left]
    said = DEMO.decode(ids)
    assert ends_with(said, said.removeprefix(FIRST))
    assert ends_with(said, said.removeprefix(FIRST)[:-3].rstrip(INCOMPLETE)), "some of it was not told"
    assert not ends_with(said, said.removeprefix(FIRST) + "And more."), "these are of its beginning"
    assert not ends_with("x" * len(said), said.removeprefix(FIRST))


def check(history: Sequence[int], text: str) -> tuple[str, int, list[int]]:
    """Continue, and make sure of what holds always: the prompt says the text, and begins with the ids that it is said to keep."""
    made = continue_prompt(history, text, DEMO.encode(text), DEMO)
    assert DEMO.decode(made.token_ids) == text
    assert made.token_ids[: made.num_kept] == list(history[: made.num_kept])
    return made.origin, made.num_kept, made.token_ids


BEFORE, END = DEMO.encode(FIRST), DEMO.encode("<|end|>")
SAID = BEFORE + spelt_out(ANSWER)
THOUGHT = spelt_out("<think>Hm. " + "Well, let me see. " * 100 + "</think>")
CASES = {
    "an answer in other tokens": (SAID + END, "kept", len(SAID) + 1),
    "a stopped answer, which gets its end from the template": (SAID, "kept", len(SAID)),
    "a byte of a character, of which the text has no part": (SAID + spelt_out("🙂")[:1], "cut", len(SAID)),
    "two bytes of it": (SAID + spelt_out("🙂")[:2], "cut", len(SAID)),
    "three bytes of it": (SAID + spelt_out("🙂")[:3], "cut", len(SAID)),
    "a stop string, which is in the ids and not in the text": (SAID + spelt_out(" STOP"), "cut", len(SAID)),
    "reasoning that the template drops": (BEFORE + THOUGHT + spelt_out(ANSWER) + END, "cut", len(BEFORE)),
    "another conversation": (DEMO.encode("<|system|>Be brief.<|end|>"), "rendered", 0),
    "none": ([], "rendered", 0),
}


@pytest.mark.parametrize("what", CASES)
def test_a_history_is_kept_as_far_as_it_spells_the_text(what: str) -> None:
    history, origin, num_kept = CASES[what]
    found = check(history, SECOND)
    assert found[:2] == (origin, num_kept)
    if origin == "kept":
        rest = found[2][num_kept:]
        assert rest[-len(NEXT) :] == NEXT and found[2] != DEMO.encode(SECOND), "the point of it"


NEXT = DEMO.encode("<|user|>And now?<|end|><|assistant|>")


def test_a_tokenizer_that_adds_spaces_renders() -> None:
    """Rather than let a space into the text that is not in the template."""
    tokenizer = SpacingTokenizer()
    rendered = DEMO.encode(SECOND)
    made = continue_prompt(DEMO.encode(FIRST), SECOND, rendered, tokenizer)
    assert (made.origin, made.token_ids) == ("rendered", rendered)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=INCOMPLETE), max_size=60)


@given(TEXTS, TEXTS, TEXTS, st.integers(0, 2**32), st.floats(0, 1))
def test_any_spelling_is_kept_while_it_fits(
    same: str, other: str, rest: str, seed: int, share: float
) -> None:
    rng = random.Random(seed)
    history: list[int] = []
    for piece in (same, other):
        for token in DEMO.encode(piece):
            text = DEMO.decode([token])
            # Bytes of a character spread over tokens have no text of their own: those stay.
            is_spelt = INCOMPLETE not in text and not text.startswith("<|") and rng.random() < share
            history += spelt_out(text) if is_spelt else [token]
    _, num_kept, _ = check(history, same + rest)
    assert num_kept == longest_by_trying(history, same + rest)


def longest_by_trying(history: Sequence[int], text: str) -> int:
    """The longest beginning of `history` that ends with a whole character and spells a beginning of `text`."""
    for num in range(len(history), 0, -1):
        spelt = DEMO.decode(history[:num])
        if not spelt.endswith(INCOMPLETE) and text.startswith(spelt):
            return num
    return 0


KNOWN = frozenset(DEMO.encode("<|pad|><|end|><|system|><|user|><|assistant|>"))


def check_between(history: Sequence[int], text: str, rendered: list[int]) -> tuple[str, int]:
    """Continue where a text may spell tokens that are none: the prompt says the text, and has the tokens that `rendered` has and no others."""
    made = continue_between_tokens(history, text, rendered, DEMO, KNOWN)
    assert DEMO.decode(made.token_ids) == text
    assert [each for each in made.token_ids if each in KNOWN] == [each for each in rendered if each in KNOWN]
    assert made.token_ids[: made.num_kept] == list(history[: made.num_kept])
    return made.origin, made.num_kept


@pytest.mark.parametrize(
    ("history", "text", "found"),
    [
        (SAID + END, SECOND, ("kept", len(SAID) + 1)),
        (SAID, SECOND, ("kept", len(SAID))),
        (SAID, SECOND.replace("well", "ill"), ("cut", len(BEFORE))),
        (DEMO.encode("<|assistant|>Good day!<|end|>"), SECOND, ("rendered", 0)),
        ([], SECOND, ("rendered", 0)),
    ],
)
def test_between_tokens_a_history_is_kept(history: list[int], text: str, found: tuple[str, int]) -> None:
    assert check_between(history, text, DEMO.encode(text)) == found


def test_a_history_in_which_a_token_stands_where_now_a_text_spells_it_is_kept_up_to_there() -> None:
    """A message that was edited so that it says what the template wrote: the same text, and no turn of an assistant's."""
    history = DEMO.encode(FIRST) + spelt_out(ANSWER) + END
    said = f"Hello there, how are you?<|end|><|assistant|>{ANSWER}"
    text = f"<|user|>{said}<|end|><|assistant|>"
    rendered = DEMO.encode("<|user|>") + spelt_out(said) + DEMO.encode("<|end|><|assistant|>")
    assert check_between(history, text, rendered) == ("cut", 1)


ROLES, SAYINGS = ["<|user|>", "<|assistant|>"], ["Hi.", "é🙂", "", "a<|end|>b"]
TURNS = st.lists(st.tuples(st.sampled_from(ROLES), st.sampled_from(SAYINGS)))


@given(TURNS, TURNS, st.integers(0, 4), st.booleans())
def test_between_tokens_the_prompt_always_says_the_text_with_the_tokens_that_it_was_rendered_to(
    history: list[tuple[str, str]], turns: list[tuple[str, str]], num_same: int, is_known: bool
) -> None:
    def ids(turns: list[tuple[str, str]], *, has_tokens: bool = False) -> list[int]:
        said = DEMO.encode if has_tokens else spelt_out
        return [each for role, text in turns for each in (*DEMO.encode(role), *said(text), *END)]

    turns = history[:num_same] + turns
    text = "".join(f"{role}{said}<|end|>" for role, said in turns)
    check_between(ids(history, has_tokens=is_known), text, ids(turns))
