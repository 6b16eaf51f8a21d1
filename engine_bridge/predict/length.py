"""How long an answer will be: quantiles, learned from the answers so far. Predicting takes microseconds, refitting is for another thread.

Before enough answers are known, and for whatever the model does not know, recent lengths of the session, the adapter, the tenant or of everybody
answer. Then boosted trees for each quantile do, compiled to plain lists. What they still get wrong in one direction is corrected by each answer,
so that the share of answers under p90 stays near 90% when traffic changes.

Source: Chameleon §4.2 and SSJF (Qiu et al., 2024), which have a fine-tuned BERT for this. Ours takes numbers only (of text those of
`hints.py`), bounded memory, no GPU. A BERT is welcome (`own.py`). Correction: Gibbs & Candès, Adaptive Conformal Inference, 2021.
"""

from __future__ import annotations

import io
import logging
import math
import os
import threading
import zipfile
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from engine_bridge.predict.words import NUM_PLACES, Words
from engine_bridge.protocol.request_context import NOBODY, RequestContext
from kvtiers.io.files import read_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

log = logging.getLogger(__name__)

P50, P90 = 0.5, 0.9
QUANTILES = (P50, P90)
# Of any machine, until something was seen: the median and 90th percentile of Azure's conversations (Patel et al., 2024), rounded.
PRIOR_P50, PRIOR_P90 = 128, 512
MAX_TOKENS = 1 << 20
# Answers that the model is trained on, the latest. Measured on Azure's conversations: twice as many lose 1% less, half as many 1 to 3% more.
WINDOW = 8192
MIN_FIT = 256  # fewer do not support a 90th percentile in eight leaves. Chosen
# Recent lengths kept for each key, and for everybody. Chosen.
MAX_RECENT_SESSION, MAX_RECENT, MAX_RECENT_ALL = 8, 32, 512
MAX_KEYS = 4096  # of each kind; 0.5 KB for a session, 1.5 KB for an adapter or a tenant at most. Chosen
# From so many of its own answers on a key answers for itself. Chosen: a session's are alike sooner than an adapter's.
MIN_SESSION, MIN_KEY = 3, 8
# Whose recent lengths are kept, the narrowest first: how many for each key, and from how many on a key answers for itself.
HISTORIES = {
    "session": (MAX_RECENT_SESSION, MIN_SESSION),
    "template": (MAX_RECENT, MIN_KEY),
    "system": (MAX_RECENT, MIN_KEY),
    "adapter": (MAX_RECENT, MIN_KEY),
    "tenant": (MAX_RECENT, MIN_KEY),
}
# Boosting. Measured on Azure's conversations: less pinball loss than histogram boosting, forests and single trees with quantiles in their leaves.
NUM_TREES, MAX_LEAVES, MIN_LEAF, SHRINKAGE, SUBSAMPLE = 40, 8, 40, 0.1, 0.5
# Of a natural logarithm, for each answer. Chosen: lengths that double are followed within 140 answers; where nothing changes it loses 0.4% (Azure's).
CORRECTION_RATE = 0.01
MAX_CORRECTION = 1.5
NUM_OWN_FEATURES = 16
# Rows that are turned into an array at a time. Chosen: a millisecond.
PIECE = 512
# Of a saved file, unpacked. Chosen: ten times what a full one takes.
MAX_FILE_BYTES = 128 << 20
FORMAT = 2


class LengthFeatures(Struct, frozen=True, kw_only=True):
    """What is known of a request before it runs.

    num_prompt_tokens: all of it, cached or not. context: who asks. max_tokens: the client's bound. hints: numbers, always as many and in one order:
    those of `hints.py`, or a proxy model's guess. prompt_token_ids, question: for users' own predictors; ours neither reads nor keeps them.
    """

    num_prompt_tokens: int
    context: RequestContext = NOBODY
    max_tokens: int | None = None
    hints: tuple[float, ...] = ()
    prompt_token_ids: Sequence[int] | None = None

    @property
    def adapter(self) -> str:
        """ "" for the base model."""
        return self.context.adapter

    @property
    def tenant(self) -> str:
        return self.context.tenant

    @property
    def session(self) -> str:
        """ "" for none. Tenants name their sessions themselves: one may not learn of another's lengths by taking its name."""
        tenant, session_id = self.context.tenant, self.context.session_id
        return f"{tenant}/{session_id}" if tenant and session_id else session_id

    @property
    def system(self) -> str:
        """The tenant's system prompt, "" for none. As with sessions, no tenant learns of another's."""
        asked = self.context.asked
        return f"{self.tenant}/{asked.system}" if asked.system else ""

    @property
    def template(self) -> str:
        """How the tenant's question begins, under this system prompt; "" for none."""
        asked = self.context.asked
        return f"{self.tenant}/{asked.template}" if asked.template else ""

    @property
    def question(self) -> str:
        """The last message's text, 2,048 characters of it."""
        return self.context.asked.question


class LengthGuess(Struct, frozen=True):
    """Tokens of the answer: half are no longer than p50, nine of ten no longer than p90. source: what it rests on."""

    p50: int
    p90: int
    source: str

    def bound(self, num_done: int) -> int:
        """Tokens to reckon with once `num_done` are there: p50, then p90, then twice as many as there are."""
        if num_done < self.p50:
            return self.p50
        return self.p90 if num_done < self.p90 else 2 * num_done


class LengthPredictor(Protocol):
    """Ours, or a user's own. `predict` and `observe` are called on one thread: ours on the engine's, a user's on one of its own (`own.py`)."""

    def predict(self, features: LengthFeatures) -> LengthGuess:
        """Before the request is queued; fast, and better never raises."""
        ...

    def observe(self, features: LengthFeatures, num_tokens: int) -> None:
        """It has ended by itself or by its bound. Not for answers that the client cut off: how long they would have been nobody knows."""
        ...

    def refit(self) -> None:
        """Learn from what was observed: seconds, on a thread of the caller's, one at a time."""
        ...


class OnlineLengths:
    """The predictor. `predict` and `observe` on one thread; `refit` and `save` on any, each one at a time.

    Memory: 8 MB for a full window with the hints of `hints.py`, 14 MB for as many keys of each kind as there may be, two times 40 trees.

    Args:
        window: answers to train on.
        num_hints: length of each request's `hints`; more are ignored, missing ones count as 0.
    """

    def __init__(
        self, *, window: int = WINDOW, num_hints: int = 0, max_keys: int = MAX_KEYS, seed: int = 0
    ) -> None:
        if window < 1 or num_hints < 0 or max_keys < 1:
            raise ValueError("a predictor needs room for answers and keys")
        self._num_hints = num_hints
        self._rows: deque[tuple[float, ...]] = deque(maxlen=window)  # features, then the length's logarithm
        self._histories = {name: Keyed(max_keys, most) for name, (most, _) in HISTORIES.items()}
        self._words = Words(_log(PRIOR_P50))
        self._all = Recent(MAX_RECENT_ALL)
        self._model: Compiled | None = None
        self._corrections = [0.0, 0.0]
        self._seed = seed
        self._lock = threading.Lock()  # for the rows alone: refit copies them
        self.num_observed = 0
        self.num_refits = 0

    def __len__(self) -> int:
        """Answers in the window."""
        return len(self._rows)

    # -- on the engine's thread ----------------------------------------------------------------------------------------

    def predict(self, features: LengthFeatures) -> LengthGuess:
        model = self._model
        if model is None:
            return self._by_recent(features)
        low, high = model.logs(self._row(features))
        return _guess(low + self._corrections[0], high + self._corrections[1], "model", features.max_tokens)

    def observe(self, features: LengthFeatures, num_tokens: int) -> None:
        """Negative lengths and those beyond any context are ignored."""
        if not 0 <= num_tokens <= MAX_TOKENS:
            return
        row, length = self._row(features), _log(num_tokens)
        if self._model is not None:
            self._correct(self._model.logs(row), length)
        with self._lock:
            self._rows.append((*row, length))
        self._all.add(length)
        self._words.learn(features.context.asked.words, length)
        for name, keyed in self._histories.items():
            keyed.add(getattr(features, name), length)
        self.num_observed += 1

    def _correct(self, predicted: tuple[float, float], length: float) -> None:
        """Each quantile goes up a step by its share when the answer was longer, else down by the rest: in balance at its own coverage."""
        for at, quantile in enumerate(QUANTILES):
            is_longer = length > predicted[at] + self._corrections[at]
            moved = self._corrections[at] + CORRECTION_RATE * (is_longer - (1 - quantile))
            self._corrections[at] = max(min(moved, MAX_CORRECTION), -MAX_CORRECTION)

    def _recent(self, name: str, features: LengthFeatures) -> Recent | None:
        return self._histories[name].get(getattr(features, name))

    def _by_recent(self, features: LengthFeatures) -> LengthGuess:
        """By the narrowest history that is long enough."""
        for source, (_, least) in HISTORIES.items():
            recent = self._recent(source, features)
            if recent is not None and len(recent) >= least:
                return _guess(recent.quantile(P50), recent.quantile(P90), source, features.max_tokens)
        if len(self._all) >= MIN_KEY:
            return _guess(self._all.quantile(P50), self._all.quantile(P90), "all", features.max_tokens)
        return _guess(_log(PRIOR_P50), _log(PRIOR_P90), "prior", features.max_tokens)

    def _row(self, features: LengthFeatures) -> tuple[float, ...]:
        """What the model reads. What is not known of a template is its system prompt's, of that and of a session the adapter's, and of an adapter
        or a tenant everybody's."""
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
            self._words.predict(features.context.asked.words),
            *adapter,
            *_quantiles(self._recent("tenant", features), usual),
            *system,
            *template,
            *usual,
        )
        # Anything that is no number would spoil the training.
        hints = tuple(hint if math.isfinite(hint) else 0.0 for hint in features.hints[: self._num_hints])
        return own + hints + (0.0,) * (self._num_hints - len(hints))

    # -- on a worker's -------------------------------------------------------------------------------------------------

    def refit(self) -> None:
        """Train on the window and put the new model in place; the old one, or none, stays while answers are fewer than MIN_FIT. 1 s for 8,192."""
        with self._lock:
            rows = list(self._rows)
        if len(rows) < MIN_FIT:
            return
        table = _table(rows, self._num_features + 1)
        self._model = _train(table[:, :-1], table[:, -1], self._seed + self.num_refits)
        self.num_refits += 1

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Put everything into one file (npz, without pickle), whole or not at all. Raises OSError."""
        import numpy as np

        with self._lock:
            rows = list(self._rows)
        histories: dict[str, Any] = {f"{name}s": keyed.saved() for name, keyed in self._histories.items()}
        meta = _Saved(
            format=FORMAT,
            num_hints=self._num_hints,
            corrections=(self._corrections[0], self._corrections[1]),
            num_observed=self.num_observed,
            recent_all=tuple(self._all.in_order()),
            **histories,
            words_mean=self._words.mean,
            words_learned=self._words.num_learned,
        )
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {
            "meta": np.frombuffer(msgspec.json.encode(meta), dtype=np.uint8),
            "rows": _table(rows, self._num_features + 1),
            "words": np.array([self._words.weights, self._words.squares]),
        }
        if self._model is not None:
            arrays |= self._model.arrays()
        np.savez(buffer, **arrays)
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        # Readable by its owner only: which sessions and tenants there are is nobody else's business.
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    @property
    def _num_features(self) -> int:
        return NUM_OWN_FEATURES + self._num_hints

    @classmethod
    def load(
        cls, path: Path, *, window: int = WINDOW, num_hints: int = 0, max_keys: int = MAX_KEYS, seed: int = 0
    ) -> OnlineLengths:
        """What `save` wrote; a new one where there is no file, or one that is damaged or of another form: it is put aside, and that is logged."""
        made = cls(window=window, num_hints=num_hints, max_keys=max_keys, seed=seed)
        try:
            made._restore(read_regular(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s cannot be read: %s; learning answer lengths anew", path, error.strerror)
        except Exception as error:  # a file's bytes may be anything, and so may be what reading them raises
            log.warning("%s: %s; it is put aside, learning answer lengths anew", path, error or repr(error))
            _put_aside(path)
            return cls(window=window, num_hints=num_hints, max_keys=max_keys, seed=seed)
        return made

    def _restore(self, data: bytes) -> None:
        import numpy as np

        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            if sum(entry.file_size for entry in packed.infolist()) > MAX_FILE_BYTES:
                raise ValueError("it is too large to be one of these files")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = msgspec.json.decode(arrays.pop("meta").tobytes(), type=_Saved)
        rows, words = arrays.pop("rows"), arrays.pop("words")
        if (meta.format, meta.num_hints) != (FORMAT, self._num_hints):
            raise ValueError("saved by another version, or for other hints")
        if rows.ndim != 2 or rows.shape[1] != self._num_features + 1 or not np.isfinite(rows).all():
            raise ValueError("answers in it are damaged")
        is_whole = words.shape == (2, NUM_PLACES) and np.isfinite([*words.ravel(), meta.words_mean]).all()
        if not is_whole or words[1].min() < 1:
            raise ValueError("words in it are damaged")
        self._rows.extend(tuple(row) for row in rows.tolist())
        self._words.weights, self._words.squares = words.tolist()
        self._words.mean, self._words.num_learned = meta.words_mean, max(meta.words_learned, 0)
        self._model = Compiled.of(arrays, self._num_features) if arrays else None
        self._corrections = [max(min(c, MAX_CORRECTION), -MAX_CORRECTION) for c in meta.corrections]
        self.num_observed = meta.num_observed
        for length in meta.recent_all:
            self._all.add(length)
        for name, keyed in self._histories.items():
            for key, lengths in getattr(meta, f"{name}s").items():
                for length in lengths:
                    keyed.add(key, length)


class _Saved(Struct, frozen=True, kw_only=True):
    """Lengths as logarithms, oldest first."""

    format: int
    num_hints: int
    corrections: tuple[float, float]
    num_observed: int
    recent_all: tuple[float, ...]
    sessions: dict[str, tuple[float, ...]]
    adapters: dict[str, tuple[float, ...]]
    tenants: dict[str, tuple[float, ...]]
    systems: dict[str, tuple[float, ...]]
    templates: dict[str, tuple[float, ...]]
    words_mean: float
    words_learned: int


def _table(rows: list[tuple[float, ...]], width: int) -> Floats:
    """Rows as an array, piece by piece: all at once would hold the interpreter, and with it the engine's thread, for 20 ms."""
    import numpy as np

    pieces = [np.array(rows[at : at + PIECE], dtype=np.float64) for at in range(0, len(rows), PIECE)]
    return np.concatenate([piece.reshape(-1, width) for piece in pieces]) if pieces else np.empty((0, width))


def _put_aside(path: Path) -> None:
    """Keep it for whoever wants to know what happened, in the place of the one before."""
    try:
        path.replace(path.with_name(f"{path.name}.damaged"))
    except OSError as error:
        log.warning("%s could not be put aside: %s", path, error)


def _log(num_tokens: int) -> float:
    return math.log1p(max(num_tokens, 0))


def _guess(low: float, high: float, source: str, max_tokens: int | None) -> LengthGuess:
    """From logarithms; p90 at least p50, both at least 1 and within the client's bound."""
    most = min(max_tokens or MAX_TOKENS, MAX_TOKENS)
    p50 = min(max(round(math.expm1(min(low, 14.0))), 1), most)
    p90 = min(max(round(math.expm1(min(high, 14.0))), p50), most)
    return LengthGuess(p50, p90, source)


# -- recent lengths ----------------------------------------------------------------------------------------------------


class Recent:
    """The last so many numbers, in order of time and of size."""

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
        """Oldest first."""
        return list(self._by_time)

    def add(self, value: float) -> None:
        if len(self._by_time) == self._most:
            del self._by_size[bisect_left(self._by_size, self._by_time.pop(0))]
        self._by_time.append(value)
        insort(self._by_size, value)

    def quantile(self, share: float) -> float:
        """What the next one exceeds with a probability of 1 − share at most, as far as so few can tell. There must be one."""
        num = len(self._by_size)
        return self._by_size[min(math.ceil((num + 1) * share), num) - 1]


class Keyed:
    """Recent lengths of each key. Bounded: the key that was not added to the longest is forgotten. The empty key is nobody's."""

    def __init__(self, max_keys: int, max_recent: int) -> None:
        self._max_keys = max_keys
        self._max_recent = max_recent
        self._recent: dict[str, Recent] = {}  # the longest not added to first

    def __len__(self) -> int:
        return len(self._recent)

    def get(self, key: str) -> Recent | None:
        return self._recent.get(key)

    def add(self, key: str, value: float) -> None:
        if not key:
            return
        recent = self._recent.pop(key, None) or Recent(self._max_recent)
        if len(self._recent) >= self._max_keys:
            del self._recent[next(iter(self._recent))]
        recent.add(value)
        self._recent[key] = recent

    def saved(self) -> dict[str, tuple[float, ...]]:
        """The recent values of each key, oldest first, to be kept over a restart."""
        # Copied first, in one step of the interpreter: the engine's thread may be adding.
        return {key: tuple(recent.in_order()) for key, recent in list(self._recent.items())}


def _quantiles(recent: Recent | None, otherwise: tuple[float, float]) -> tuple[float, float]:
    """p50 and p90 of a history that is not empty."""
    return (recent.quantile(P50), recent.quantile(P90)) if recent else otherwise


# -- the model ---------------------------------------------------------------------------------------------------------


class Compiled:
    """Boosted trees for both quantiles as plain lists: scikit-learn's own `predict` takes a millisecond for one row, this some 20 µs.

    All trees lie one after the other, the first quantile's first. feature: −1 in a leaf. left, right: positions, always behind the node's own.
    value: already shrunk. roots: where each tree begins; num_first: of the first quantile. base: what each quantile's sum begins with.
    """

    def __init__(
        self,
        feature: Sequence[int],
        threshold: Sequence[float],
        left: Sequence[int],
        right: Sequence[int],
        value: Sequence[float],
        roots: Sequence[int],
        num_first: int,
        base: tuple[float, float],
    ) -> None:
        # A leaf's split is never looked at, so one tuple holds what a node needs.
        self._nodes = list(zip(feature, threshold, left, right, strict=True))
        self._value = list(value)
        self._roots = (list(roots[:num_first]), list(roots[num_first:]))
        self._base = base

    def logs(self, row: Sequence[float]) -> tuple[float, float]:
        """Both quantiles' logarithms, uncorrected."""
        nodes, value = self._nodes, self._value
        sums = [0.0, 0.0]
        for which, roots in enumerate(self._roots):
            total = self._base[which]
            for at in roots:
                feature, threshold, left, right = nodes[at]
                while feature >= 0:
                    at = left if row[feature] <= threshold else right
                    feature, threshold, left, right = nodes[at]
                total += value[at]
            sums[which] = total
        return sums[0], sums[1]

    def arrays(self) -> dict[str, Any]:
        """To be saved; `of` takes them."""
        import numpy as np

        feature, threshold, left, right = zip(*self._nodes, strict=True)
        return {
            "links": np.array([feature, left, right], dtype=np.int64),
            "numbers": np.array([threshold, self._value], dtype=np.float64),
            "roots": np.array(self._roots[0] + self._roots[1], dtype=np.int64),
            "shape": np.array([len(self._roots[0])], dtype=np.int64),
            "base": np.array(self._base, dtype=np.float64),
        }

    @classmethod
    def of(cls, arrays: dict[str, Any], num_features: int) -> Compiled:
        """Raises ValueError, TypeError or KeyError for anything that `logs` would stumble over or never leave."""
        feature, left, right = (row.tolist() for row in arrays["links"])
        threshold, value = (row.tolist() for row in arrays["numbers"])
        roots, base = arrays["roots"].tolist(), arrays["base"].tolist()
        (num_first,) = arrays["shape"].tolist()
        num = len(feature)
        for at in range(num):
            is_leaf = feature[at] == -1
            is_split = 0 <= feature[at] < num_features and at < left[at] < num and at < right[at] < num
            if not (is_leaf or is_split):
                raise ValueError("a tree in it is damaged")
        whole = len(base) == 2 and all(map(math.isfinite, [*threshold, *value, *base]))
        if not whole or not 0 <= num_first <= len(roots) or not all(0 <= root < num for root in roots):
            raise ValueError("a tree in it is damaged")
        return cls(feature, threshold, left, right, value, roots, num_first, (base[0], base[1]))


def _train(rows: Floats, lengths: Floats, seed: int) -> Compiled:
    """Fit both quantiles. On one core: the other ones are the engine's."""
    from sklearn.ensemble import GradientBoostingRegressor  # type: ignore[import-untyped]

    trees: list[Any] = []
    base = []
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
        trees += [stage[0].tree_ for stage in model.estimators_]
        base.append(float(model.init_.constant_.ravel()[0]))
    return _compile(trees, (base[0], base[1]))


def _compile(trees: Sequence[Any], base: tuple[float, float]) -> Compiled:
    """scikit-learn's trees, one behind the other. Its leaves have children −1."""
    feature: list[int] = []
    threshold: list[float] = []
    left: list[int] = []
    right: list[int] = []
    value: list[float] = []
    roots = []
    for tree in trees:
        start = len(feature)
        roots.append(start)
        is_leaf = tree.children_left < 0
        feature += [-1 if leaf else int(f) for leaf, f in zip(is_leaf, tree.feature, strict=True)]
        threshold += [0.0 if leaf else float(t) for leaf, t in zip(is_leaf, tree.threshold, strict=True)]
        left += [start + int(child) for child in tree.children_left]
        right += [start + int(child) for child in tree.children_right]
        value += [SHRINKAGE * float(v) for v in tree.value.ravel()]
    return Compiled(feature, threshold, left, right, value, roots, len(trees) // len(QUANTILES), base)
