"""What a node knows of answer lengths, for as long as the node lives: over rebuilds of its engine, and through a file over restarts.

The file holds numbers and names: lengths, hints, and which session, adapter and tenant they were of. No text, no token.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from concurrent.futures import Future
from pathlib import Path

from engine_bridge.predict.custom_predictor import CustomPredictor, PredictorContext, load_predictor
from engine_bridge.predict.hints import HINTS
from engine_bridge.predict.length import LengthFeatures, LengthGuess, OnlineLengths
from kvtiers.closing import going_on

log = logging.getLogger(__name__)

PREFIX = "lengths-"
# Models whose lengths are kept, the latest used. Chosen: some MB each.
MAX_FILES = 8
# What makes a model answer as it does, besides its weights, of which names and sizes will do: reading them takes minutes.
READ_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
)
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")


class NodeLengths:
    """A `LengthPredictor`: ours, kept on disk, and in front of it a user's own where there is one.

    `predict` and `observe` on the engine's thread, `ask` on the event loop, `refit`, `save` and `close` on any but these.

    Args:
        path: where it is kept; None: nowhere.
        own: a user's predictor, asked ahead by whoever submits a request.
    """

    def __init__(self, path: Path | None = None, own: CustomPredictor | None = None) -> None:
        self._path = path
        self._ours = (
            OnlineLengths.load(path, num_hints=len(HINTS)) if path else OnlineLengths(num_hints=len(HINTS))
        )
        self._own = own
        # One refit and one write at a time: an engine that is rebuilt may leave a refit behind that is still under way.
        self._lock = threading.Lock()
        self._num_saved = self._ours.num_observed
        self._has_failed = False

    @classmethod
    def open(cls, folder: Path | None, model: str, own_name: str | None = None) -> NodeLengths:
        """What was learned of this model. Reads files: not for the event loop. Raises PredictorRefused."""
        own = None
        if own_name is not None:
            own = CustomPredictor(
                load_predictor(own_name, PredictorContext(model=model, folder=folder)), own_name
            )
        if folder is None:
            return cls(None, own)
        path = folder / f"{PREFIX}{fingerprint(model)}.npz"
        tidy(folder, path)
        return cls(path, own)

    @property
    def num_observed(self) -> int:
        """Answers learned from so far, those before a restart included."""
        return self._ours.num_observed

    @property
    def own(self) -> CustomPredictor | None:
        """The operator's own predictor, if one is set."""
        return self._own

    def ask(self, features: LengthFeatures) -> Future[LengthGuess] | None:
        """What the user's own predictor will say; None where nobody is asked."""
        return self._own.ask(features) if self._own is not None else None

    def predict(self, features: LengthFeatures) -> LengthGuess:
        return self._ours.predict(features)

    def observe(self, features: LengthFeatures, num_tokens: int) -> None:
        self._ours.observe(features, num_tokens)
        if self._own is not None:
            self._own.observe(features, num_tokens)

    def refit(self) -> None:
        """Learn, and keep what was learned."""
        with self._lock:
            self._ours.refit()
            self._save()
        if self._own is not None:
            self._own.refit()

    def close(self) -> None:
        """Keep what was learned. Nothing is to be observed any more."""
        with self._lock, going_on("learned answer lengths"):
            self._save()
        if self._own is not None:
            self._own.close()

    def figures(self) -> dict[str, int]:
        """For people and dashboards: answers learned from, and what became of a user's own predictor (`own_…`). From any thread."""
        counts = self._own.counts if self._own is not None else {}
        return {"observed": self.num_observed, "refits": self._ours.num_refits} | {
            f"own_{what}": num for what, num in counts.items()
        }

    def _save(self) -> None:
        """A disk that is full or gone must not stop anything: it is logged once, and tried again after the next refit."""
        num_observed = self._ours.num_observed
        if self._path is None or num_observed == self._num_saved:
            return
        try:
            self._ours.save(self._path)
        except OSError as error:
            if not self._has_failed:
                log.warning("%s: learned answer lengths could not be stored: %s", self._path, error)
            self._has_failed = True
        else:
            self._num_saved, self._has_failed = num_observed, False


def fingerprint(model: str) -> str:
    """Tells models apart, and the tokenizers by which their answers are counted: 16 hex digits.

    model: a folder, by what is in it, so that moving it changes nothing; or a name on a hub, whose revisions count as one model.
    """
    digest = hashlib.sha256()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        digest.update(model.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue  # reading a pipe would wait for whoever writes to it
        if path.name in READ_FILES:
            content = path.read_bytes()
            digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
        elif path.suffix in WEIGHTS:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()[:16]


def tidy(folder: Path, used: Path) -> None:
    """Drop files of models that were not served for the longest, and what a killed process left half-written."""
    try:
        files = sorted(folder.glob(f"{PREFIX}*.npz"), key=lambda path: path.stat().st_mtime, reverse=True)
        old = [path for path in files if path != used][MAX_FILES - 1 :]
        for path in [*old, *folder.glob(f"{PREFIX}*.tmp")]:
            path.unlink(missing_ok=True)
        if used.exists():
            used.touch()
    except OSError as error:  # a folder that is full of old files is no reason not to start
        log.warning("old files of answer lengths could not be dropped: %s", error)
