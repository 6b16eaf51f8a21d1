"""One PEFT LoRA adapter on disk: checked against the model before the engine sees it, then read whole into the caller's memory.

vLLM meets most faults of an adapter inside the engine's step, where one wedges the engine, or not at all: a layer too many is dropped, a
matrix too narrow is used in part, and a NaN spreads through the KV cache to other users. So every fault that shows in the files is
found here. The steps are `inspect` (headers only, a millisecond), `read`, `check_finite` and `content_hash`; all run in a worker thread.

The weights are copied out of the file, never mapped: a file overwritten in place would change the weights under the engine.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from xxhash import xxh3_64

from engine_bridge.adapters.config import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    CheckConfig,
    bad_config,
    check_config,
    parse_config,
    plain_scales,
    ranks_of,
)
from engine_bridge.adapters.errors import AdapterRejected, quoted
from engine_bridge.adapters.header import ITEM_BYTES, WEIGHTS_FILE, Header, TensorSpan, corrupt, read_header

PICKLE_FILES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
# Chosen: reads at full speed, and a chunk is still in the processor's cache when it is summed.
CHUNK_BYTES: Final = 1 << 20
# Chosen: half a megabyte of BF16 and its scratch copy stay in the processor's cache.
CHUNK_ITEMS: Final = 1 << 18
# A header's bytes for one tensor beyond its module's name, and for its metadata; chosen, far above PEFT's (100 bytes).
ENTRY_BYTES: Final = 512
METADATA_BYTES: Final = 1 << 20

_FOLDER: Final = "folder"
PEFT_PREFIX: Final = "base_model.model."
_PEFT_SUFFIXES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
# Weights of the base model that PEFT saves beside an adapter of these layers. The model has them. Source: vLLM 0.32, `lora/utils.py`, which
# passes over them, too.
_BASE_SUFFIXES = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


@dataclass(frozen=True, slots=True)
class ModelContract:
    """The model's side: the modules, ranks and types that an adapter must fit.

    Attributes:
        modules: full name of each module that takes an adapter -> (in features, out features); for an embedding (vocabulary, hidden).
        max_rank: the largest rank that the engine has room for.
        base_models: names and paths under which adapters may know the model.
        module_of: name of a tensor -> (name of its module, whether it is lora_A). Raises ValueError for any other tensor.
        check_config: options of a configuration that the engine does not support, as phrases; empty if it is fine. May raise ValueError, TypeError.
        embedding_modules: those of `modules` that are embeddings, whose lora_A is [rank, vocabulary].
        parts_of: modules of the engine's model that take no adapter under their own name -> the last names of their parts, which do.
        unused_modules: those of `modules` whose adapters the engine takes and does not apply.
        unadapted: beginnings of the names of further modules of which that holds, such as those that read pictures.
        dtype: the type that the engine computes adapters in, `F32`, `F16` or `BF16`: weights are converted to it.
        scales: makes of a configuration: name of a module as in the checkpoint -> factor by which the engine multiplies its lora_B. May raise
            ValueError, TypeError.
    """

    modules: Mapping[str, tuple[int, int]]
    max_rank: int
    base_models: tuple[str, ...]
    module_of: Callable[[str], tuple[str, bool]]
    check_config: Callable[[dict[str, Any]], tuple[str, ...]]
    embedding_modules: frozenset[str] = frozenset()
    parts_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unused_modules: frozenset[str] = frozenset()
    unadapted: tuple[str, ...] = ()
    dtype: str = "F32"
    scales: Callable[[dict[str, Any]], Callable[[str], float]] = plain_scales

    @property
    def max_header_bytes(self) -> int:
        """A bound on the header of any adapter for this model, in bytes."""
        names_bytes = sum(len(name) for name in self.modules)
        return METADATA_BYTES + 2 * (names_bytes + ENTRY_BYTES * len(self.modules))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One half of a module's adapter.

    Attributes:
        name, module, is_a: as in the file; the model's module; whether it is lora_A.
        dtype: `F32`, `F16` or `BF16`.
        shape: [rank, in] for lora_A, [out, rank] for lora_B; the first two dimensions of weights that are not applied and have more.
        offset, num_bytes: its place in the file.
        begin: its place in the buffer that `read` fills, which may be no multiple of the item's size.
    """

    name: str
    module: str
    is_a: bool
    dtype: str
    shape: tuple[int, int]
    offset: int
    num_bytes: int
    begin: int


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter whose configuration and header are sound and fit the model. Its weights have not been read yet.

    Attributes:
        config: adapter_config.json. The scaling options (lora_alpha, alpha_pattern, use_rslora) stay there.
        rank: the largest rank of its modules.
        tensors: in the order of their bytes.
        num_bytes: size of all tensors, and so of the buffer that `read` fills, where they lie one behind the other.
        held_bytes: size of the same tensors once they are loaded, in the type that the engine computes in.
        target_modules: the last parts of its modules' names, sorted.
        base_model: the model that it was trained on, as its configuration names it.
        signature: changes when one of the two files does (size, time of change, inode); good for one machine.
        notes: oddities that are no errors, as sentences; unapplied: those that change answers.
        head_digest: SHA-256 over the canonical configuration and the header.
    """

    path: Path
    config: dict[str, Any]
    rank: int
    tensors: tuple[TensorInfo, ...]
    num_bytes: int
    held_bytes: int
    target_modules: tuple[str, ...]
    base_model: str | None
    signature: str
    notes: tuple[str, ...]
    unapplied: tuple[str, ...]
    head_digest: bytes = field(repr=False)


# --- looking at the files --------------------------------------------------------------------------------------------------------------


def inspect(path: Path | str, contract: ModelContract) -> AdapterFiles:
    """Check an adapter's folder against the model without reading its weights. Raises AdapterRejected, and nothing else, for any content."""
    folder = Path(path)
    with opened_adapter(folder, contract.max_rank, contract.check_config, contract.max_header_bytes) as (
        found,
        _,
    ):
        config, header = found.config, found.header
    tensors = tuple(_tensors(header, contract))
    rank = _check_tensors(tensors, config, contract)
    _check_tying(tensors, config, contract)
    base_model = base_model_of(config)
    return AdapterFiles(
        path=folder,
        config=config,
        rank=rank,
        tensors=tensors,
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        held_bytes=sum(math.prod(tensor.shape) for tensor in tensors if tensor.module in contract.modules)
        * ITEM_BYTES[contract.dtype],
        target_modules=tuple(sorted({tensor.module.rpartition(".")[2] for tensor in tensors})),
        base_model=base_model,
        signature=found.signature,
        notes=_other_base_model(base_model, contract),
        unapplied=_unused(tensors, contract),
        head_digest=found.head_digest,
    )


class AdapterHead(NamedTuple):
    """An adapter's configuration and header, sound in themselves. sizes: of both files, in bytes, by name."""

    config: dict[str, Any]
    header: Header
    signature: str
    head_digest: bytes
    sizes: dict[str, int]


@contextmanager
def opened_adapter(
    folder: Path, max_rank: int, engine_check: CheckConfig, max_header_bytes: int
) -> Iterator[tuple[AdapterHead, FileIO]]:
    """Check an adapter's configuration and header, and hold its weights open, at the start of their data. Raises AdapterRejected."""
    _check_folder(folder)
    raw, config_stat = _read_config(folder)
    config, canonical = parse_config(raw)
    check_config(config, max_rank, engine_check)
    _check_format(folder)
    with opened(folder, WEIGHTS_FILE) as file:
        weights_stat = os.fstat(file.fileno())
        header = read_header(file, weights_stat.st_size, max_header_bytes)
        signature = signature_from(config_stat, weights_stat)
        # Each with its length in front, so that no end of one can pass for the start of the next.
        parts = (len(part).to_bytes(8, "little") + part for part in (canonical, header.raw))
        digest = hashlib.sha256(b"".join(parts)).digest()
        sizes = {CONFIG_FILE: len(raw), WEIGHTS_FILE: weights_stat.st_size}
        yield AdapterHead(config, header, signature, digest, sizes), file


def signature_of(folder: Path) -> str:
    """Return the signature that `inspect` would give, without a look at the content. Raises OSError if there is no adapter_config.json."""
    config_stat = os.stat(folder / CONFIG_FILE)
    try:
        return signature_from(config_stat, os.stat(folder / WEIGHTS_FILE))
    except OSError:
        return signature_from(config_stat, None)


def signature_from(*stats: os.stat_result | None) -> str:
    """Return a text that changes when one of these files does: size, time of change and inode of each, `-` where a file is missing.

    The inode's own time of change belongs to it, too: what copies a file over another can set back the file's, but not that.
    """
    return "/".join(f"{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}:{s.st_ino}" if s else "-" for s in stats)


def _check_folder(folder: Path) -> None:
    """Raise AdapterRejected unless `folder` is a readable folder whose name can be stored."""
    try:
        str(folder).encode()  # A name that is not UTF-8 can be neither stored nor shown.
        mode = os.stat(folder).st_mode
    except ValueError as error:  # or holds a NUL
        raise AdapterRejected(
            "The adapter's path is not a valid path in UTF-8.", code="adapter_not_found"
        ) from error
    except OSError as error:
        raise _system_error(_FOLDER, error) from error
    if not stat.S_ISDIR(mode):
        raise AdapterRejected(
            "The adapter's path is not a folder. Give the folder that PEFT's save_pretrained wrote.",
            code="adapter_not_found",
        )


def _read_config(folder: Path) -> tuple[bytes, os.stat_result]:
    """Read the configuration; returns its bytes, and its file's facts when it was opened. Raises AdapterRejected for a file that is too large."""
    with opened(folder, CONFIG_FILE) as file:
        config_stat = os.fstat(file.fileno())
        raw = bytearray()
        while len(raw) <= MAX_CONFIG_BYTES and (chunk := file.read(MAX_CONFIG_BYTES + 1 - len(raw))):
            raw += chunk
    if len(raw) > MAX_CONFIG_BYTES:
        raise bad_config(f"it is larger than {MAX_CONFIG_BYTES} bytes.")
    return bytes(raw), config_stat


def _check_format(folder: Path) -> None:
    """Raise AdapterRejected for a folder without safetensors weights; the message says how to convert a pickle."""
    if os.path.lexists(folder / WEIGHTS_FILE):
        return
    pickle = next((name for name in PICKLE_FILES if os.path.lexists(folder / name)), None)
    if pickle is None:
        raise AdapterRejected(f"The adapter's folder holds no {WEIGHTS_FILE}.", code="no_weights")
    raise AdapterRejected(
        f"The adapter's weights are a pickle ({pickle}), which is never loaded: it can run any code. Convert it where you trust it: load it "
        f"with PEFT and call save_pretrained, which writes {WEIGHTS_FILE}.",
        code="unsupported_format",
    )


@contextmanager
def opened(folder: Path, name: str) -> Iterator[FileIO]:
    """Open a file of the adapter for reading; errors of the system in the `with` block become AdapterRejected."""
    try:
        with FileIO(folder / name, opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise AdapterRejected(f"The adapter's {name} is not a regular file.", code="unreadable")
            yield file
    except OSError as error:
        raise _system_error(name, error) from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # It may be a pipe without a writer.


def _system_error(name: str, error: OSError) -> AdapterRejected:
    if error.errno not in _NOT_THERE:
        return AdapterRejected(
            f"The adapter's {name} cannot be read: {error.strerror or 'input/output error'}.",
            code="unreadable",
        )
    if name == WEIGHTS_FILE:
        return AdapterRejected(f"The adapter's {name} is a broken link, or just gone.", code="no_weights")
    text = (
        "There is no folder at the adapter's path."
        if name == _FOLDER
        else f"The adapter's folder holds no {name}."
    )
    return AdapterRejected(text, code="adapter_not_found")


def own_tensors(header: Header) -> Iterator[TensorSpan]:
    """Yield the tensors that are the adapter's and not its base model's, in the order of their bytes: these are read, hashed and kept."""
    return (entry for entry in header.entries if not entry.name.endswith(_BASE_SUFFIXES))


# --- the tensors against the model -----------------------------------------------------------------------------------------------------


def _tensors(header: Header, contract: ModelContract) -> Iterator[TensorInfo]:
    """Yield the adapter's own tensors, in the order of their bytes. Raises AdapterRejected, as `_tensor` does."""
    begin = 0
    for entry in own_tensors(header):
        yield _tensor(entry, header, begin, contract)
        begin += entry.end - entry.begin


def _tensor(entry: TensorSpan, header: Header, begin: int, contract: ModelContract) -> TensorInfo:
    """Make an entry of the header half of a module's adapter. Raises AdapterRejected (`unexpected_tensor`, `unknown_module`, `wrong_shape`)."""
    try:
        module, is_a = contract.module_of(entry.name)
    except ValueError as error:
        raise AdapterRejected(
            f"Tensor {quoted(entry.name)} is no LoRA weight.", code="unexpected_tensor"
        ) from error
    is_applied = module in contract.modules
    if not is_applied and not module.startswith(contract.unadapted):
        raise _unknown_module(module, contract.parts_of.get(module, ()))
    # What reads pictures may begin with a convolution, whose weights have more: [rank, in, …] and [out, rank, …].
    if len(entry.shape) < 2 or (is_applied and len(entry.shape) > 2):
        raise _wrong_shape(module, f"a weight has {len(entry.shape)} dimensions instead of 2")
    shape, num_bytes = (entry.shape[0], entry.shape[1]), entry.end - entry.begin
    offset = header.data_offset + entry.begin
    return TensorInfo(entry.name, module, is_a, entry.dtype, shape, offset, num_bytes, begin)


def _unknown_module(module: str, parts: tuple[str, ...]) -> AdapterRejected:
    if parts:
        return AdapterRejected(
            f"Adapters on the fused module {quoted(module)} are not supported for this model. Train one on its parts: {', '.join(parts)}.",
            code="unknown_module",
        )
    return AdapterRejected(
        f"The model has no module {quoted(module)} that takes an adapter. Was this one trained for another model?",
        code="unknown_module",
    )


def _check_tensors(tensors: tuple[TensorInfo, ...], config: dict[str, Any], contract: ModelContract) -> int:
    """Return the largest rank, if each module has both halves in the shapes of model and configuration. Raises AdapterRejected."""
    if not tensors:
        raise AdapterRejected(f"The adapter's {WEIGHTS_FILE} holds no tensors.", code="no_weights")
    rank_of = ranks_of(config["r"], config.get("rank_pattern"))
    largest = 0
    for module, (a, b) in _halves(tensors).items():
        rank = rank_of(_checkpoint_module(a.name))
        _check_rank(module, a.shape[0], b.shape[1], rank)
        if module in contract.modules:
            _check_features(module, a.shape[1], b.shape[0], contract)
        largest = max(largest, rank)
    if contract.modules.keys().isdisjoint(tensor.module for tensor in tensors):
        raise AdapterRejected(
            f"None of the adapter's weights can be applied. {_not_applied(tensors, contract)}",
            code="unknown_module",
        )
    return largest


def _check_tying(tensors: Iterable[TensorInfo], config: dict[str, Any], contract: ModelContract) -> None:
    """Refuse one adapter for both embedding and output layer: the engine would apply it to one of them only. Raises AdapterRejected."""
    ends = contract.embedding_modules | {"lm_head"}
    if config.get("ensure_weight_tying") and any(
        tensor.module in ends or tensor.module.endswith(".lm_head") for tensor in tensors
    ):
        raise AdapterRejected(
            "This adapter uses what is not supported: one adapter for embedding and output layer (ensure_weight_tying).",
            code="unsupported_option",
        )


def _halves(tensors: Iterable[TensorInfo]) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Pair the tensors: module -> (lora_A, lora_B). Raises AdapterRejected for a missing or doubled half."""
    found: dict[tuple[str, bool], TensorInfo] = {}
    for tensor in tensors:
        if found.setdefault((tensor.module, tensor.is_a), tensor) is not tensor:
            raise AdapterRejected(
                f"Tensor {quoted(tensor.name)} gives the same weight as another one.",
                code="unexpected_tensor",
            )
    for module, is_a in found:
        if (module, not is_a) not in found:
            has, lacks = ("lora_A", "lora_B") if is_a else ("lora_B", "lora_A")
            raise AdapterRejected(
                f"Module {quoted(module)} has {has} but no {lacks}. Was the adapter saved whole?",
                code="missing_tensor",
            )
    return {module: (found[module, True], found[module, False]) for module, is_a in found if is_a}


def _check_rank(module: str, rank_a: int, rank_b: int, configured: int) -> None:
    if rank_a != rank_b:
        raise _wrong_shape(module, f"lora_A has rank {rank_a} and lora_B rank {rank_b}")
    if rank_a != configured:
        raise _wrong_shape(module, f"its weights have rank {rank_a}, {CONFIG_FILE} says {configured}")


def _check_features(module: str, num_in: int, num_out: int, contract: ModelContract) -> None:
    model_in, model_out = contract.modules[module]
    what = "vocabulary entries" if module in contract.embedding_modules else "inputs"
    if num_in != model_in:
        raise _wrong_shape(module, f"lora_A is for {num_in} {what}, the model has {model_in}")
    if num_out != model_out:
        raise _wrong_shape(module, f"lora_B is for {num_out} outputs, the model has {model_out}")


def _wrong_shape(module: str, text: str) -> AdapterRejected:
    return AdapterRejected(f"Module {quoted(module)} does not fit: {text}.", code="wrong_shape")


def _checkpoint_module(tensor_name: str) -> str:
    """Return the module's name in PEFT: rank_pattern goes by it, and the engine's may differ."""
    name = tensor_name.removeprefix(PEFT_PREFIX)
    suffix = next((suffix for suffix in _PEFT_SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def base_model_of(config: dict[str, Any]) -> str | None:
    """Return the model that the adapter was trained on, as its configuration names it."""
    name = config.get("base_model_name_or_path")
    return name.encode("utf-8", "replace").decode() if isinstance(name, str) and name else None


def _other_base_model(name: str | None, contract: ModelContract) -> tuple[str, ...]:
    """Return a note if the adapter was trained on another model than the one served. It is no error: people train from folders of any name."""
    if name is None or name.rstrip("/") in {known.rstrip("/") for known in contract.base_models}:
        return ()
    return (f"It was trained on {quoted(name)}, which is not a name of the model served here.",)


def _unused(tensors: Sequence[TensorInfo], contract: ModelContract) -> tuple[str, ...]:
    """Return notes on weights that the engine, like vLLM, does not apply."""
    names = sorted({t.module.rpartition(".")[2] for t in tensors if t.module in contract.unused_modules})
    of_attention = f"Its weights for {', '.join(names)} are not applied: this model's attention has these weights in a form that takes no adapter."
    of_others = _not_applied(tensors, contract)
    return (of_attention,) * bool(names) + (of_others,) * bool(of_others)


def _not_applied(tensors: Iterable[TensorInfo], contract: ModelContract) -> str:
    """Return a sentence on weights for what takes no adapter here; "" if there are none."""
    others = {t.module for t in tensors if t.module not in contract.modules}
    places = sorted(
        {place.rstrip(".") for place in contract.unadapted if any(m.startswith(place) for m in others)}
    )
    if not places:
        return ""
    return (
        f"Its weights for {', '.join(places)} are not applied: adapters change the language model alone, unless the model can have "
        "--engine-arg enable_tower_connector_lora=true."
    )


# --- the weights -----------------------------------------------------------------------------------------------------------------------


def read(files: AdapterFiles, buffer: memoryview) -> int:
    """Fill `buffer` with the adapter's tensors and return their checksum. For a worker thread: it waits for the disk, without the GIL.

    buffer: writable and contiguous, `files.num_bytes` long. Its content is undefined if this raises.
    Raises AdapterRejected: `changed` (inspect it again), `no_weights`, `unreadable`, `corrupt_file`; ValueError for a wrong buffer.
    """
    view = _bytes(files, buffer)
    checksum = xxh3_64()
    with opened(files.path, WEIGHTS_FILE) as file:
        _check_unchanged(files, file)
        position = 0
        for offset, end in _runs(files):
            file.seek(offset)
            while position < end:
                num_read = file.readinto(view[position : min(position + CHUNK_BYTES, end)])
                if not num_read:
                    _check_unchanged(files, file)
                    raise corrupt(f"it ends {len(view) - position} bytes too early. Was it copied whole?")
                checksum.update(view[position : position + num_read])
                position += num_read
        _check_unchanged(files, file)
    return checksum_of(checksum)


def _runs(files: AdapterFiles) -> Iterator[tuple[int, int]]:
    """Yield where each run of tensors without a gap starts in the file, and where it ends in the buffer."""
    end = 0
    for gap, run in groupby(files.tensors, lambda tensor: tensor.offset - tensor.begin):
        begin, end = end, end + sum(tensor.num_bytes for tensor in run)
        yield gap + begin, end


def checksum_of(digest: xxh3_64) -> int:
    """Return the checksum of weights, compared each time that they are read, against faults of disks and of power, not against people.

    XXH3, some 10 GB/s, without its first bit: SQLite's integers have a sign.
    """
    return digest.intdigest() & (1 << 63) - 1


def _check_unchanged(files: AdapterFiles, file: FileIO) -> None:
    """Raise AdapterRejected if the open file or the configuration beside it has changed since the inspection."""
    try:
        signature = signature_from(os.stat(files.path / CONFIG_FILE), os.fstat(file.fileno()))
    except OSError:
        signature = ""
    if signature != files.signature:
        raise AdapterRejected(
            "The adapter's files changed while they were read. Load it again.", code="changed"
        )


def check_finite(files: AdapterFiles, buffer: memoryview, contract: ModelContract) -> None:
    """Raise AdapterRejected (`not_finite`) if a weight in `buffer`, as `read` filled it, is NaN or infinite, or becomes so in the engine.

    It may become so when it is converted to the engine's type, or when lora_B is scaled there. Takes half a megabyte of scratch.

    Source: vllm-notes part 2 F: one NaN reaches other users through the KV cache. vLLM 0.32 `LoRALayerWeights.optimize` scales lora_B after the
    conversion, in the engine's type.
    """
    view = _bytes(files, buffer)
    scale_of = contract.scales(files.config)
    for tensor in files.tensors:
        largest = _largest(view[tensor.begin : tensor.begin + tensor.num_bytes], tensor.dtype)
        if not math.isfinite(largest):
            raise AdapterRejected(
                f"Tensor {quoted(tensor.name)} holds values that are NaN or infinite. Did the training diverge?",
                code="not_finite",
            )
        converted = _rounded(largest, contract.dtype)
        if not math.isfinite(converted):
            raise AdapterRejected(
                f"Tensor {quoted(tensor.name)} holds values too large for {contract.dtype}, which this server computes in. "
                "Start it with a wider dtype, or train the adapter again.",
                code="not_finite",
            )
        scale = 1.0 if tensor.is_a else scale_of(_checkpoint_module(tensor.name))
        # A scale that is infinite in single precision makes NaN of zeros, too.
        if not math.isfinite(_rounded(converted * _rounded(scale, "F32"), contract.dtype)):
            raise AdapterRejected(
                f"Tensor {quoted(tensor.name)} overflows when it is scaled by {scale:.3g} (lora_alpha over the rank). "
                "Check lora_alpha, or train the adapter again.",
                code="not_finite",
            )


def _rounded(value: float, dtype: str) -> float:
    """Round to the nearest number of the type, or to infinity beyond its range."""
    with np.errstate(over="ignore"):
        if dtype == "F16":
            return float(np.float16(np.float32(value)))
        single = np.float32(value)
    if dtype == "F32" or not np.isfinite(single):
        return float(single)
    bits = int(single.view(np.uint32))
    even = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000  # BF16: the upper half, ties to even
    return float(np.array([even], np.uint32).view(np.float32)[0])


def _largest(data: memoryview, dtype: str) -> float:
    """Return the largest magnitude: NaN or infinite if one of the values is. Without its sign a float's bits rise with its value, NaN above all."""
    is_wide = dtype == "F32"
    bits = np.frombuffer(data, "<u4" if is_wide else "<u2")
    without_sign = bits.dtype.type(0x7FFFFFFF if is_wide else 0x7FFF)
    largest = max(
        (
            int((bits[start : start + CHUNK_ITEMS] & without_sign).max())
            for start in range(0, len(bits), CHUNK_ITEMS)
        ),
        default=0,
    )
    if dtype == "F16":
        return float(np.array([largest], "<u2").view("<f2")[0])
    return float(np.array([largest if is_wide else largest << 16], "<u4").view("<f4")[0])


def content_hash(files: AdapterFiles, buffer: memoryview) -> str:
    """Return the SHA-256 in hex over configuration (in any layout), header and weights: equal for equal adapters, wherever and whenever written.

    buffer: as `read` filled it. KV of equal hashes may be shared, so the whole configuration counts.
    """
    digest = hashlib.sha256(files.head_digest)
    digest.update(_bytes(files, buffer))
    return digest.hexdigest()


def _bytes(files: AdapterFiles, buffer: memoryview) -> memoryview:
    if buffer.nbytes != files.num_bytes:
        raise ValueError(f"the buffer has {buffer.nbytes} bytes, the adapter {files.num_bytes}")
    return buffer.cast("B")
