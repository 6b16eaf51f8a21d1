"""A node's knowledge of answer lengths: it outlives rebuilds of the engine and, through a file, restarts of the process.

The file holds numbers and names: lengths, hints, and the sessions, adapters and tenants that they belong to. No text, no token.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from pathlib import Path

from engine_bridge.predict.custom_predictor import CustomPredictor, PredictorContext, load_predictor
from engine_bridge.predict.hints import HINTS
from engine_bridge.predict.length import OnlineLengths, told
from engine_bridge.protocol.engine_request import EngineRequest, LengthGuess
from kvtiers.closing import going_on

log = logging.getLogger(__name__)

PREFIX, SUFFIX = "lengths-", ".msgpack"
# Models whose lengths are kept, those used last. Chosen: some MB each.
MAX_FILES = 8
# Files that decide how a model answers, besides its weights, of which names and sizes will do: reading them takes minutes.
READ_FILES = (
    "config.json",
    "params.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
)
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")


class NodeLengths:
    """A `LengthPredictor`: ours, kept on disk, and in front of it a user's own if one is set.

    `predict` and `observe` run on the engine's thread, `refit` and `close` on any other thread.

    Args:
        path: the file; None: nothing is kept.
        own: a user's predictor. The caller that submits a request asks it ahead.
    """

    def __init__(self, path: Path | None = None, own: CustomPredictor | None = None) -> None:
        self._path = path
        self._ours = OnlineLengths(num_hints=len(HINTS))
        if path is not None:
            self._ours.load(path)
        self._own = own
        # One refit and one write at a time: an engine that is rebuilt may leave a refit behind that is still under way.
        self._lock = threading.Lock()
        self._num_saved = self._ours.num_observed
        self._has_failed = False

    @classmethod
    def open(cls, folder: Path | None, model: str, own_name: str | None = None) -> NodeLengths:
        """Load the lengths of this model's answers. Reads files: not for the event loop. Raises PredictorRefused."""
        own = None
        if own_name is not None:
            own = CustomPredictor(
                load_predictor(own_name, PredictorContext(model=model, folder=folder)), own_name
            )
        if folder is None:
            return cls(None, own)
        path = folder / f"{PREFIX}{fingerprint(model)}{SUFFIX}"
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

    def predict(self, features: EngineRequest) -> LengthGuess:
        """Predict by our own predictor, and by what the client expects."""
        return told(self._ours.predict(features), features.expected_tokens, features.max_tokens)

    def observe(self, features: EngineRequest, num_tokens: int) -> None:
        """Let both predictors learn from an answer that has ended."""
        self._ours.observe(features, num_tokens)
        if self._own is not None:
            self._own.observe(features, num_tokens)

    def refit(self) -> None:
        """Train on the observed answers, and write the result to disk."""
        with self._lock:
            self._ours.refit()
            self._save()
        if self._own is not None:
            self._own.refit()

    def close(self) -> None:
        """Write the learned lengths to disk. Call nothing else afterwards."""
        with self._lock, going_on("learned answer lengths"):
            self._save()
        if self._own is not None:
            self._own.close()

    def _save(self) -> None:
        """Write to disk. A disk that is full or missing stops nothing: it is logged once, and tried again after the next refit."""
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
    """Return 16 hex digits that tell models apart, and the tokenizers by which their answers are counted.

    model: a folder, told by its content, so that moving it changes nothing; or a name on a hub, whose revisions count as one model.
    """
    digest = hashlib.sha256()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        digest.update(model.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue  # reading a pipe would wait for its writer
        if path.name in READ_FILES:
            content = path.read_bytes()
            digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
        elif path.suffix in WEIGHTS:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()[:16]


def tidy(folder: Path, used: Path) -> None:
    """Delete the files of models served longest ago, half-written files of killed processes, and files of the format before this one."""
    try:
        files = sorted(folder.glob(f"{PREFIX}*{SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
        old = [path for path in files if path != used][MAX_FILES - 1 :]
        for path in [*old, *folder.glob(f"{PREFIX}*.tmp"), *folder.glob(f"{PREFIX}*.npz")]:
            path.unlink(missing_ok=True)
        if used.exists():
            used.touch()
    except OSError as error:  # a folder that is full of old files is no reason not to start
        log.warning("old files of answer lengths could not be dropped: %s", error)
