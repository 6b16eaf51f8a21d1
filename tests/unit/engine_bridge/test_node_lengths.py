import logging
import os
import random
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.predict import custom_predictor
from engine_bridge.predict.custom_predictor import CustomPredictor, PredictorRefused, load_predictor
from engine_bridge.predict.hints import HINTS
from engine_bridge.predict.node_lengths import MAX_FILES, PREFIX, SUFFIX, NodeLengths, fingerprint, tidy
from engine_bridge.protocol.engine_request import EngineRequest, LengthGuess

from ..facts import features

CONTEXT = custom_predictor.PredictorContext(model="m", folder=Path("there"))


def fed(lengths: NodeLengths, num: int, seed: int = 1) -> NodeLengths:
    rng = random.Random(seed)
    for _ in range(num):
        hints = tuple(rng.random() for _ in HINTS)
        asked = features(rng.randint(1, 4000), hints=hints, session="s", question="SECRET", adapter="a")
        lengths.observe(asked, rng.randint(1, 500))
    return lengths


def test_it_is_kept_without_text_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fed(NodeLengths.open(None, "model"), 5).close()
    assert list(tmp_path.iterdir()) == [], "without a folder nothing is written"
    lengths = fed(NodeLengths.open(tmp_path, "model"), 10)
    lengths.refit()
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert NodeLengths.open(tmp_path, "model").num_observed == 10
    assert NodeLengths.open(tmp_path, "another model").num_observed == 0
    lengths.observe(features(question="SECRET", prompt_token_ids=[987654321] * 8, session="s-name"), 5)
    lengths.close()
    data = path.read_bytes()
    assert b"s-name" in data and b"SECRET" not in data and b"987654321" not in data
    assert (987654321).to_bytes(4, "little") not in data
    assert NodeLengths.open(tmp_path, "model").num_observed == 11


def test_a_disk_that_takes_nothing_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    lengths = fed(NodeLengths.open(folder, "model"), 5)
    folder.rmdir()
    lengths.refit()
    fed(lengths, 1).refit()
    assert len([record for record in caplog.records if "could not be stored" in record.message]) == 1
    folder.mkdir()
    lengths.close()
    assert NodeLengths.open(folder, "model").num_observed == 6


def test_files_are_few_and_the_one_in_use_stays(tmp_path: Path) -> None:
    paths = [tmp_path / f"{PREFIX}{number}{SUFFIX}" for number in range(MAX_FILES + 3)]
    for age, path in enumerate(paths):
        path.write_bytes(b"x")
        os.utime(path, (1000 - age, 1000 - age))
    for name in (f"{PREFIX}1{SUFFIX}.77.tmp", f"{PREFIX}1.npz"):  # half-written, and of the format before
        (tmp_path / name).write_bytes(b"x")
    other = tmp_path / "sessions.sqlite3"
    other.write_bytes(b"x")
    tidy(tmp_path, paths[-1])
    assert set(tmp_path.iterdir()) == {*paths[: MAX_FILES - 1], paths[-1], other}


def test_a_model_is_told_by_what_is_in_its_folder(tmp_path: Path) -> None:
    def model(name: str, tokenizer: str = "{}", weights: int = 10) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text(tokenizer)
        (folder / "model.safetensors").write_bytes(b"x" * weights)
        (folder / "README.md").write_text(name)
        return str(folder)

    first = fingerprint(model("first"))
    assert first == fingerprint(model("moved"))
    assert first != fingerprint(model("other tokenizer", tokenizer="[]"))
    assert first != fingerprint(model("other weights", weights=11))
    assert fingerprint("org/a") != fingerprint("org/b")


class Own:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.entered, self.go_on = threading.Event(), threading.Event()

    def predict(self, features: EngineRequest) -> Any:
        if features.question == "fail":
            raise KeyError("no idea")
        if features.question == "hang":
            self.entered.set()
            self.go_on.wait()
        if features.question == "odd":
            return "odd"
        p50, p90 = map(float, (features.question.replace("hang", "") or "5 9").split())
        return LengthGuess(p50, p90, "mine")  # type: ignore[arg-type]

    def observe(self, features: EngineRequest, num_tokens: int) -> None:
        if num_tokens == 13:
            raise ValueError("unlucky")
        self.seen.append(num_tokens)

    def refit(self) -> None:
        raise ValueError("cannot")


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    # Logging a first failure reads source files: on a slow disk that alone takes longer than a request would wait.
    monkeypatch.setattr("engine_bridge.predict.custom_predictor.PATIENCE_S", 60.0)
    mine = Own()
    yield mine
    mine.go_on.set()


def test_it_answers_and_what_it_raises_is_logged_once(mine: Own, caplog: pytest.LogCaptureFixture) -> None:
    own = CustomPredictor(mine, "m:Own")

    def answer(**fields: Any) -> LengthGuess:
        future = own.ask(features(**fields))
        return future.result(60)

    assert answer() == LengthGuess(5, 9, "mine") and answer(max_tokens=3) == LengthGuess(3, 3, "mine")
    for question in ("fail", "odd", "fail", "5 4", "-1 3", "nan 3"):
        with pytest.raises((KeyError, AttributeError, ValueError)):
            answer(question=question)
    assert own.counts["failed"] == 6
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_one_that_hangs_is_asked_again_when_it_is_back(mine: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_bridge.predict.custom_predictor.PATIENCE_S", 0.0)
    own = CustomPredictor(mine, "m:Own")
    hung = own.ask(features(question="hang"))
    mine.entered.wait(60)
    assert own.ask(features()) is None
    own.observe(features(), 5)
    assert own.counts["refused"] == own.counts["not_observed"] == 1
    mine.go_on.set()
    assert hung is not None and hung.result(60).p50 == 5
    while own.ask(features()) is None:
        time.sleep(0.001)


def test_ours_learns_whatever_theirs_does(mine: Own) -> None:
    own = CustomPredictor(mine, "m:Own")
    lengths = NodeLengths(None, own)
    for num_tokens in (13, 20, 30):
        lengths.observe(features(), num_tokens)
    lengths.refit()
    future = own.ask(features())
    assert future is not None and future.result(60).source == "mine"
    assert mine.seen == [20, 30] and lengths.num_observed == 3
    assert lengths.predict(features()).source == "prior"
    while "not_refitted" not in own.counts:
        time.sleep(0.001)
    assert own.counts["not_observed"] == 1
    lengths.close()


MODULE = """
class Half:
    def predict(self, features): ...

class Mute(Half):
    def observe(self, features, num_tokens): ...
    def refit(self): ...

class Broken(Mute):
    def __init__(self): raise OSError("no weights")

number = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


WRONG = {
    "M:Half": "has no method observe and no refit",
    "M:Mute": "could not answer a first question: AttributeError",
    "M:Broken": "could not be made: OSError: no weights",
    "M:number": "neither a class nor a function",
    "M:Missing": "cannot be imported .*: AttributeError",
}
WRONG |= dict.fromkeys(("no_such_module_here:X", "json:", "json", "json:a:b", ":X"), "length_predictor")


@pytest.mark.parametrize(("name", "reason"), WRONG.items())
def test_what_is_wrong_with_it_is_said_at_the_start(module: str, name: str, reason: str) -> None:
    """M: the module above."""
    with pytest.raises(PredictorRefused, match=reason):
        load_predictor(name.replace("M:", f"{module}:"), CONTEXT)
