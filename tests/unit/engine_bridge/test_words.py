import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.predict.words import MAX_WORDS, NUM_PLACES, Words, places_of

TOPICS = "water light stone river paper green house table north music".split()


@given(st.text(max_size=5000))
def test_any_text_has_a_bounded_number_of_places(text: str) -> None:
    places = places_of(text)
    assert len(places) <= 2 * MAX_WORDS and all(0 <= place < NUM_PLACES for place in places)


@given(st.lists(st.tuples(st.sampled_from(TOPICS), st.floats(0, 14)), max_size=60))
def test_whatever_is_learned_the_estimate_stays_a_number(answers: list[tuple[str, float]]) -> None:
    words = Words(5.0)
    for _ in range(300):
        words.learn((), 3.0)
    assert words.predict(()) == pytest.approx(3.0, abs=0.05), "without words it is the mean"
    for word, length in answers:
        words.learn(places_of(f"{word} {word}s"), length)
        assert math.isfinite(words.predict(places_of(word)))


def test_questions_in_other_scripts_have_words_too() -> None:
    assert places_of("Почему идёт дождь?") != places_of("为什么下雨")
    assert places_of("为什么下雨")
    assert places_of("?!") == ()
