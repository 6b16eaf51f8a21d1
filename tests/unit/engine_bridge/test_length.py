import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge.predict import length
from engine_bridge.predict.hints import read_conversation
from engine_bridge.predict.length import MAX_TOKENS, MIN_FIT, MIN_KEY, MOST_TOLD, Keyed, OnlineLengths, told
from engine_bridge.protocol.engine_request import EngineRequest, LengthGuess

from ..facts import features


def lengths(rng: random.Random, median: float, sigma: float = 0.5) -> int:
    return max(round(rng.lognormvariate(math.log(median), sigma)), 1)


def fed(
    num: int, median_of: Callable[[EngineRequest], float], rng: random.Random, **options: Any
) -> OnlineLengths:
    """After so many answers to prompts of 1 to 4,000 tokens."""
    predictor = OnlineLengths(**options)
    for _ in range(num):
        asked = features(rng.randint(1, 4000))
        predictor.observe(asked, lengths(rng, median_of(asked)))
    return predictor


def by_prompt(asked: EngineRequest) -> float:
    """Short prompts get long answers, as if they asked for an essay."""
    return 400.0 if asked.num_prompt_tokens < 1000 else 40.0


@pytest.fixture(scope="module")
def trained() -> OnlineLengths:
    predictor = fed(800, by_prompt, random.Random(1))
    predictor.refit()
    return predictor


def test_the_narrowest_history_that_is_long_enough_answers() -> None:
    predictor = OnlineLengths()
    assert predictor.predict(features()) == LengthGuess(length.PRIOR_P50, length.PRIOR_P90, "prior")
    assert predictor.predict(features(max_tokens=50)) == LengthGuess(50, 50, "prior"), "the client's bound"
    asked = features(session="s", adapter="a", tenant="t")
    sources = []
    _, least = length.HISTORIES["session"]
    for _ in range(least):
        predictor.observe(features(session="s", adapter="other", tenant="t"), 10)
        sources.append(predictor.predict(asked).source)
    assert sources == ["prior"] * (least - 1) + ["session"]
    for _ in range(MIN_KEY):
        predictor.observe(features(adapter="a"), 1000)
    assert predictor.predict(features(adapter="a")) == LengthGuess(1000, 1000, "adapter")
    assert predictor.predict(asked) == LengthGuess(10, 10, "session")
    assert predictor.predict(features(adapter="new", tenant="new")).source == "all"


def test_the_model_tells_long_answers_from_short_ones(trained: OnlineLengths) -> None:
    long, short = trained.predict(features(500)), trained.predict(features(3000))
    assert long.source == short.source == "model"
    assert 300 < long.p50 < 520 and 30 < short.p50 < 52
    # 0.5 · 1.28 of a logarithm above the median.
    assert long.p90 / long.p50 == pytest.approx(1.9, rel=0.25)


def test_quantiles_cover_what_they_say_and_again_after_lengths_have_doubled() -> None:
    rng = random.Random(2)
    predictor, hits = OnlineLengths(), []
    for at in range(4500):
        asked = features(rng.randint(1, 4000))
        num_tokens = lengths(rng, by_prompt(asked) * (2 if at >= 3000 else 1), 0.8)
        guess = predictor.predict(asked)
        hits.append((num_tokens <= guess.p50, num_tokens <= guess.p90))
        predictor.observe(asked, num_tokens)
        if at == 999:
            predictor.refit()
    steady, at_first, later = hits[1000:3000], hits[3000:3050], hits[3500:]
    for part, tolerance in ((steady, 0.04), (later, 0.05)):
        p50, p90 = (sum(column) / len(part) for column in zip(*part, strict=True))
        assert p50 == pytest.approx(0.5, abs=tolerance) and p90 == pytest.approx(0.9, abs=tolerance - 0.01)
    assert sum(is_within for _, is_within in at_first) / 50 < 0.85, "it has to be wrong at first"


@pytest.mark.parametrize("num_answers", [100, 800])
def test_words_tell_how_long_answers_are_also_where_few_are_known(num_answers: int) -> None:
    rng, predictor = random.Random(4), OnlineLengths()
    long, short, topics = "compose develop outline", "name spell count", "water light stone river paper green"

    def question(wishes: str) -> str:
        """Five random words, of which one tells the length."""
        said = [*rng.choices(topics.split(), k=4), rng.choice(wishes.split())]
        return " ".join(rng.sample(said, 5))

    hits = []
    for number in range(num_answers + 200):
        is_long = rng.random() < 0.5
        asked = asks("", question(long if is_long else short))
        num_tokens = lengths(rng, 400 if is_long else 40)
        if number == num_answers:
            predictor.refit()
        if number >= num_answers:
            guess = predictor.predict(asked)
            assert (guess.p50 > 130) == is_long
            hits.append(num_tokens <= guess.p90)
        predictor.observe(asked, num_tokens)
    assert sum(hits) / len(hits) == pytest.approx(0.9, abs=0.07)


def loaded(path: Path, **options: Any) -> OnlineLengths:
    predictor = OnlineLengths(**options)
    predictor.load(path)
    return predictor


def asks(system: str, question: str, tenant: str = "t") -> EngineRequest:
    """A request of a tenant with a system prompt."""
    asked = read_conversation([("system", system), ("user", question)]).numbers()
    return EngineRequest(num_prompt_tokens=100, tenant=tenant, asked=asked)


def test_templates_and_system_prompts_have_lengths_of_their_own() -> None:
    rng = random.Random(7)
    summarize, story = "Summarize this text for me now", "Write a long story about it"
    medians = {("Be kind.", summarize): 30, ("Be kind.", story): 400, ("Be brief.", summarize): 100}
    predictor = OnlineLengths()
    for number in range(1000):
        (system, question), median = rng.choice(list(medians.items()))
        predictor.observe(asks(system, f"{question}: {number}"), lengths(rng, median, 0.2))
    for system, question in medians:
        assert predictor.predict(asks(system, f"{question}: 7")).source == "template"
    assert predictor.predict(asks("Be brief.", "Anything")) == predictor.predict(asks("Be brief.", "Else"))
    assert predictor.predict(asks("Be brief.", "Anything")).source == "system"
    predictor.refit()
    for (system, question), median in medians.items():
        assert predictor.predict(asks(system, f"{question}: 7")).p50 == pytest.approx(median, rel=0.3)


@pytest.mark.parametrize(
    ("asked_by", "source"),
    [
        (lambda tenant: asks("Be kind.", "Write a story", tenant), "template"),
        (lambda tenant: asks("Be kind.", "", tenant), "system"),
        (lambda tenant: features(session="s", tenant=tenant), "session"),
    ],
)
def test_lengths_are_their_tenants_own(asked_by: Callable[[str], EngineRequest], source: str) -> None:
    predictor = OnlineLengths()
    for _ in range(MIN_KEY):
        predictor.observe(asked_by("ann"), 1000)
    assert [predictor.predict(asked_by(tenant)).source for tenant in ("ann", "bob")] == [source, "all"]


@settings(max_examples=50)
@given(
    st.integers(-5, 10**9),
    st.none() | st.integers(1, 10**7),
    st.lists(st.floats(), max_size=4).map(tuple),
    st.text(max_size=5),
)
def test_any_request_gets_a_guess(
    trained: OnlineLengths, num_prompt: int, max_tokens: int | None, hints: tuple[float, ...], name: str
) -> None:
    asked = features(num_prompt, max_tokens=max_tokens, hints=hints, session=name, adapter=name, tenant=name)
    for predictor in (trained, OnlineLengths(num_hints=2)):
        guess = predictor.predict(asked)
        assert 1 <= guess.p50 <= guess.p90 <= (max_tokens or math.inf)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20)), max_size=60), st.integers(1, 5))
def test_each_keys_latest_lengths_are_kept(added: list[tuple[str, float]], most: int) -> None:
    keyed, model = Keyed(2, most), dict[str, list[float]]()
    keyed.add("", 1.0)
    for key, value in added:
        keyed.add(key, value)
        model[key] = [*model.pop(key, []), value][-most:]
        if len(model) > 2:
            del model[next(iter(model))]
        assert keyed.saved() == model
        recent = keyed.get(key)
        assert recent is not None and recent.last == value
        for share in (0.5, 0.9):
            place = min(math.ceil((len(recent) + 1) * share), len(recent)) - 1
            assert recent.quantile(share) == sorted(model[key])[place]


def test_what_was_learned_survives(tmp_path: Path) -> None:
    rng, predictor, path = random.Random(8), OnlineLengths(), tmp_path / "lengths"
    for _ in range(MIN_FIT):
        verb = rng.choice(("compose", "name"))
        asked = asks("Be kind.", f"{rng.choice('abcdefgh')} {verb} {rng.choice('abcdefgh')}")
        predictor.observe(asked, lengths(rng, 500 if verb == "compose" else 20, 0.1))
    for is_fitted in (False, True):
        if is_fitted:
            predictor.refit()
            predictor.observe(features(session="s", adapter="a"), 77)
        predictor.save(path)
        again = loaded(path)
        assert (len(again), again.num_observed) == (len(predictor), predictor.num_observed)
        assert [file.name for file in tmp_path.iterdir()] == ["lengths"]
        for asked in (
            *(asks("Be kind.", question) for question in ("a compose b", "h name g", "please compose")),
            *(features(num, session="s", adapter="a") for num in range(1, 4000, 500)),
        ):
            assert again.predict(asked) == predictor.predict(asked)
    assert again.predict(asks("", "z compose z")).p50 > 2 * again.predict(asks("", "z name z")).p50
    assert len(loaded(path, window=50)) == 50 < len(predictor) <= length.WINDOW
    again.refit()
    assert again.num_refits == 1
    assert len(loaded(path, num_hints=3)) == 0, "another number of hints starts anew"


@settings(max_examples=40)
@given(st.floats(0, 1), st.integers(1, 255), st.booleans())
def test_a_damaged_file_is_put_aside_and_nothing_of_it_is_taken(
    trained: OnlineLengths, tmp_path_factory: pytest.TempPathFactory, place: float, flip: int, is_cut: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    trained.save(path)
    data = bytearray(path.read_bytes())
    at = int(place * (len(data) - 1))
    data[at] ^= flip
    path.write_bytes(data[:at] if is_cut else data)
    assert loaded(path).predict(features()).source == "prior"
    assert not path.exists()


@given(
    st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 1 << 31), st.none() | st.integers(1, 5000)
)
def test_what_a_client_expects_moves_the_median_a_little_and_no_quantile_beyond_its_bound(
    p50: int, more: int, expected: int, max_tokens: int | None
) -> None:
    most = max_tokens or MAX_TOKENS
    guess = LengthGuess(min(p50, most), min(p50 + more, most), "all")
    heard = told(guess, expected, max_tokens)
    assert guess.p50 // MOST_TOLD <= heard.p50 <= min(guess.p50 * MOST_TOLD, most)
    assert heard.p90 == max(guess.p90, heard.p50)
    assert told(guess, guess.p50, max_tokens) == guess == told(guess, None, max_tokens)
