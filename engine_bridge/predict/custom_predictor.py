"""A user's own predictor of answer lengths: found by its name, tried once, and kept away from the engine's thread.

It runs on a thread of its own, ahead of the engine: a request waits for its guess PATIENCE_S at most, the engine and other requests never do.
Our own predictor answers for a failed or late guess; each is counted, and the first of its kind is logged.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from msgspec import Struct

from engine_bridge.predict.length import LengthPredictor
from engine_bridge.protocol.asked import Asked
from engine_bridge.protocol.engine_request import EngineRequest, LengthGuess
from engine_bridge.protocol.errors import BridgeError

log = logging.getLogger(__name__)

NAME = re.compile(r"[\w.]+:[\w.]+")
# How long a request waits for its guess. Chosen: a fine-tuned BERT takes 8 ms on a GPU (SSJF), some times that on a CPU.
PATIENCE_S = 0.05
# Guesses and endings that may wait for the thread; more are not asked for. Chosen.
MAX_PENDING = 256
# The question that a predictor is tried with.
FIRST_QUESTION = EngineRequest(num_prompt_tokens=16, asked=Asked("How are you?"))
METHODS = ("predict", "observe", "refit")


class PredictorRefused(BridgeError):
    """The predictor that was asked for cannot be had. The message names the remedy."""


class PredictorContext(Struct, frozen=True, kw_only=True):
    """Facts for a predictor when it is made. folder: for its files, None: it may keep none."""

    model: str
    folder: Path | None = None


def load_predictor(name: str, context: PredictorContext) -> LengthPredictor:
    """Import `module:Name` and make it: a class, a factory, or something that has the methods already.

    A class or factory that takes an argument is given the context. The predictor is asked once, which also warms it up. Raises PredictorRefused.
    """
    module_name, _, attribute = name.partition(":")
    if not NAME.fullmatch(name):
        raise PredictorRefused(f"length_predictor: {name!r} is not of the form module:Name")
    # Importing runs code of the user's.
    with _refused(name, "cannot be imported (is its folder in PYTHONPATH?)"):
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    made = _made(name, found, context)
    missing = [method for method in METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise PredictorRefused(f"length_predictor: {name} has no method {' and no '.join(missing)}")
    with _refused(name, "could not answer a first question"):
        checked(made.predict(FIRST_QUESTION), None)
    predictor: LengthPredictor = made
    return predictor


@contextmanager
def _refused(name: str, what: str) -> Iterator[None]:
    """Turn any error of a user's code into PredictorRefused. what: the call that failed, for its message."""
    try:
        yield
    except Exception as error:
        raise PredictorRefused(f"length_predictor: {name} {what}: {type(error).__name__}: {error}") from error


def _made(name: str, found: Any, context: PredictorContext) -> Any:
    if not inspect.isclass(found) and all(callable(getattr(found, method, None)) for method in METHODS):
        return found
    if not callable(found):
        raise PredictorRefused(f"length_predictor: {name} is neither a class nor a function nor a predictor")
    with _refused(name, "could not be made"):
        return found(context) if _takes_context(found) else found()


def _takes_context(found: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )


def checked(guess: Any, max_tokens: int | None) -> LengthGuess:
    """Return a guess with sound numbers, within the client's bound. Raises TypeError or ValueError for any other object."""
    p50, p90 = int(guess.p50), int(guess.p90)
    if p50 < 0 or p90 < p50:
        raise ValueError(f"p50 {p50} and p90 {p90} are no quantiles")
    most = max_tokens or p90
    p50 = max(min(p50, most), 1)
    return LengthGuess(p50, max(min(p90, most), p50), str(getattr(guess, "source", "own")))


class CustomPredictor:
    """Asks a user's predictor on a separate thread, one call at a time.

    `ask` and `observe` from any thread; `counts`: `answered`, and faults: `failed`, `late`, `refused` (not asked: the thread
    was busy for too long), `not_observed`.
    """

    def __init__(self, predictor: LengthPredictor, name: str) -> None:
        self._predictor = predictor
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy_since_s: float | None = None
        self._refitting: threading.Thread | None = None
        self.counts: Counter[str] = Counter()
        # A daemon: a hanging predictor must not keep the process from ending.
        threading.Thread(target=self._run, name="length predictor", daemon=True).start()

    def ask(self, features: EngineRequest) -> Future[LengthGuess] | None:
        """Ask for a guess, which the caller need not wait for; None if none can come in time."""
        if not self._has_time():
            self.note("refused", "is too slow: requests go on without it", None)
            return None
        future: Future[LengthGuess] = Future()
        self._work.put(lambda: self._answer(features, future))
        return future

    def observe(self, features: EngineRequest, num_tokens: int) -> None:
        """Let the predictor learn from an answer, later and on its thread."""
        if not self._has_time():
            self.note("not_observed", "is too slow: it does not learn of every answer", None)
            return
        self._work.put(lambda: self._observe(features, num_tokens))

    def refit(self) -> None:
        """Begin a refit, unless the last one is still under way."""
        if self._refitting is None or not self._refitting.is_alive():
            self._refitting = threading.Thread(target=self._refit, name="own refit", daemon=True)
            self._refitting.start()

    def note(self, what: str, message: str, error: Exception | None) -> None:
        """Count a fault, and log the first of its kind."""
        if not self.counts[what]:
            log.warning(
                "the length predictor %s %s; it is logged this once", self._name, message, exc_info=error
            )
        self.counts[what] += 1

    def close(self) -> None:
        """End the thread after the call under way, without waiting for it."""
        self._work.put(None)

    def _has_time(self) -> bool:
        busy_since_s = self._busy_since_s
        is_stuck = busy_since_s is not None and time.monotonic() - busy_since_s > PATIENCE_S
        return not is_stuck and self._work.qsize() < MAX_PENDING

    # -- on its thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._busy_since_s = time.monotonic()
            work()
            self._busy_since_s = None

    def _answer(self, features: EngineRequest, future: Future[LengthGuess]) -> None:
        if not future.set_running_or_notify_cancel():
            return  # the request went on without it
        try:
            guess = checked(self._predictor.predict(features), features.max_tokens)
        except Exception as error:
            self.note("failed", "failed at a request, which goes on without it", error)
            future.set_exception(error)
        else:
            self.counts["answered"] += 1
            future.set_result(guess)

    def _observe(self, features: EngineRequest, num_tokens: int) -> None:
        try:
            self._predictor.observe(features, num_tokens)
        except Exception as error:
            self.note("not_observed", "failed at learning of an answer", error)

    def _refit(self) -> None:
        try:
            self._predictor.refit()
        except Exception as error:
            self.note("not_refitted", "could not be refitted", error)
