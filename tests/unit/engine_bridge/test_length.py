"""What the predictor of answer lengths learns, how wide its quantiles are, and what it keeps on disk."""

from __future__ import annotations

import io
import math
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge.predict.hints import read_conversation
from engine_bridge.predict.length import (
    MIN_FIT,
    MIN_KEY,
    MIN_SESSION,
    PRIOR_P50,
    PRIOR_P90,
    WINDOW,
    Keyed,
    LengthFeatures,
    LengthGuess,
    OnlineLengths,
    Recent,
)
from engine_bridge.protocol.request_context import RequestContext

from ..facts import features


def lengths(rng: random.Random, median: float, sigma: float = 0.5) -> int:
    return max(round(rng.lognormvariate(math.log(median), sigma)), 1)


def fed(
    num: int, median_of: Callable[[LengthFeatures], float], rng: random.Random, **options: Any
) -> OnlineLengths:
    """After so many answers to prompts of 1 to 4,000 tokens."""
    predictor = OnlineLengths(**options)
    for _ in range(num):
        asked = features(rng.randint(1, 4000))
        predictor.observe(asked, lengths(rng, median_of(asked)))
    return predictor


def by_prompt(asked: LengthFeatures) -> float:
    """Short prompts get long answers, as if they asked for an essay."""
    return 400.0 if asked.num_prompt_tokens < 1000 else 40.0


@pytest.fixture(scope="module")
def trained() -> OnlineLengths:
    predictor = fed(3000, by_prompt, random.Random(1))
    predictor.refit()
    return predictor


# -- before the model --------------------------------------------------------------------------------------------------


def test_nothing_known_gives_the_prior_within_the_client_s_bound() -> None:
    predictor = OnlineLengths()
    assert predictor.predict(features()) == LengthGuess(PRIOR_P50, PRIOR_P90, "prior")
    assert predictor.predict(features(max_tokens=50)) == LengthGuess(50, 50, "prior")


def test_the_narrowest_history_that_is_long_enough_answers() -> None:
    predictor = OnlineLengths()
    asked = features(session="s", adapter="a", tenant="t")
    sources = []
    for _ in range(MIN_SESSION):
        predictor.observe(features(session="s", adapter="other", tenant="t"), 10)
        sources.append(predictor.predict(asked).source)
    assert sources == ["prior"] * (MIN_SESSION - 1) + ["session"]
    for _ in range(MIN_KEY):
        predictor.observe(features(adapter="a"), 1000)
    assert predictor.predict(features(adapter="a")) == LengthGuess(1000, 1000, "adapter")
    assert predictor.predict(asked) == LengthGuess(10, 10, "session")
    assert predictor.predict(features(adapter="new", tenant="new")).source == "all"


def test_a_refit_of_too_few_answers_changes_nothing() -> None:
    predictor = fed(MIN_FIT - 1, by_prompt, random.Random(1))
    predictor.refit()
    assert predictor.predict(features()).source == "all" and predictor.num_refits == 0


@pytest.mark.parametrize("num_tokens", [-1, 1 << 40])
def test_impossible_lengths_are_ignored(num_tokens: int) -> None:
    predictor = OnlineLengths()
    predictor.observe(features(), num_tokens)
    assert len(predictor) == 0 and predictor.num_observed == 0


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_tells_long_answers_from_short_ones(trained: OnlineLengths) -> None:
    long, short = trained.predict(features(500)), trained.predict(features(3000))
    assert long.source == short.source == "model"
    assert 300 < long.p50 < 520 and 30 < short.p50 < 52
    # 0.5 · 1.28 of a logarithm above the median.
    assert long.p90 / long.p50 == pytest.approx(1.9, rel=0.25)


@pytest.mark.parametrize("sigma", [0.2, 0.8])
def test_quantiles_cover_what_they_say(sigma: float) -> None:
    rng = random.Random(2)
    predictor, hits = OnlineLengths(), []
    for at in range(3000):
        asked = features(rng.randint(1, 4000))
        num_tokens = lengths(rng, by_prompt(asked), sigma)
        guess = predictor.predict(asked)
        if at >= 1000:
            hits.append((num_tokens <= guess.p50, num_tokens <= guess.p90))
        predictor.observe(asked, num_tokens)
        if at in (999, 1999):
            predictor.refit()
    p50, p90 = (sum(column) / len(hits) for column in zip(*hits, strict=True))
    assert p50 == pytest.approx(0.5, abs=0.04)
    assert p90 == pytest.approx(0.9, abs=0.025)


def test_without_a_refit_coverage_comes_back_after_lengths_have_doubled() -> None:
    rng = random.Random(3)
    predictor = fed(2000, by_prompt, rng)
    predictor.refit()
    hits = []
    for _ in range(1500):
        asked = features(rng.randint(1, 4000))
        num_tokens = lengths(rng, 2 * by_prompt(asked))
        hits.append(num_tokens <= predictor.predict(asked).p90)
        predictor.observe(asked, num_tokens)
    assert sum(hits[:30]) / 30 < 0.75  # it has to be wrong at first
    assert sum(hits[-1000:]) / 1000 == pytest.approx(0.9, abs=0.03)


def test_sessions_and_adapters_are_learned_beyond_the_prompt() -> None:
    rng = random.Random(4)
    predictor = OnlineLengths()
    medians = {f"a{at}": 10.0 * 2**at for at in range(6)}
    for _ in range(3000):
        adapter = rng.choice(list(medians))
        predictor.observe(features(adapter=adapter), lengths(rng, medians[adapter], 0.2))
    predictor.refit()
    for adapter, median in medians.items():
        assert predictor.predict(features(adapter=adapter)).p50 == pytest.approx(median, rel=0.3)


def test_hints_are_learned_and_those_that_are_no_numbers_do_no_harm() -> None:
    rng = random.Random(5)
    predictor = OnlineLengths(num_hints=2)
    for _ in range(1500):
        is_list = rng.random() < 0.5
        hint = math.nan if rng.random() < 0.02 else float(is_list)
        predictor.observe(features(hints=(hint, math.inf)), lengths(rng, 300 if is_list else 30, 0.2))
    predictor.refit()
    assert predictor.predict(features(hints=(1.0, 0.0))).p50 > 200
    assert predictor.predict(features(hints=(0.0, 0.0))).p50 < 60
    assert predictor.predict(features(hints=())).p50 == predictor.predict(features(hints=(0.0, 0.0, 7.0))).p50


def asks(system: str, question: str, tenant: str = "t") -> LengthFeatures:
    """A request of a tenant with a system prompt."""
    asked = read_conversation([("system", system), ("user", question)]).numbers()
    return LengthFeatures(num_prompt_tokens=100, context=RequestContext(tenant=tenant, asked=asked))


def test_templates_and_system_prompts_have_lengths_of_their_own() -> None:
    rng = random.Random(7)
    medians = {
        ("Be kind.", "Summarize this text for me now"): 30,
        ("Be kind.", "Write a long story about it"): 400,
    }
    medians[("Be brief.", "Summarize this text for me now")] = 100
    predictor = OnlineLengths()
    for number in range(1500):
        (system, question), median = rng.choice(list(medians.items()))
        predictor.observe(asks(system, f"{question}: {number}"), lengths(rng, median, 0.2))
    for system, question in medians:
        assert predictor.predict(asks(system, f"{question}: 7")).source == "template"
    assert predictor.predict(asks("Be brief.", "Anything")) == predictor.predict(asks("Be brief.", "Else"))
    assert predictor.predict(asks("Be brief.", "Anything")).source == "system"
    predictor.refit()
    for (system, question), median in medians.items():
        assert predictor.predict(asks(system, f"{question}: 7")).p50 == pytest.approx(median, rel=0.3)


def test_one_tenants_templates_tell_another_nothing() -> None:
    predictor = OnlineLengths()
    for _ in range(MIN_KEY):
        predictor.observe(asks("Be kind.", "Write a story", tenant="ann"), 1000)
    assert predictor.predict(asks("Be kind.", "Write a story", tenant="ann")).source == "template"
    assert predictor.predict(asks("Be kind.", "Write a story", tenant="bob")).source == "all"


def test_what_words_and_templates_have_taught_survives(tmp_path: Path) -> None:
    rng, predictor = random.Random(8), OnlineLengths()
    for _ in range(MIN_FIT):
        verb = rng.choice(("compose", "name"))
        asked = asks("Be kind.", f"{rng.choice('abcdefgh')} {verb} {rng.choice('abcdefgh')}")
        predictor.observe(asked, lengths(rng, 500 if verb == "compose" else 20, 0.1))
    predictor.refit()
    predictor.save(tmp_path / "lengths.npz")
    again = OnlineLengths.load(tmp_path / "lengths.npz")
    for question in ("a compose b", "h name g", "please compose", "name it"):
        assert again.predict(asks("Be kind.", question)) == predictor.predict(asks("Be kind.", question))
    assert again.predict(asks("", "z compose z")).p50 > 2 * again.predict(asks("", "z name z")).p50


def test_a_refit_on_another_thread_disturbs_nobody() -> None:
    rng = random.Random(6)
    predictor = fed(1000, by_prompt, rng, window=1000)
    thread = threading.Thread(target=lambda: [predictor.refit() for _ in range(3)])
    thread.start()
    while thread.is_alive():
        asked = features(rng.randint(1, 4000), session=str(rng.randint(0, 50)))
        guess = predictor.predict(asked)
        assert 1 <= guess.p50 <= guess.p90
        predictor.observe(asked, lengths(rng, by_prompt(asked)))
    thread.join()
    assert predictor.num_refits == 3


def test_compiled_trees_say_what_scikit_learn_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.ensemble import GradientBoostingRegressor

    fitted: list[GradientBoostingRegressor] = []
    original = GradientBoostingRegressor.fit

    def fit(self: GradientBoostingRegressor, *args: Any, **kwargs: Any) -> GradientBoostingRegressor:
        fitted.append(original(self, *args, **kwargs))
        return fitted[-1]

    monkeypatch.setattr(GradientBoostingRegressor, "fit", fit)
    predictor = fed(600, by_prompt, random.Random(7))
    predictor.refit()
    assert predictor._model is not None and len(fitted) == 2
    rows = [predictor._row(features(num)) for num in range(1, 4000, 37)]
    theirs = np.array([model.predict(np.array(rows)) for model in fitted]).T
    assert np.array([predictor._model.logs(row) for row in rows]) == pytest.approx(theirs)


def test_a_guess_costs_some_dozen_microseconds(trained: OnlineLengths) -> None:
    times = []
    for num in range(500):
        start = time.perf_counter()
        trained.predict(features(num))
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 200e-6  # 17 µs measured; the margin is for loaded machines


@settings(max_examples=100)
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


def test_a_guess_that_is_outgrown_doubles() -> None:
    guess = LengthGuess(100, 300, "model")
    assert [guess.bound(num) for num in (0, 99, 100, 299, 300, 1000)] == [100, 100, 300, 300, 600, 2000]


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_whatever_comes() -> None:
    predictor = OnlineLengths(window=100, max_keys=10)
    for at in range(1000):
        predictor.observe(features(session=f"s{at}", adapter=f"a{at}", tenant=f"t{at}"), at)
    assert len(predictor) == 100
    kept, sessions = predictor._histories, predictor._histories["session"]
    assert len(sessions) == len(kept["adapter"]) == len(kept["tenant"]) == 10
    assert sessions.get("t999/s999") is not None and sessions.get("t0/s0") is None
    assert len(predictor._all) <= 512
    for _ in range(200):
        predictor.observe(features(session="one"), 7)
    one = sessions.get("one")
    assert one is not None and len(one) == 8


def test_the_key_in_use_stays() -> None:
    keyed = Keyed(2, 4)
    for key in ("a", "b", "a", "c"):
        keyed.add(key, 1.0)
    assert keyed.get("b") is None and keyed.get("a") is not None and len(keyed) == 2
    keyed.add("", 1.0)
    assert keyed.get("") is None


@given(st.lists(st.floats(0, 20), min_size=1, max_size=40), st.integers(1, 10), st.sampled_from([0.5, 0.9]))
def test_recent_numbers_are_the_last_ones_in_both_orders(
    values: list[float], most: int, share: float
) -> None:
    recent = Recent(most)
    for value in values:
        recent.add(value)
    kept = values[-most:]
    assert recent.in_order() == kept and recent.last == values[-1] and len(recent) == len(kept)
    place = min(math.ceil((len(kept) + 1) * share), len(kept)) - 1
    assert recent.quantile(share) == sorted(kept)[place]


@pytest.mark.parametrize("options", [{"window": 0}, {"num_hints": -1}, {"max_keys": 0}])
def test_a_predictor_without_room_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="room"):
        OnlineLengths(**options)


# -- on disk -----------------------------------------------------------------------------------------------------------


def some_guesses(predictor: OnlineLengths) -> list[LengthGuess]:
    return [predictor.predict(features(num, session="s", adapter="a")) for num in range(1, 4000, 50)]


def test_what_was_learned_survives(trained: OnlineLengths, tmp_path: Path) -> None:
    path = tmp_path / "lengths.npz"
    trained.observe(features(session="s", adapter="a"), 77)
    trained.save(path)
    again = OnlineLengths.load(path)
    assert some_guesses(again) == some_guesses(trained)
    assert (len(again), again.num_observed) == (len(trained), trained.num_observed)
    assert [file.name for file in tmp_path.iterdir()] == ["lengths.npz"]
    again.observe(features(), 50)
    again.refit()
    assert again.predict(features(500)).p50 == pytest.approx(trained.predict(features(500)).p50, rel=0.25)


def test_one_without_a_model_survives_too(tmp_path: Path) -> None:
    predictor = OnlineLengths()
    for _ in range(MIN_KEY):
        predictor.observe(features(adapter="a"), 33)
    predictor.save(tmp_path / "lengths.npz")
    again = OnlineLengths.load(tmp_path / "lengths.npz")
    assert again.predict(features(adapter="a")) == LengthGuess(33, 33, "adapter")
    OnlineLengths().save(tmp_path / "empty.npz")
    assert OnlineLengths.load(tmp_path / "empty.npz").predict(features()).source == "prior"


def test_a_smaller_window_keeps_the_latest(trained: OnlineLengths, tmp_path: Path) -> None:
    trained.save(tmp_path / "lengths.npz")
    again = OnlineLengths.load(tmp_path / "lengths.npz", window=100)
    assert len(again) == 100 < len(trained) <= WINDOW
    assert list(again._rows) == list(trained._rows)[-100:]


def test_no_file_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert OnlineLengths.load(tmp_path / "none").predict(features()).source == "prior"
    assert not caplog.records


def damaged(path: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name].copy() for name in file.files}
    change(arrays)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def endless(arrays: dict[str, Any]) -> None:
    """A node whose children are itself."""
    at = int(np.argmax(arrays["links"][0] >= 0))
    arrays["links"][1:, at] = at


def foreign_feature(arrays: dict[str, Any]) -> None:
    arrays["links"][0, 0] = 99


def no_number(arrays: dict[str, Any]) -> None:
    arrays["rows"][0, 0] = math.nan


def wordless(arrays: dict[str, Any]) -> None:
    arrays["words"] = arrays["words"][:, :7]


def without_rows(arrays: dict[str, Any]) -> None:
    del arrays["rows"]


@pytest.mark.parametrize("change", [endless, foreign_feature, no_number, wordless, without_rows])
def test_a_file_with_wrong_content_is_not_taken(
    trained: OnlineLengths,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[dict[str, Any]], None],
) -> None:
    path = tmp_path / "lengths.npz"
    trained.save(path)
    path.write_bytes(damaged(path, lambda arrays: None))
    assert OnlineLengths.load(path).predict(features()).source == "model"  # it is the change that matters
    path.write_bytes(damaged(path, change))
    fresh = OnlineLengths.load(path)
    assert fresh.predict(features()).source == "prior" and len(fresh) == 0
    assert "learning answer lengths anew" in caplog.text


class MakesFolder:
    """What a pickle would do when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_nothing_in_a_file_is_run(trained: OnlineLengths, tmp_path: Path) -> None:
    path, made = tmp_path / "lengths.npz", tmp_path / "made"
    trained.save(path)
    pickled = np.array([MakesFolder(made)], dtype=object)
    path.write_bytes(damaged(path, lambda arrays: arrays.update(rows=pickled)))
    assert len(OnlineLengths.load(path)) == 0
    assert not made.exists()


@pytest.mark.parametrize(
    "data", [b"", b"not a file of ours", b"PK\x03\x04" + b"\0" * 50, b"\x93NUMPY\x01\x00"]
)
def test_a_file_of_something_else_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    path = tmp_path / "lengths.npz"
    path.write_bytes(data)
    assert len(OnlineLengths.load(path)) == 0
    assert "learning answer lengths anew" in caplog.text


@settings(max_examples=40)
@given(st.floats(0, 1), st.integers(0, 255))
def test_no_damaged_byte_leads_to_an_error(
    trained: OnlineLengths, tmp_path_factory: pytest.TempPathFactory, place: float, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    trained.save(path)
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] = byte
    path.write_bytes(data[: max(int(place * 2 * len(data)), 1)])
    guess = OnlineLengths.load(path).predict(features())
    assert 1 <= guess.p50 <= guess.p90


def test_another_number_of_hints_starts_anew(trained: OnlineLengths, tmp_path: Path) -> None:
    trained.save(tmp_path / "lengths.npz")
    assert len(OnlineLengths.load(tmp_path / "lengths.npz", num_hints=3)) == 0
