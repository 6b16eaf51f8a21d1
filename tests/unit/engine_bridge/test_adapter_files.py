import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64, xxh3_64_intdigest

from engine_bridge.adapters import files as adapter_files
from engine_bridge.adapters.catalog import Catalog
from engine_bridge.adapters.config import ranks_of
from engine_bridge.adapters.contents import contents_of
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.files import AdapterFiles, ModelContract, check_finite, inspect, read
from engine_bridge.adapters.registry import Registry
from engine_bridge.adapters.store import AdapterStore
from tests import adapter_corpus as corpus
from tests.adapter_corpus import CONFIG_FILE, WEIGHTS_FILE, Tensor, Tensors, make_adapter, names_of
from tests.unit.cluster import catalog_node

EMBEDDING = "model.embed_tokens"
SHAPES = {"self_attn.q_proj": (32, 48), "self_attn.o_proj": (48, 32), "mlp.down_proj": (64, 32)}
LINEARS = {f"model.layers.{layer}.{name}": SHAPES[name] for layer in range(2) for name in SHAPES}
Q = "model.layers.0.self_attn.q_proj"
Q_A, Q_B = names_of(Q)
BASE_LAYERS = [f"base_model.model.{name}.base_layer.weight" for name in (EMBEDDING, "lm_head")]
TORCH_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
MAX_RANK = 64


def contract(**changes: Any) -> ModelContract:
    own = {"modules": {EMBEDDING: (100, 32), **LINEARS}, "base_models": (corpus.BASE_MODEL, "/models/base")}
    return catalog_node.contract(**own | {"embedding_modules": frozenset({EMBEDDING})} | changes)


def load(path: Path, model: ModelContract | None = None) -> tuple[AdapterFiles, bytearray]:
    """All the steps; raises AdapterRejected."""
    files, buffer, _ = loaded(path, model or contract())
    return files, buffer


def loaded(path: Path, model: ModelContract) -> tuple[AdapterFiles, bytearray, int]:
    """With the checksum that was found."""
    files = inspect(path, model)
    buffer = bytearray(files.num_bytes)
    checksum = read(files, memoryview(buffer))
    check_finite(files, memoryview(buffer), model)
    return files, buffer, checksum


def refusal(path: Path | str, model: ModelContract | None = None) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        load(path, model)  # type: ignore[arg-type]
    text = str(caught.value)
    assert text and len(text) < 1000 and text.isprintable(), "a refusal says why, whatever the files hold"
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "adapter"


def test_a_good_adapter_is_read_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "CHUNK_BYTES", 1000)
    files, buffer, checksum = loaded(make_adapter(folder, modules=LINEARS, seed=3), contract())
    data = (folder / WEIGHTS_FILE).read_bytes()[-files.num_bytes :]
    assert bytes(buffer) == data and checksum == xxh3_64_intdigest(data) % 2**63
    assert tensors_of(files, buffer) == corpus.make_tensors(LINEARS, seed=3)


def tensors_of(files: AdapterFiles, buffer: bytes | bytearray) -> Tensors:
    return {
        each.name: Tensor(each.dtype, each.shape, bytes(buffer[each.begin : each.begin + each.num_bytes]))
        for each in files.tensors
    }


def test_weights_of_the_base_model_are_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT saves them beside an adapter of the embedding or of the output layer."""
    monkeypatch.setattr(adapter_files, "CHUNK_BYTES", 1000)
    modules = {EMBEDDING: (100, 32), **LINEARS}
    kinds: dict[str, Any] = {"modules": modules, "embeddings": frozenset({EMBEDDING}), "seed": 3}

    def with_base_layers(tensors: Tensors) -> None:
        own = dict(tensors)
        tensors.clear()
        for number, (name, tensor) in enumerate(own.items()):
            tensors[name] = tensor
            if number in (1, len(own) - 1):
                corpus.reshape(tensors, BASE_LAYERS[number == 1], (100, 32))

    plain, right = load(make_adapter(folder, **kinds))
    files, buffer = load(make_adapter(folder, **kinds, edit=with_base_layers))
    assert buffer == right and tensors_of(files, buffer) == tensors_of(plain, right)
    # Who passes adapters on, or copies them, knows no model, and must find the same content.
    found = contents_of(folder)
    assert found.content_hash == adapter_files.content_hash(files, memoryview(buffer))
    assert (found.num_bytes, found.target_modules) == (files.num_bytes, files.target_modules)
    assert found.checksum == read(files, memoryview(buffer))
    AdapterStore(folder.parent / "copies").copy(found.content_hash, folder)


def test_weights_for_what_takes_no_adapter_are_part_of_the_adapter_and_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Adapters that were trained on all linear layers have some for what reads pictures; vLLM adapts the language model alone."""
    model = contract(unadapted=("visual.", "mtp."))
    seen = {"visual.blocks.0.attn.qkv": (16, 24), "visual.merger.mlp.0": (16, 16)}
    files, buffer = load(make_adapter(folder, modules=LINEARS | seen), model)
    Catalog(Registry(None), model, 1 << 30).add("all-linear", str(folder))
    assert caplog.text.count("visual are not applied") == 1
    assert contents_of(folder).content_hash == adapter_files.content_hash(files, memoryview(buffer))
    assert (
        files.held_bytes == inspect(make_adapter(folder.parent / "less", modules=LINEARS), model).held_bytes
    )
    assert refusal(folder).code == "unknown_module"
    refused = refusal(make_adapter(folder.parent / "none", modules=seen), model)
    assert "None of the adapter's weights" in str(refused) and "visual" in str(refused)


def test_a_convolution_of_what_reads_pictures_may_have_weights_too(folder: Path) -> None:
    model, patches = contract(unadapted=("model.tower.",)), "model.tower.patch_embed.proj"

    def convolve(tensors: Tensors) -> None:
        for name, shape in zip(names_of(patches), ((8, 4, 2, 2), (16, 8, 1, 1)), strict=True):
            tensors[name] = tensors[name]._replace(shape=shape)

    files, _ = load(make_adapter(folder, modules=LINEARS | {patches: (16, 16)}, rank=8, edit=convolve), model)
    assert "weights for model.tower are not applied" in "".join(files.unapplied)
    assert refusal(folder, contract(modules=LINEARS | {patches: (16, 16)})).code == "wrong_shape"


def test_weights_that_are_not_applied_may_not_fill_the_memory_in_which_they_are_read(folder: Path) -> None:
    model = contract(unadapted=("visual.",))
    needed = inspect(make_adapter(folder, modules=LINEARS), model).held_bytes
    catalog = Catalog(Registry(None), model, needed)
    assert catalog.add("plain", str(folder)).num_bytes == needed
    with pytest.raises(AdapterRejected) as caught:
        catalog.add("huge", str(make_adapter(folder, modules=LINEARS | {"visual.proj": (needed, 16)})))
    assert caught.value.code == "too_large"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_changed_in_place_is_another_whatever_its_time_and_size(folder: Path, name: str) -> None:
    """As a copying tool that keeps times leaves it."""
    make_adapter(folder, modules=LINEARS)
    before, path = adapter_files.signature_of(folder), folder / name
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        file.write(b"~")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns and path.stat().st_size == status.st_size
    assert adapter_files.signature_of(folder) != before


def test_an_adapter_of_an_embedding_has_the_vocabulary_in_lora_a(folder: Path) -> None:
    modules = {EMBEDDING: (100, 32)}
    make_adapter(folder, modules=modules, embeddings=frozenset(modules))
    files, _ = load(folder)
    assert {tensor.shape for tensor in files.tensors} == {(8, 100), (32, 8)}
    make_adapter(folder, modules={EMBEDDING: (101, 32)}, embeddings=frozenset(modules))
    assert "101 vocabulary entries" in str(refusal(folder)), "the message speaks of the vocabulary"


def test_oddities_that_are_no_errors_are_notes(folder: Path) -> None:
    left_out = next(iter(LINEARS))
    cases: list[tuple[dict[str, Any], ModelContract, str | None, str]] = [
        ({"peft_type": None}, contract(), corpus.BASE_MODEL, ""),
        ({"ensure_weight_tying": True}, contract(), corpus.BASE_MODEL, ""),
        ({}, contract(unused_modules=frozenset({left_out})), corpus.BASE_MODEL, "q_proj are not applied"),
        ({"base_model_name_or_path": None}, contract(), None, ""),
        ({"base_model_name_or_path": "/models/base/"}, contract(), "/models/base/", ""),
        ({"base_model_name_or_path": "/me/other\n"}, contract(), "/me/other\n", "'/me/other\\n'"),
    ]
    for overrides, model, base_model, note in cases:
        shutil.rmtree(folder, ignore_errors=True)
        make_adapter(folder, modules=LINEARS, config_overrides=overrides)
        files, _ = load(folder, model)
        assert files.base_model == base_model and files.rank == 8
        notes = files.notes + files.unapplied
        assert len(notes) == bool(note) and note in "".join(notes)


def test_rank_pattern_gives_single_modules_their_own_rank(folder: Path) -> None:
    ranks = {name: 16 if "o_proj" in name else 4 if ".1.self_attn.q" in name else 8 for name in LINEARS}
    pattern = {"layers.1.self_attn.q_proj": 4, r"layers\.\d+\.self_attn\.o_proj": 16}
    pattern |= {"q_proj": 8, ".*q_proj": 32}
    make_adapter(folder, modules=LINEARS, ranks=ranks, config_overrides={"rank_pattern": pattern})
    assert inspect(folder, contract()).rank == 16


NAME_PARTS = st.lists(st.sampled_from(["layers", "0", "q"]), min_size=1, max_size=3)
KEYS = st.one_of(
    NAME_PARTS.map(".".join),
    NAME_PARTS.map(r"\.".join),
    NAME_PARTS.map(lambda parts: "^" + r"\.".join(parts)),
    st.sampled_from([r".*\.q", r"layers\.(0|1).*", r"layers\.\d+", "[01].[qk]", "(?:layers|q).+"]),
)


@given(pattern=st.dictionaries(KEYS, st.integers(1, 64), max_size=6), parts=NAME_PARTS)
def test_ranks_follow_pefts_own_rule(pattern: dict[str, int], parts: list[str]) -> None:
    module = ".".join(parts)
    # PEFT, get_pattern_key.
    fitting = (rank for key, rank in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    assert ranks_of(99, pattern)(module) == next(fitting, 99)


WORDS = {
    "dora": "DoRA", "bias": "bias 'all'", "lora_bias": "lora_bias", "modules_to_save": "modules_to_save", "not_lora": "'IA3'",
    "pickle_only": "save_pretrained", "rank_above_limit": "64", "a_8_b_16": "rank 8 and lora_B rank 16", "rank_256_as_8": "rank 256",
    "layer_99": "model.layers.99.self_attn.q_proj", "no_lora_b": "no lora_B", "no_r": "'r'", "int8": "BF16",
}  # fmt: skip


@pytest.mark.parametrize("name", corpus.BAD)
def test_every_bad_adapter_of_the_corpus_is_refused_for_its_reason(folder: Path, name: str) -> None:
    code = corpus.BAD[name](folder, LINEARS, MAX_RANK)
    error = refusal(folder)
    assert error.code == code and WORDS.get(name, "") in str(error)
    assert str(folder.parent) not in str(error), "messages may be shown to clients: no paths"


def tensors_with(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Arguments for an adapter with a tensor more."""
    return {"edit": lambda tensors: corpus.reshape(tensors, name, shape)}


def overridden(code: str, *overrides: dict[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
    return [({"config_overrides": each}, code, "") for each in overrides]


TIED = {"modules": {EMBEDDING: (100, 32)}, "embeddings": frozenset({EMBEDDING})}
ENDLESS = ("(a+)+b", ".*.*.*x", "((a|b)|c)", "(a|b)" + "x" * 200, "[", "", "(?P<n>a)")
MADE_BADLY: list[tuple[dict[str, Any], str, str]] = [
    ({"ranks": {Q: 16}, "config_overrides": {"rank_pattern": {"o_proj": 16}}}, "wrong_shape", ""),
    ({"ranks": {Q: 65}, "config_overrides": {"rank_pattern": {"0.self_attn.q_proj": 65}}}, "rank_too_large", ""),
    ({"ranks": {Q: 0}}, "wrong_shape", ""),
    (tensors_with(Q_A.removeprefix("base_model.model."), (8, 32)), "unexpected_tensor", ""),
    (tensors_with(BASE_LAYERS[0].replace("embed_tokens", "norm"), (100, 32)), "unexpected_tensor", ""),
    ({"edit": lambda tensors: tensors.update({Q_A: tensors[Q_A]._replace(shape=(8, 4, 8))})}, "wrong_shape", "3 dimensions"),
    (tensors_with("\x1b[2J\n" + "x" * 100_000, (8, 32)), "unexpected_tensor", ""),
    ({**TIED, "config_overrides": {"ensure_weight_tying": True}}, "unsupported_option", ""),
    *overridden("bad_config", *({"r": value} for value in (-8, True, 8.0))),
    *overridden("bad_config", *({"lora_alpha": value} for value in ("16", True, math.inf, 10**400))),
    *overridden("bad_config", *({"target_modules": value} for value in (5, ["q_proj", 5]))),
    *overridden("bad_config", *({"rank_pattern": value} for value in (["q_proj"], {"q_proj": True}))),
    # Patterns that could take for ever, or that no regular expression is, and too many of them.
    *overridden("unsupported_option", *({"rank_pattern": {pattern: 8}} for pattern in ENDLESS)),
    *overridden("unsupported_option", {"alpha_pattern": {ENDLESS[0]: 8}}),
    *overridden("unsupported_option", {"rank_pattern": {rf"layers\.{number}": 8 for number in range(40)}}),
]  # fmt: skip


@pytest.mark.parametrize(("made", "code", "words"), MADE_BADLY)
def test_an_adapter_must_fit_the_model(folder: Path, made: dict[str, Any], code: str, words: str) -> None:
    error = refusal(make_adapter(folder, **{"modules": LINEARS, **made}))
    assert error.code == code and words in str(error)


NO_OBJECTS = {
    "empty": b"", "list": b"[]", "utf16": b"\xff\xfe", "twice": b'{"r": 8, "r": 16}', "deep": b"[" * 100_000,
    "long number": b'{"r": ' + b"9" * 5000 + b"}", "large": b"{" + b" " * (1 << 20) + b"}",
}  # fmt: skip


@pytest.mark.parametrize("raw", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_a_configuration_that_is_no_object_is_refused(folder: Path, raw: bytes) -> None:
    (make_adapter(folder, modules=LINEARS) / CONFIG_FILE).write_bytes(raw)
    assert refusal(folder).code == "bad_config"


def test_what_the_engine_does_not_support_is_told_in_its_words(folder: Path) -> None:
    def choke(config: dict[str, Any]) -> tuple[str, ...]:
        raise TypeError("unexpected")

    make_adapter(folder, modules=LINEARS)
    error = refusal(folder, contract(check_config=lambda config: ("no QALoRA.", "x" * 10_000)))
    assert error.code == "unsupported_option" and "no QALoRA; x" in str(error)
    assert refusal(folder, contract(check_config=choke)).code == "bad_config"


HEADER_DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape does not fit the length": lambda header: header[Q_A].update(shape=[8, 33]),
    "negative size": lambda header: header[Q_A].update(shape=[-8, -32]),
    "size that is no number": lambda header: header[Q_A].update(shape=[8, "32"]),
    "size that is true": lambda header: header[Q_A].update(shape=[True, 256]),
    "thousands of dimensions": lambda header: header[Q_A].update(shape=[2**62] * 5000),
    "offsets the wrong way round": lambda header: header[Q_A]["data_offsets"].reverse(),
    "offsets beyond the file": lambda header: header[Q_A].update(data_offsets=[10**9, 10**9 + 512]),
    "three offsets": lambda header: header[Q_A].update(data_offsets=[0, 512, 512]),
    "no offsets": lambda header: header[Q_A].pop("data_offsets"),
    "no type": lambda header: header[Q_A].pop("dtype"),
    "overlap": lambda header: header[Q_B].update(shape=[16, 16], data_offsets=[256, 768]),
    "entry that is no object": lambda header: header.update({Q_A: [1]}),
    "metadata that is no object": lambda header: header.update(__metadata__=["pt"]),
    "metadata with numbers": lambda header: header.update(__metadata__={"format": 5}),
    "hole": lambda header: header.pop(Q_A),
}


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Change the header of a good adapter's weights, and leave the data."""

    def damage(raw: bytes) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        return framed(json.dumps(header).encode(), raw[8 + length :])

    return damage


def framed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


TWICE = '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
DAMAGE = {
    **{what: rewritten(change) for what, change in HEADER_DAMAGE.items()},
    **{f"cut at {size}": lambda raw, size=size: raw[:size] for size in (0, 7, 8, 100)},
    "a byte too many": lambda raw: raw + b"\0",
    "named twice": lambda raw: framed(TWICE.encode(), b"\0" * 4),
    **{
        f"header {raw[:4]!r}": lambda _, raw=raw: framed(raw)
        for raw in (b"[]", b"5", b"\xff{}", b"{" * 50_000, b"{}x")
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_weights_that_contradict_themselves_are_refused(folder: Path, damage: str) -> None:
    weights = make_adapter(folder, modules=LINEARS) / WEIGHTS_FILE
    weights.write_bytes(DAMAGE[damage](weights.read_bytes()))
    assert refusal(folder).code == "corrupt_file"


def test_a_header_larger_than_any_adapter_needs_is_not_parsed(folder: Path) -> None:
    corpus.write_config(folder, LINEARS)
    weights = folder / WEIGHTS_FILE
    weights.write_bytes((1 << 30).to_bytes(8, "little"))
    os.truncate(weights, (1 << 30) + 8)  # a sparse file
    assert "more than" in str(refusal(folder))


def test_bytes_changed_at_random_never_raise_anything_else(tmp_path: Path) -> None:
    good = make_adapter(tmp_path / "good", modules=LINEARS)
    originals = {name: (good / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    model = contract()

    @settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        name=st.sampled_from([CONFIG_FILE, WEIGHTS_FILE]),
        place=st.integers(0, 1500),
        cut=st.integers(0, 8),
        new=st.binary(max_size=8) | st.text('0123456789-."{}[],:ntA', max_size=8).map(str.encode),
    )
    def attack(name: str, place: int, cut: int, new: bytes) -> None:
        raw = originals[name]
        (good / name).write_bytes(raw[:place] + new + raw[place + cut :])
        try:
            load(good, model)
        except AdapterRejected:
            pass
        finally:
            (good / name).write_bytes(raw)

    attack()


def test_paths_and_links_that_lead_nowhere_are_told_as_what_they_lack(folder: Path, tmp_path: Path) -> None:
    folder.symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(folder)  # links in a circle
    for nowhere in (folder, "/nowhere/at/all", "a\0b", "/" + "x" * 300, "\ud800", "/dev/null/x"):
        assert refusal(nowhere).code == "adapter_not_found"
    folder.unlink()
    corpus.write_config(folder, LINEARS)
    (folder / WEIGHTS_FILE).symlink_to("gone")
    assert refusal(folder).code == "no_weights"


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_is_no_file(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    make_adapter(folder, modules=LINEARS)
    (folder / name).unlink()
    make(folder / name)
    assert refusal(folder).code == "unreadable"


def replaced(folder: Path, name: str) -> None:
    other = make_adapter(folder.with_name("other"), modules=LINEARS, seed=9)
    (other / name).replace(folder / name)


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / WEIGHTS_FILE).write_bytes(b""),
        lambda folder: os.utime(folder / WEIGHTS_FILE, ns=(0, 0)),
        lambda folder: os.utime(folder / CONFIG_FILE, ns=(0, 0)),
        lambda folder: (folder / CONFIG_FILE).unlink(),
        lambda folder: replaced(folder, CONFIG_FILE),
        lambda folder: replaced(folder, WEIGHTS_FILE),
    ],
    ids=["weights cut", "weights touched", "config touched", "config gone", "other config", "other weights"],
)
def test_files_changed_after_inspection_are_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], is_begun: bool
) -> None:
    monkeypatch.setattr(adapter_files, "CHUNK_BYTES", 1000)
    files = inspect(make_adapter(folder, modules=LINEARS), contract())
    changes = iter([change])

    class Acting:
        def __init__(self) -> None:
            self._digest = xxh3_64()

        def update(self, data: memoryview) -> None:
            for act in changes:
                act(folder)
            self._digest.update(data)

    monkeypatch.setattr(adapter_files, "xxh3_64", Acting)
    if not is_begun:
        next(changes)(folder)
    buffer = bytearray(files.num_bytes)
    with pytest.raises(AdapterRejected) as caught:
        read(files, memoryview(buffer))
    assert caught.value.code == "changed"
    assert is_begun or not any(buffer), "not one byte is read of files that are others"


def test_a_file_that_is_gone_or_ends_too_early_is_told_as_that(folder: Path) -> None:
    files = inspect(make_adapter(folder, modules=LINEARS), contract())
    for num_more, code in ((10, "corrupt_file"), (0, "no_weights")):
        *others, last = files.tensors
        last = dataclasses.replace(last, num_bytes=last.num_bytes + num_more)
        wanted = dataclasses.replace(files, num_bytes=files.num_bytes + num_more, tensors=(*others, last))
        with pytest.raises(AdapterRejected) as caught:
            read(wanted, memoryview(bytearray(wanted.num_bytes)))
        assert caught.value.code == code
        (folder / WEIGHTS_FILE).unlink(missing_ok=True)


PLACES = (0, adapter_files.CHUNK_ITEMS - 1, adapter_files.CHUNK_ITEMS, -1)


@pytest.mark.parametrize(
    ("dtype", "value", "place"),
    [
        *(("BF16", math.inf, place) for place in PLACES),
        *((dtype, value, -1) for dtype in ("F16", "F32") for value in (math.nan, -math.inf)),
    ],
)
def test_one_value_that_is_not_finite_is_named(folder: Path, dtype: str, value: float, place: int) -> None:
    num_in = adapter_files.CHUNK_ITEMS // 8 + 1  # lora_A spans two chunks
    modules = {"model.layers.0.mlp.up_proj": (num_in, 16), Q: (32, 48)}
    values = np.zeros((8, num_in), np.float32)
    values.flat[place] = value
    name = names_of("model.layers.0.mlp.up_proj")[0]

    def spoil(tensors: Tensors) -> None:
        tensors[name] = corpus.encode(values, dtype)

    make_adapter(folder, modules=modules, dtype=dtype, edit=spoil)
    error = refusal(folder, contract(modules=modules))
    assert error.code == "not_finite" and name in str(error)


@pytest.mark.parametrize("engine_dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@given(
    value=st.floats(0.0, 2.0**127, width=32) | st.sampled_from([65503.0, 65519.0, 65520.0, 3.38e38]),
    alpha=st.sampled_from([8, 16, 0, -4e3, 1e38]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_overflows_in_the_engine_is_refused_and_nothing_else(
    folder: Path, engine_dtype: str, dtype: str, alpha: float, value: float
) -> None:
    """torch does here what the engine does: convert, then scale B."""
    written = torch.full((48, 8), value).to(TORCH_DTYPES[dtype])
    assume(bool(torch.isfinite(written).all()))
    in_engine = written.to(TORCH_DTYPES[engine_dtype]) * (alpha / 8)

    def stretch(tensors: Tensors) -> None:
        tensors[Q_A] = corpus.encode(np.zeros((8, 32), np.float32), dtype)
        tensors[Q_B] = Tensor(dtype, (48, 8), written.view(torch.uint8).numpy().tobytes())

    make_adapter(folder, modules={Q: LINEARS[Q]}, edit=stretch, config_overrides={"lora_alpha": alpha})
    model = contract(dtype=engine_dtype)
    if torch.isfinite(in_engine).all():
        load(folder, model)
    else:
        error = refusal(folder, model)
        assert error.code == "not_finite" and Q_B in str(error)


def hash_of(folder: Path) -> str:
    files, buffer = load(folder)
    return adapter_files.content_hash(files, memoryview(buffer))


def swap_layers(tensors: Tensors) -> None:
    """A weight under another module's name changes the header alone."""
    corpus.rename(
        tensors, lambda name: re.sub(r"[01](?=\.self_attn)", lambda match: str(1 - int(match[0])), name)
    )


def test_the_hash_is_that_of_the_content_and_of_nothing_else(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 2}, {"dtype": "F16"}, {"edit": swap_layers}]
    changes += [{"config_overrides": each} for each in ({"lora_alpha": 17}, {"some_new_option": 1})]
    usual = {"modules": LINEARS, "seed": 1}
    hashes = [hash_of(make_adapter(tmp_path / str(n), **usual | change)) for n, change in enumerate(changes)]
    assert len(set(hashes)) == len(changes) and re.fullmatch("[0-9a-f]{64}", hashes[0])
    twin = make_adapter(tmp_path / "twin", modules=LINEARS, seed=1)
    config = json.loads((twin / CONFIG_FILE).read_text())
    (twin / CONFIG_FILE).write_text(json.dumps(dict(reversed(config.items())), indent=7))
    os.utime(twin / WEIGHTS_FILE, ns=(0, 0))
    assert hash_of(twin) == hashes[0], "path, times and the layout of the JSON do not count"


def test_the_hash_of_known_content_does_not_change_from_release_to_release(folder: Path) -> None:
    shapes = {Q_A: (8, 32), Q_B: (48, 8)}
    folder.mkdir()
    zeros = {name: Tensor("F32", shape, bytes(4 * math.prod(shape))) for name, shape in shapes.items()}
    corpus.write_safetensors(folder / WEIGHTS_FILE, zeros)
    (folder / CONFIG_FILE).write_text('{"target_modules": ["q_proj"], "r": 8, "lora_alpha": 16}')
    raw = (folder / WEIGHTS_FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    config = b'{"lora_alpha":16,"r":8,"target_modules":["q_proj"]}'
    head = b"".join(len(part).to_bytes(8, "little") + part for part in (config, raw[8 : 8 + length]))
    expected = hashlib.sha256(hashlib.sha256(head).digest() + raw[8 + length :]).hexdigest()
    assert hash_of(folder) == expected
