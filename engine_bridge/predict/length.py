"""How long an answer will be: quantiles, learned from the answers so far. Predicting takes microseconds; refitting is for another thread.

Until enough answers are known, the recent lengths of the session, template, system prompt, adapter, tenant or of all requests answer, the narrowest
first. After that scikit-learn answers: a ridge regression (`words.py`), and boosted trees that read its estimate, one set for each quantile. Each
later answer corrects what these still get wrong in one direction, so that the share of answers under p90 stays near 90% when traffic changes.

Source: Chameleon §4.2 and SSJF (Qiu et al., 2024), which have a fine-tuned BERT for this. Ours takes numbers only (`hints.py` makes some from the
text), bounded memory, no GPU. A BERT is welcome (`custom_predictor.py`). Correction: Gibbs & Candès, Adaptive Conformal Inference, 2021.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from engine_bridge.predict.words import Linear, fitted, packed
from engine_bridge.protocol.engine_request import EngineRequest, LengthGuess
from kvtiers.io.files import read_regular, write_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

log = logging.getLogger(__name__)

P50, P90 = 0.5, 0.9
QUANTILES = (P50, P90)
# Before any answer was seen: the median and 90th percentile of Azure's conversations (Patel et al., 2024), rounded.
PRIOR_P50, PRIOR_P90 = 128, 512
MAX_TOKENS = 1 << 20
# The latest answers, which the trees are trained on. Measured on Azure's conversations: twice as many lose 1% less, half as many 1 to 3% more.
WINDOW = 8192
MIN_FIT = 64  # answers known before anything is fitted. Chosen
# The regression counts beside the trees by the square of few ÷ (few + answers), for p50 and p90: trees need more answers. Measured on first turns of
# MT-Bench-101 and on OpenAssistant at 200 to 800 answers, and on Azure's conversations, whose pinball loss grows by 0.7%.
FEW = (400, 1600)
MAX_RECENT_ALL = 512  # recent lengths of all requests. Chosen
MAX_KEYS = 4096  # of each kind; 0.5 KB for a session, 1.5 KB for an adapter or a tenant at most. Chosen
MIN_KEY = 8
# Kinds of keys, the narrowest first: the lengths kept for a key, and the number from which a key answers for itself. Chosen: answers within a session
# resemble each other sooner than those of an adapter.
HISTORIES = {
    "session": (8, 3),
    "template": (32, MIN_KEY),
    "system": (32, MIN_KEY),
    "adapter": (32, MIN_KEY),
    "tenant": (32, MIN_KEY),
}
# Boosting. Measured on Azure's conversations: less pinball loss than histogram boosting, forests and single trees with quantiles in their leaves.
NUM_TREES, MAX_LEAVES, MIN_LEAF, SHRINKAGE, SUBSAMPLE = 40, 8, 40, 0.1, 0.5
# A step in natural logarithms, for each answer. Chosen: lengths that double are followed within 140 answers; in steady traffic it loses 0.4% (Azure).
CORRECTION_RATE = 0.01
MAX_CORRECTION = 1.5
# How many times longer or shorter than predicted a client may say that its answer will be. Chosen.
MOST_TOLD = 4
# Rows turned into an array at a time. Chosen: a millisecond.
PIECE = 512
FORMAT = 5
DIGEST_BYTES = 16


class LengthPredictor(Protocol):
    """A predictor of answer lengths, ours or a user's own.

    `predict` and `observe` are called on one thread: for ours the engine's, for a user's own a separate one (`custom_predictor.py`).
    """

    def predict(self, features: EngineRequest) -> LengthGuess:
        """Predict a length before the request is queued. It should be fast and raise nothing."""

    def observe(self, features: EngineRequest, num_tokens: int) -> None:
        """Learn from an answer that ended by itself or by its bound. Answers that the client cut off are not reported: their length is unknown."""

    def refit(self) -> None:
        """Learn from the observed answers. Takes seconds, on a thread of the caller's, one call at a time."""


class OnlineLengths:
    """Our predictor. `predict` and `observe` run on one thread; `refit` and `save` on any, one call at a time each.

    Memory: 8 MB for a full window with the hints of `hints.py`, 14 MB for MAX_KEYS keys of each kind, two times 40 trees.

    Args:
        window: answers to train on.
        num_hints: length of each request's `hints`; more are ignored, missing ones count as 0.
    """

    def __init__(
        self, *, window: int = WINDOW, num_hints: int = 0, max_keys: int = MAX_KEYS, seed: int = 0
    ) -> None:
        self._num_hints = num_hints
        self._rows: deque[tuple[float, ...]] = deque(maxlen=window)  # features, then the length's logarithm
        self._histories = {name: Keyed(max_keys, most) for name, (most, _) in HISTORIES.items()}
        self._words: deque[bytes] = deque(maxlen=window)  # of each row's question, packed
        self._all = Recent(MAX_RECENT_ALL)
        self._model: Fitted | None = None
        self._corrections = [0.0, 0.0]
        self._seed = seed
        self._lock = threading.Lock()  # guards the rows and words alone: refit copies them
        self.num_observed = 0
        self.num_refits = 0

    def __len__(self) -> int:
        """Return the number of answers in the window."""
        return len(self._rows)

    # -- on the engine's thread ----------------------------------------------------------------------------------------

    def predict(self, features: EngineRequest) -> LengthGuess:
        """Predict by the fitted model if there is any, else by the narrowest history that is long enough. 30 µs."""
        if self._model is None:
            return self._by_recent(features)
        low, high = self._model.values(self._row(features), features.asked.words)
        return _guess(low + self._corrections[0], high + self._corrections[1], "model", features.max_tokens)

    def observe(self, features: EngineRequest, num_tokens: int) -> None:
        """Learn an answer's length. Negative lengths and those beyond any context are ignored."""
        if not 0 <= num_tokens <= MAX_TOKENS:
            return
        row, length = self._row(features), _log(num_tokens)
        if self._model is not None:
            for at, predicted in enumerate(self._model.values(row, features.asked.words)):
                self._correct(at, predicted, length)
        words = packed(features.asked.words)
        with self._lock:
            self._rows.append((*row, length))
            self._words.append(words)
        self._all.add(length)
        for name, keyed in self._histories.items():
            keyed.add(getattr(features, name), length)
        self.num_observed += 1

    def _correct(self, at: int, predicted: float, length: float) -> None:
        """Move a quantile up by its share of a step where the answer was longer, else down by the rest: at its own coverage this balances."""
        is_longer = length > predicted + self._corrections[at]
        moved = self._corrections[at] + CORRECTION_RATE * (is_longer - (1 - QUANTILES[at]))
        self._corrections[at] = max(min(moved, MAX_CORRECTION), -MAX_CORRECTION)

    def _recent(self, name: str, features: EngineRequest) -> Recent | None:
        return self._histories[name].get(getattr(features, name))

    def _by_recent(self, features: EngineRequest) -> LengthGuess:
        for source, (_, least) in HISTORIES.items():
            recent = self._recent(source, features)
            if recent is not None and len(recent) >= least:
                return _guess(recent.quantile(P50), recent.quantile(P90), source, features.max_tokens)
        if len(self._all) >= MIN_KEY:
            return _guess(self._all.quantile(P50), self._all.quantile(P90), "all", features.max_tokens)
        return _guess(_log(PRIOR_P50), _log(PRIOR_P90), "prior", features.max_tokens)

    def _row(self, features: EngineRequest) -> tuple[float, ...]:
        """Return the numbers that predictions are made from, besides the question's words.

        An unknown template takes the figures of its system prompt, an unknown system prompt or session those of the adapter, and an unknown adapter
        or tenant those of all requests.
        """
        usual = _quantiles(self._all, (_log(PRIOR_P50), _log(PRIOR_P90)))
        adapter = _quantiles(self._recent("adapter", features), usual)
        system = _quantiles(self._recent("system", features), adapter)
        template = _quantiles(self._recent("template", features), system)
        session = self._recent("session", features)
        own = (
            _log(features.num_prompt_tokens),
            _log(features.max_tokens) if features.max_tokens else _log(MAX_TOKENS),
            session.last if session else adapter[0],
            session.quantile(P50) if session else adapter[0],
            float(len(session)) if session else 0.0,
            *adapter,
            *_quantiles(self._recent("tenant", features), usual),
            *system,
            *template,
            *usual,
        )
        # NaN and infinity would spoil the training.
        hints = tuple(hint if math.isfinite(hint) else 0.0 for hint in features.hints[: self._num_hints])
        return own + hints + (0.0,) * (self._num_hints - len(hints))

    # -- on a worker's thread ------------------------------------------------------------------------------------------

    def refit(self) -> None:
        """Train on the window and put the result in place; with fewer than MIN_FIT answers nothing changes. 2 s for 8,192 answers."""
        with self._lock:
            rows, words = list(self._rows), list(self._words)
        if len(rows) < MIN_FIT:
            return
        table = _table(rows)
        self._model = _train(table[:, :-1], table[:, -1], words, self._seed + self.num_refits)
        self.num_refits += 1

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write all that was learned into one file, whole or not at all: a digest, then msgpack. Raises OSError."""
        with self._lock:
            rows, words = list(self._rows), list(self._words)
        learned = _Learned(
            format=FORMAT,
            num_hints=self._num_hints,
            rows=rows,
            model=self._model,
            corrections=self._corrections,
            num_observed=self.num_observed,
            recent_all=self._all.in_order(),
            histories={name: keyed.saved() for name, keyed in self._histories.items()},
            words=words,
        )
        body = msgspec.msgpack.encode(learned)
        # Readable by its owner only: it names sessions and tenants.
        write_whole(path, _digest(body) + body)

    def load(self, path: Path) -> None:
        """Take over what `save` wrote, right after this was made. Missing files change nothing, nor do damaged ones, which are put aside."""
        try:
            self._restore(read_regular(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s cannot be read: %s; learning answer lengths anew", path, error.strerror)
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("%s: %s; it is put aside, learning answer lengths anew", path, error)
            _put_aside(path)

    def _restore(self, data: bytes) -> None:
        """Take over a file's content. Raises ValueError or MsgspecError before anything has changed."""
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if digest != _digest(body):
            raise ValueError("it is damaged, or no file of ours")
        head = msgspec.msgpack.decode(body, type=_Head)
        if (head.format, head.num_hints) != (FORMAT, self._num_hints):
            raise ValueError("saved by another version, or for other hints")
        learned = msgspec.msgpack.decode(body, type=_Learned)
        self._rows.extend(learned.rows)
        self._words.extend(learned.words)
        self._model, self._corrections = learned.model, learned.corrections
        self.num_observed = learned.num_observed
        for length in learned.recent_all:
            self._all.add(length)
        for name, lengths_of in learned.histories.items():
            for key, lengths in lengths_of.items():
                for length in lengths:
                    self._histories[name].add(key, length)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def _table(rows: list[tuple[float, ...]]) -> Floats:
    """Return rows as an array, made piece by piece: all at once would hold the interpreter, and with it the engine's thread, for 20 ms."""
    import numpy as np

    pieces = [np.array(rows[at : at + PIECE], dtype=np.float64) for at in range(0, len(rows), PIECE)]
    return np.concatenate(pieces)


def _put_aside(path: Path) -> None:
    """Keep a file that cannot be used for the operator to look at, in place of the one before."""
    try:
        path.replace(path.with_name(f"{path.name}.damaged"))
    except OSError as error:
        log.warning("%s could not be put aside: %s", path, error)


def _log(num_tokens: int) -> float:
    return math.log1p(max(num_tokens, 0))


def _guess(low: float, high: float, source: str, max_tokens: int | None) -> LengthGuess:
    """Make a guess from logarithms; p90 is at least p50, both are at least 1 and within the client's bound."""
    most = min(max_tokens or MAX_TOKENS, MAX_TOKENS)
    p50 = min(max(round(math.expm1(min(low, 14.0))), 1), most)
    p90 = min(max(round(math.expm1(min(high, 14.0))), p50), most)
    return LengthGuess(p50, p90, source)


def told(guess: LengthGuess, expected_tokens: int | None, max_tokens: int | None) -> LengthGuess:
    """Return a guess with a median nearer to what the client expects. It gains little by a lie: MOST_TOLD times at most, and p90 stays."""
    if expected_tokens is None:
        return guess
    p50 = max(min(expected_tokens, guess.p50 * MOST_TOLD), guess.p50 // MOST_TOLD, 1)
    p50 = min(p50, max_tokens or MAX_TOKENS, MAX_TOKENS)
    return LengthGuess(p50, max(guess.p90, p50), guess.source)


# -- recent lengths ----------------------------------------------------------------------------------------------------


class Recent:
    """The latest numbers of a series, `most` of them, in order of time and of size."""

    __slots__ = ("_by_size", "_by_time", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_time: list[float] = []
        self._by_size: list[float] = []

    def __len__(self) -> int:
        return len(self._by_time)

    @property
    def last(self) -> float:
        """The newest value."""
        return self._by_time[-1]

    def in_order(self) -> list[float]:
        """Return the values, the oldest first."""
        return list(self._by_time)

    def add(self, value: float) -> None:
        """Add a value; the oldest one makes room."""
        if len(self._by_time) == self._most:
            del self._by_size[bisect_left(self._by_size, self._by_time.pop(0))]
        self._by_time.append(value)
        insort(self._by_size, value)

    def quantile(self, share: float) -> float:
        """Return the value that the next one exceeds with a probability of 1 − share at most, as far as few values can tell. Needs one value."""
        num = len(self._by_size)
        return self._by_size[min(math.ceil((num + 1) * share), num) - 1]


class Keyed:
    """Recent lengths of each key. At most `max_keys`: the key that was added to longest ago is forgotten. The empty key is never kept."""

    def __init__(self, max_keys: int, max_recent: int) -> None:
        self._max_keys = max_keys
        self._max_recent = max_recent
        self._recent: dict[str, Recent] = {}  # the key added to longest ago comes first

    def get(self, key: str) -> Recent | None:
        """Return the key's lengths, None for an unknown key."""
        return self._recent.get(key)

    def add(self, key: str, value: float) -> None:
        """Add a length to a key's."""
        if not key:
            return
        recent = self._recent.pop(key, None) or Recent(self._max_recent)
        if len(self._recent) >= self._max_keys:
            del self._recent[next(iter(self._recent))]
        recent.add(value)
        self._recent[key] = recent

    def saved(self) -> dict[str, list[float]]:
        """Return each key's lengths, the oldest first, to be kept over a restart."""
        # Copied first, in one step of the interpreter: the engine's thread may be adding.
        return {key: recent.in_order() for key, recent in list(self._recent.items())}


def _quantiles(recent: Recent | None, otherwise: tuple[float, float]) -> tuple[float, float]:
    """Return p50 and p90 of a history, `otherwise` of an empty one."""
    return (recent.quantile(P50), recent.quantile(P90)) if recent else otherwise


# -- the trees ---------------------------------------------------------------------------------------------------------


class Split(Struct, frozen=True, array_like=True):
    """An inner node of a tree. low: the side for rows whose feature is at most the threshold."""

    feature: int
    threshold: float
    low: Split | float
    high: Split | float


class Trees(Struct, frozen=True, array_like=True):
    """Boosted trees of one quantile, copied out of scikit-learn, whose own `predict` takes a millisecond for one row; this takes some 10 µs."""

    base: float
    trees: tuple[Split | float, ...]

    def value(self, row: Sequence[float]) -> float:
        """Return the quantile's logarithm, uncorrected."""
        total = self.base
        for node in self.trees:
            while isinstance(node, Split):
                node = node.low if row[node.feature] <= node.threshold else node.high
            total += node
        return total


class Fitted(Struct, frozen=True, array_like=True):
    """The model learned from a window of answers.

    Attributes:
        lacking: by how much answers exceeded it that it was not fitted to, as a logarithm, for each of QUANTILES.
        trees: for each of QUANTILES; their last figure is the regression's estimate.
        linear_shares: the share of the regression in each quantile; the trees have the rest.
    """

    linear: Linear
    lacking: tuple[float, ...]
    trees: tuple[Trees, ...]
    linear_shares: tuple[float, ...]

    def values(self, row: tuple[float, ...], places: Sequence[int]) -> list[float]:
        """Return each quantile's logarithm, uncorrected, from a request's numbers and the places of its question's words."""
        estimate = self.linear.value(row, places)
        row = (*row, estimate)
        return [
            share * (estimate + lacking) + (1 - share) * trees.value(row)
            for share, lacking, trees in zip(self.linear_shares, self.lacking, self.trees, strict=True)
        ]


class _Head(Struct):
    format: int
    num_hints: int


class _Learned(Struct, frozen=True, kw_only=True):
    """The file's content. Lengths are logarithms, the oldest first."""

    format: int
    num_hints: int
    rows: list[tuple[float, ...]]
    words: list[bytes]
    model: Fitted | None
    corrections: list[float]
    num_observed: int
    recent_all: list[float]
    histories: dict[str, dict[str, list[float]]]


def _train(rows: Floats, lengths: Floats, words: Sequence[bytes], seed: int) -> Fitted:
    """Fit the regression, and trees for each quantile. On one core: the other cores are the engine's."""
    import numpy as np

    linear, estimates = fitted(rows, lengths, words, seed)
    lacking = np.quantile(lengths - estimates, QUANTILES)
    trees = _trees(np.column_stack([rows, estimates]), lengths, seed)
    shares = tuple((few / (few + len(rows))) ** 2 for few in FEW)
    return Fitted(linear, tuple(map(float, lacking)), trees, shares)


def _trees(rows: Floats, lengths: Floats, seed: int) -> tuple[Trees, ...]:
    from sklearn.ensemble import GradientBoostingRegressor  # type: ignore[import-untyped]

    found = []
    for quantile in QUANTILES:
        model = GradientBoostingRegressor(
            loss="quantile",
            alpha=quantile,
            n_estimators=NUM_TREES,
            learning_rate=SHRINKAGE,
            subsample=SUBSAMPLE,
            max_depth=None,
            max_leaf_nodes=MAX_LEAVES,
            min_samples_leaf=min(MIN_LEAF, max(len(rows) // 20, 1)),
            random_state=seed,
        ).fit(rows, lengths)
        trees = tuple(_copied(stage[0].tree_) for stage in model.estimators_)
        found.append(Trees(float(model.init_.constant_.ravel()[0]), trees))
    return tuple(found)


def _copied(tree: Any, at: int = 0) -> Split | float:
    """Copy a tree of scikit-learn's from node `at` on. Its leaves have children −1."""
    low, high = int(tree.children_left[at]), int(tree.children_right[at])
    if low < 0:
        return SHRINKAGE * float(tree.value[at].item())
    return Split(int(tree.feature[at]), float(tree.threshold[at]), _copied(tree, low), _copied(tree, high))
