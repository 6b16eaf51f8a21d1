"""Adapters on disk: the good are read to the byte, and the bad, damaged and hostile are refused with a reason before the engine sees them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from xxhash import xxh3_64_intdigest

from engine_bridge.adapters import files as adapter_files
from engine_bridge.adapters.checksum import Checksum
from engine_bridge.adapters.config import ModuleRanks
from engine_bridge.adapters.errors import AdapterRejected, quoted
from engine_bridge.adapters.files import (
    CHUNK_ITEMS,
    AdapterFiles,
    ModelContract,
    check_finite,
    content_hash,
    inspect,
    read,
    signature_of,
)
from tests.adapter_corpus import (
    BAD,
    BASE_MODEL,
    CONFIG_FILE,
    WEIGHTS_FILE,
    Tensor,
    Tensors,
    encode,
    make_adapter,
    make_tensors,
    names_of,
    rename,
    reshape,
    write_config,
    write_raw,
    write_safetensors,
)

EMBEDDING = "model.embed_tokens"
LINEARS = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "self_attn.q_proj": (32, 48),
        "self_attn.o_proj": (48, 32),
        "mlp.down_proj": (64, 32),
    }.items()
}
Q = "model.layers.0.self_attn.q_proj"
Q_A, Q_B = names_of(Q)
TORCH_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
MAX_RANK = 64
HALF = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")


def module_of(name: str) -> tuple[str, bool]:
    match = HALF.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is unsupported LoRA weight")
    return match[1], match[2] == "A"


def contract(**changes: Any) -> ModelContract:
    plain = ModelContract(
        modules={EMBEDDING: (100, 32), **LINEARS},
        max_rank=MAX_RANK,
        base_models=(BASE_MODEL, "/models/base"),
        module_of=module_of,
        check_config=lambda config: (),
        embedding_modules=frozenset({EMBEDDING}),
    )
    return dataclasses.replace(plain, **changes)


def load(path: Path, model: ModelContract | None = None) -> tuple[AdapterFiles, bytearray]:
    """All the steps; raises AdapterRejected."""
    files = inspect(path, model or contract())
    buffer = bytearray(files.num_bytes)
    read(files, memoryview(buffer))
    check_finite(files, memoryview(buffer), model or contract())
    return files, buffer


def refusal(path: Path | str, model: ModelContract | None = None) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        load(path, model)  # type: ignore[arg-type]
    assert str(caught.value), "a refusal says why"
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "adapter"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object], data: bytes | None = None) -> None:
    """Change the header of a good adapter's weights, and leave the data."""
    raw = (folder / WEIGHTS_FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    write_raw(folder / WEIGHTS_FILE, header, raw[8 + length :] if data is None else data)


# --- good adapters ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_good_adapter_is_read_to_the_byte(folder: Path, dtype: str) -> None:
    make_adapter(folder, modules=LINEARS, dtype=dtype, seed=3)
    files, buffer = load(folder)
    expected = make_tensors(LINEARS, dtype=dtype, seed=3)
    assert {tensor.name for tensor in files.tensors} == set(expected)
    for tensor in files.tensors:
        begin = tensor.offset - files.data_offset
        got = Tensor(tensor.dtype, tensor.shape, bytes(buffer[begin : begin + tensor.num_bytes]))
        assert got == expected[tensor.name]
        assert (folder / WEIGHTS_FILE).read_bytes()[tensor.offset :].startswith(got.data)


def test_inspection_tells_what_the_registry_keeps(folder: Path) -> None:
    make_adapter(folder, modules=LINEARS, rank=16)
    files = inspect(folder, contract())
    assert files.path == folder
    assert files.rank == 16
    assert files.target_modules == ("down_proj", "o_proj", "q_proj")
    assert files.base_model == BASE_MODEL
    assert files.notes == ()
    assert files.config["lora_alpha"] == 32
    assert files.num_bytes == sum(2 * 16 * (i + o) for i, o in LINEARS.values())
    assert files.signature == signature_of(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_changed_in_place_is_another_though_its_time_and_size_are_set_back(
    folder: Path, name: str
) -> None:
    """As a copying tool that keeps times leaves it."""
    make_adapter(folder, modules=LINEARS)
    before, path = signature_of(folder), folder / name
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        file.write(b"~")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns and path.stat().st_size == status.st_size
    assert signature_of(folder) != before


def test_what_the_reference_library_writes_is_accepted(folder: Path) -> None:
    write_config(folder, LINEARS)
    arrays = {}
    for module, (num_in, num_out) in LINEARS.items():
        name_a, name_b = names_of(module)
        arrays[name_a], arrays[name_b] = np.ones((8, num_in), np.float16), np.ones((num_out, 8), np.float32)
    save_file(arrays, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    files, buffer = load(folder)
    assert len(files.tensors) == len(arrays)
    assert len(buffer) == sum(array.nbytes for array in arrays.values())


def test_what_the_corpus_writes_is_what_the_reference_library_reads(folder: Path) -> None:
    make_adapter(folder, modules=LINEARS, dtype="F32", seed=5)
    arrays = load_file(folder / WEIGHTS_FILE)
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: tensor.data for name, tensor in make_tensors(LINEARS, dtype="F32", seed=5).items()
    }


def test_an_adapter_of_an_embedding_has_the_vocabulary_in_lora_a(folder: Path) -> None:
    modules = {EMBEDDING: (100, 32)}
    make_adapter(folder, modules=modules, embeddings=frozenset(modules))
    files, _ = load(folder)
    assert {tensor.shape for tensor in files.tensors} == {(8, 100), (32, 8)}
    make_adapter(folder, modules={EMBEDDING: (101, 32)}, embeddings=frozenset(modules))
    assert "101 vocabulary entries" in str(refusal(folder)), "the message speaks of the vocabulary"


def test_one_adapter_for_embedding_and_output_layer_is_refused(folder: Path) -> None:
    modules, tied = {EMBEDDING: (100, 32)}, {"ensure_weight_tying": True}
    make_adapter(folder, modules=modules, embeddings=frozenset(modules), config_overrides=tied)
    assert refusal(folder).code == "unsupported_option"
    shutil.rmtree(folder)
    make_adapter(folder, modules=LINEARS, config_overrides=tied)
    assert load(folder)


def test_what_the_engine_leaves_out_of_an_adapter_is_a_note(folder: Path) -> None:
    make_adapter(folder, modules=LINEARS)
    left_out = next(iter(LINEARS))
    files, _ = load(folder, contract(unused_modules=frozenset({left_out})))
    (note,) = files.notes
    assert left_out.rpartition(".")[2] in note and "not applied" in note


def test_a_wrong_base_model_is_a_note_and_no_error(folder: Path) -> None:
    make_adapter(folder, modules=LINEARS, config_overrides={"base_model_name_or_path": "/home/me/other\n"})
    files = inspect(folder, contract())
    assert files.base_model == "/home/me/other\n"
    assert len(files.notes) == 1 and "\n" not in files.notes[0]


def test_a_base_model_may_be_left_out_or_end_with_a_slash(folder: Path) -> None:
    make_adapter(folder, modules=LINEARS, config_overrides={"base_model_name_or_path": None})
    assert inspect(folder, contract()).base_model is None
    make_adapter(folder, modules=LINEARS, config_overrides={"base_model_name_or_path": "/models/base/"})
    assert inspect(folder, contract()).notes == ()


def test_peft_type_may_be_left_out(folder: Path) -> None:
    make_adapter(folder, modules=LINEARS, config_overrides={"peft_type": None})
    assert load(folder)[0].rank == 8


def test_a_link_to_the_files_is_followed(tmp_path: Path, folder: Path) -> None:
    real = make_adapter(tmp_path / "blobs", modules=LINEARS)
    folder.mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (folder / name).symlink_to(real / name)
    assert load(folder)[1] == load(real)[1]


# --- ranks ---------------------------------------------------------------------------------------------------------------------------


def test_rank_pattern_gives_single_modules_their_own_rank(folder: Path) -> None:
    ranks = {name: 16 if "o_proj" in name else 4 if ".1.self_attn.q" in name else 8 for name in LINEARS}
    pattern = {
        "layers.1.self_attn.q_proj": 4,
        r"layers\.\d+\.self_attn\.o_proj": 16,
        "q_proj": 8,
        ".*q_proj": 32,
    }
    make_adapter(folder, modules=LINEARS, ranks=ranks, config_overrides={"rank_pattern": pattern})
    assert inspect(folder, contract()).rank == 16


def test_a_rank_that_rank_pattern_does_not_allow_is_refused(folder: Path) -> None:
    make_adapter(folder, modules=LINEARS, ranks={Q: 16}, config_overrides={"rank_pattern": {"o_proj": 16}})
    assert refusal(folder).code == "wrong_shape"


def test_a_rank_above_the_limit_in_rank_pattern_is_refused(folder: Path) -> None:
    make_adapter(
        folder, modules=LINEARS, ranks={Q: 65}, config_overrides={"rank_pattern": {"0.self_attn.q_proj": 65}}
    )
    assert refusal(folder).code == "rank_too_large"


NAME_PARTS = st.lists(st.sampled_from(["layers", "0", "q"]), min_size=1, max_size=3)
KEYS = st.one_of(
    NAME_PARTS.map(".".join),
    NAME_PARTS.map(r"\.".join),
    NAME_PARTS.map(lambda parts: "^" + r"\.".join(parts)),
    st.sampled_from([r".*\.q", r"layers\.(0|1).*", r"layers\.\d+", "[01].[qk]", "(?:layers|q).+"]),
)


@settings(max_examples=300)
@given(pattern=st.dictionaries(KEYS, st.integers(1, 64), max_size=6), parts=NAME_PARTS)
def test_ranks_follow_pefts_own_rule(pattern: dict[str, int], parts: list[str]) -> None:
    module = ".".join(parts)
    expected = next(
        (rank for key, rank in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), 99
    )  # PEFT, get_pattern_key
    assert ModuleRanks(99, pattern).of(module) == expected


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "key", ["(a+)+b", "(.*a|b.*)*", ".*.*.*x", "((a|b)|c)", "(a|b)" + "x" * 200, "[", "", "(?P<n>a)"]
)
def test_a_pattern_that_could_take_for_ever_is_refused(folder: Path, key: str, field: str) -> None:
    make_adapter(folder, modules=LINEARS, config_overrides={field: {key: 8}})
    assert refusal(folder).code == "unsupported_option"


def test_many_patterns_are_taken_by_name_but_not_as_regular_expressions(folder: Path) -> None:
    by_name = {f"layers.{number}.q_proj": 8 for number in range(5000)}
    make_adapter(folder, modules=LINEARS, config_overrides={"rank_pattern": by_name})
    load(folder)
    make_adapter(
        folder,
        modules=LINEARS,
        config_overrides={"rank_pattern": {rf"layers\.{number}": 8 for number in range(40)}},
    )
    assert refusal(folder).code == "unsupported_option"


# --- bad adapters --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD)
def test_every_bad_adapter_of_the_corpus_is_refused_for_its_reason(folder: Path, name: str) -> None:
    code = BAD[name](folder, LINEARS, MAX_RANK)
    error = refusal(folder)
    assert error.code == code, str(error)
    assert str(folder.parent) not in str(error), "messages may be shown to clients: no paths"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dora", "DoRA"),
        ("bias", "bias 'all'"),
        ("lora_bias", "lora_bias"),
        ("modules_to_save", "modules_to_save"),
        ("not_lora", "'IA3'"),
        ("pickle_only", "save_pretrained"),
        ("rank_above_limit", "64"),
        ("a_8_b_16", "rank 8 and lora_B rank 16"),
        ("rank_256_as_8", "rank 256"),
        ("layer_99", "model.layers.99.self_attn.q_proj"),
        ("no_lora_b", "no lora_B"),
        ("no_r", "'r'"),
        ("int8", "BF16"),
    ],
)
def test_a_refusal_names_what_is_wrong(folder: Path, name: str, words: str) -> None:
    BAD[name](folder, LINEARS, MAX_RANK)
    assert words in str(refusal(folder))


@pytest.mark.parametrize(
    "overrides",
    [
        {"r": 0},
        {"r": -8},
        {"r": True},
        {"r": 8.0},
        {"r": "8"},
        {"lora_alpha": "16"},
        {"lora_alpha": True},
        {"lora_alpha": math.nan},
        {"lora_alpha": math.inf},
        {"lora_alpha": 10**400},
        {"target_modules": 5},
        {"target_modules": ["q_proj", 5]},
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": {"q_proj": True}},
        {"alpha_pattern": {"q_proj": math.nan}},
    ],
)
def test_a_field_of_the_wrong_kind_is_a_bad_configuration(folder: Path, overrides: dict[str, Any]) -> None:
    make_adapter(folder, modules=LINEARS, config_overrides=overrides)
    assert refusal(folder).code == "bad_config"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"r": 8, "r": 16}',
        b"[" * 100_000,
        b'{"r": ' + b"9" * 5000 + b"}",
        b"{" + b" " * (1 << 20) + b"}",
    ],
    ids=["empty", "list", "null", "utf16", "twice", "deep", "long number", "large"],
)
def test_a_configuration_that_is_no_object_is_refused(folder: Path, raw: bytes) -> None:
    (make_adapter(folder, modules=LINEARS) / CONFIG_FILE).write_bytes(raw)
    assert refusal(folder).code == "bad_config"


def test_what_the_engine_does_not_support_is_told_in_its_words(folder: Path) -> None:
    make_adapter(folder, modules=LINEARS)
    error = refusal(folder, contract(check_config=lambda config: ("QALoRA", "x" * 10_000)))
    assert error.code == "unsupported_option"
    assert "QALoRA" in str(error) and len(str(error)) < 1000


def test_a_configuration_that_the_engine_chokes_on_is_refused(folder: Path) -> None:
    def choke(config: dict[str, Any]) -> tuple[str, ...]:
        raise TypeError("unexpected")

    make_adapter(folder, modules=LINEARS)
    assert refusal(folder, contract(check_config=choke)).code == "bad_config"


def test_the_weights_of_a_base_embedding_say_how_to_leave_them_out(folder: Path) -> None:
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    make_adapter(folder, modules=LINEARS, edit=lambda tensors: reshape(tensors, name, (100, 32)))
    error = refusal(folder)
    assert error.code == "unexpected_tensor" and "save_embedding_layers" in str(error)


def test_two_names_for_one_weight_are_refused(folder: Path) -> None:
    short = Q_A.removeprefix("base_model.model.")
    make_adapter(folder, modules=LINEARS, edit=lambda tensors: reshape(tensors, short, (8, 32)))
    assert refusal(folder).code == "unexpected_tensor"


def test_a_weight_with_three_dimensions_is_refused(folder: Path) -> None:
    def fold(tensors: Tensors) -> None:
        tensors[Q_A] = tensors[Q_A]._replace(shape=(8, 4, 8))

    make_adapter(folder, modules=LINEARS, edit=fold)
    assert refusal(folder).code == "wrong_shape"


def test_a_rank_of_zero_in_the_tensors_is_refused(folder: Path) -> None:
    make_adapter(folder, modules=LINEARS, ranks={Q: 0})
    assert refusal(folder).code == "wrong_shape"


# --- damaged and hostile files -------------------------------------------------------------------------------------------------------


def entry(header: dict[str, Any]) -> dict[str, Any]:
    return header[Q_A]  # type: ignore[no-any-return]


HEADER_DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape does not fit the length": lambda header: entry(header).update(shape=[8, 33]),
    "negative size": lambda header: entry(header).update(shape=[-8, -32]),
    "size that is no number": lambda header: entry(header).update(shape=[8, "32"]),
    "size that is true": lambda header: entry(header).update(shape=[True, 256]),
    "thousands of dimensions": lambda header: entry(header).update(shape=[2**62] * 5000),
    "offsets the wrong way round": lambda header: entry(header).update(
        data_offsets=entry(header)["data_offsets"][::-1]
    ),
    "offsets beyond the file": lambda header: entry(header).update(data_offsets=[10**9, 10**9 + 512]),
    "three offsets": lambda header: entry(header).update(data_offsets=[0, 512, 512]),
    "no offsets": lambda header: entry(header).pop("data_offsets"),
    "no type": lambda header: entry(header).pop("dtype"),
    "overlap": lambda header: header[Q_B].update(shape=[16, 16], data_offsets=[256, 768]),
    "entry that is no object": lambda header: header.update({Q_A: [1]}),
    "metadata that is no object": lambda header: header.update(__metadata__=["pt"]),
    "metadata with numbers": lambda header: header.update(__metadata__={"format": 5}),
    "hole": lambda header: header.pop(Q_A),
}


@pytest.mark.parametrize("damage", HEADER_DAMAGE)
def test_a_header_that_does_not_fit_its_file_is_refused(folder: Path, damage: str) -> None:
    rewrite(make_adapter(folder, modules=LINEARS), HEADER_DAMAGE[damage])
    assert refusal(folder).code == "corrupt_file"


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 100])
def test_a_file_cut_in_its_header_is_refused(folder: Path, num_bytes: int) -> None:
    weights = make_adapter(folder, modules=LINEARS) / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    assert refusal(folder).code == "corrupt_file"


def test_a_file_with_bytes_after_its_tensors_is_refused(folder: Path) -> None:
    weights = make_adapter(folder, modules=LINEARS) / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert refusal(folder).code == "corrupt_file"


def test_a_tensor_named_twice_in_the_header_is_refused(folder: Path) -> None:
    one = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    write_config(folder, LINEARS)
    write_raw(folder / WEIGHTS_FILE, f"{{{one}, {one}}}".encode(), b"\0" * 4)
    error = refusal(folder)
    assert error.code == "corrupt_file" and "twice" in str(error)


@pytest.mark.parametrize("raw", [b"[]", b"5", b"\xff{}", b"{" * 50_000, b"{}x"])
def test_a_header_that_is_no_json_object_is_refused(folder: Path, raw: bytes) -> None:
    write_config(folder, LINEARS)
    write_raw(folder / WEIGHTS_FILE, raw, b"")
    assert refusal(folder).code == "corrupt_file"


def test_a_header_larger_than_any_adapter_needs_is_not_parsed(folder: Path) -> None:
    write_config(folder, LINEARS)
    weights = folder / WEIGHTS_FILE
    weights.write_bytes((1 << 30).to_bytes(8, "little"))
    os.truncate(weights, (1 << 30) + 8)  # a sparse file
    start = time.process_time()
    assert "more than" in str(refusal(folder))
    assert time.process_time() - start < 1.0, "1 GiB of zeros was not read"


def test_hostile_names_are_cut_and_escaped_in_messages(folder: Path) -> None:
    hostile = "\x1b[2J\n" + "x" * 100_000
    make_adapter(folder, modules=LINEARS, edit=lambda tensors: reshape(tensors, hostile, (8, 32)))
    text = str(refusal(folder))
    assert len(text) < 400 and text.isprintable()


@pytest.mark.parametrize(
    "value", ["x" * 10**6, "\x00" * 10**6, 10**4000, [1] * 10**6, {"a": 1}, None, "\ud800"]
)
def test_quoting_is_short_and_printable(value: object) -> None:
    assert len(quoted(value)) <= 100 and quoted(value).isprintable()


def test_bytes_changed_at_random_never_raise_anything_else(tmp_path: Path) -> None:
    good = make_adapter(tmp_path / "good", modules=LINEARS)
    originals = {name: (good / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    model = contract()

    @settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        except AdapterRejected as error:
            assert len(str(error)) < 1000
        finally:
            (good / name).write_bytes(raw)

    attack()


# --- paths ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nowhere/at/all", "a\0b", "/" + "x" * 300, "\ud800", "/dev/null/x"])
def test_a_path_that_leads_nowhere_is_not_found(path: str) -> None:
    assert refusal(path).code == "adapter_not_found"


def test_links_in_a_circle_are_not_found(folder: Path, tmp_path: Path) -> None:
    folder.symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(folder)
    assert refusal(folder).code == "adapter_not_found"


def test_a_broken_link_to_the_weights_is_no_weights(folder: Path) -> None:
    write_config(folder, LINEARS)
    (folder / WEIGHTS_FILE).symlink_to("gone")
    assert refusal(folder).code == "no_weights"


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_unreadable(
    folder: Path, name: str, make: Callable[[Path], None]
) -> None:
    make_adapter(folder, modules=LINEARS)
    (folder / name).unlink()
    make(folder / name)
    assert refusal(folder).code == "unreadable"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_file_that_we_may_not_read_is_unreadable(folder: Path, name: str) -> None:
    (make_adapter(folder, modules=LINEARS) / name).chmod(0)
    assert refusal(folder).code == "unreadable"


def test_an_error_of_the_disk_is_unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, flags: int) -> int:
        raise OSError(5, "Input/output error")

    make_adapter(folder, modules=LINEARS)
    monkeypatch.setattr(adapter_files, "_open_at_once", fail)
    assert refusal(folder).code == "unreadable"


# --- reading -------------------------------------------------------------------------------------------------------------------------


def test_the_checksum_is_that_of_the_data_over_many_chunks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_files, "CHUNK_BYTES", 1000)
    make_adapter(folder, modules=LINEARS)
    files = inspect(folder, contract())
    buffer = bytearray(files.num_bytes)
    checksum = read(files, memoryview(buffer))
    data = (folder / WEIGHTS_FILE).read_bytes()[files.data_offset :]
    assert bytes(buffer) == data and checksum == xxh3_64_intdigest(data) % 2**63


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_files_replaced_after_inspection_are_not_read(folder: Path, name: str) -> None:
    make_adapter(folder, modules=LINEARS)
    files = inspect(folder, contract())
    other = make_adapter(folder.with_name("other"), modules=LINEARS, seed=9)
    (other / name).replace(folder / name)
    buffer = bytearray(files.num_bytes)
    with pytest.raises(AdapterRejected) as caught:
        read(files, memoryview(buffer))
    assert caught.value.code == "changed"
    assert not any(buffer), "not one byte is read of files that are others"


@pytest.mark.parametrize(
    "act",
    [
        lambda folder: (folder / WEIGHTS_FILE).write_bytes(b""),
        lambda folder: os.utime(folder / WEIGHTS_FILE, ns=(0, 0)),
        lambda folder: os.utime(folder / CONFIG_FILE, ns=(0, 0)),
        lambda folder: (folder / CONFIG_FILE).unlink(),
    ],
    ids=["weights cut", "weights touched", "config touched", "config gone"],
)
def test_files_changed_while_they_are_read_are_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(adapter_files, "CHUNK_BYTES", 1000)
    files = inspect(make_adapter(folder, modules=LINEARS), contract())
    is_first = iter([True])

    class Acting(Checksum):
        def update(self, data: bytes | memoryview) -> None:
            if next(is_first, False):
                act(folder)
            super().update(data)

    monkeypatch.setattr(adapter_files, "Checksum", Acting)
    with pytest.raises(AdapterRejected) as caught:
        read(files, memoryview(bytearray(files.num_bytes)))
    assert caught.value.code == "changed"


def test_a_file_that_ends_too_early_is_corrupt(folder: Path) -> None:
    files = inspect(make_adapter(folder, modules=LINEARS), contract())
    longer = dataclasses.replace(files, num_bytes=files.num_bytes + 10)
    with pytest.raises(AdapterRejected) as caught:
        read(longer, memoryview(bytearray(longer.num_bytes)))
    assert caught.value.code == "corrupt_file"


def test_a_file_that_is_gone_is_no_weights(folder: Path) -> None:
    files = inspect(make_adapter(folder, modules=LINEARS), contract())
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(AdapterRejected) as caught:
        read(files, memoryview(bytearray(files.num_bytes)))
    assert caught.value.code == "no_weights"


def is_finite(files: AdapterFiles, buffer: memoryview) -> None:
    check_finite(files, buffer, contract())


@pytest.mark.parametrize("step", [read, is_finite, content_hash])
def test_a_buffer_of_the_wrong_length_is_our_own_mistake(
    folder: Path, step: Callable[[AdapterFiles, memoryview], object]
) -> None:
    files = inspect(make_adapter(folder, modules=LINEARS), contract())
    with pytest.raises(ValueError, match="buffer"):
        step(files, memoryview(bytearray(files.num_bytes - 1)))


# --- finite values -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, CHUNK_ITEMS - 1, CHUNK_ITEMS, -1])
def test_one_value_that_is_not_finite_is_found_and_named(
    folder: Path, dtype: str, value: float, place: int
) -> None:
    num_in = CHUNK_ITEMS // 8 + 1  # lora_A spans two chunks
    modules = {"model.layers.0.mlp.up_proj": (num_in, 16), Q: (32, 48)}
    values = np.zeros((8, num_in), np.float32)
    values.flat[place] = value
    name = names_of("model.layers.0.mlp.up_proj")[0]

    def spoil(tensors: Tensors) -> None:
        tensors[name] = encode(values, dtype)

    make_adapter(folder, modules=modules, dtype=dtype, edit=spoil)
    error = refusal(folder, contract(modules=modules))
    assert error.code == "not_finite" and name in str(error)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("BF16", [0x7F7F, 0xFF7F, 0x0001, 0x8000]),
        ("F16", [0x7BFF, 0xFBFF, 0x0001, 0x8000]),
        ("F32", [0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x80000000]),
    ],
)
def test_the_largest_and_smallest_numbers_are_finite(folder: Path, dtype: str, bits: list[int]) -> None:
    data = np.array(bits * 64, "<u4" if dtype == "F32" else "<u2").tobytes()

    def stretch(tensors: Tensors) -> None:
        tensors[Q_A] = Tensor(dtype, (8, 32), data)

    _, buffer = load(make_adapter(folder, modules=LINEARS, dtype=dtype, edit=stretch))
    assert data in bytes(buffer)


@pytest.mark.parametrize("engine_dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@given(
    value=st.floats(0.0, 2.0**127, width=32) | st.sampled_from([65503.0, 65519.0, 65520.0, 3.38e38]),
    alpha=st.sampled_from([8, 16, 0, -4e3, 1e38]),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_overflows_in_the_engine_is_refused_and_nothing_else(
    folder: Path, engine_dtype: str, dtype: str, alpha: float, value: float
) -> None:
    """torch does here what the engine does: convert, then scale B."""
    written = torch.full((48, 8), value).to(TORCH_DTYPES[dtype])
    assume(bool(torch.isfinite(written).all()))
    in_engine = written.to(TORCH_DTYPES[engine_dtype]) * (alpha / 8)

    def stretch(tensors: Tensors) -> None:
        tensors[Q_A] = encode(np.zeros((8, 32), np.float32), dtype)
        tensors[Q_B] = Tensor(dtype, (48, 8), written.view(torch.uint8).numpy().tobytes())

    make_adapter(folder, modules={Q: LINEARS[Q]}, edit=stretch, config_overrides={"lora_alpha": alpha})
    model = contract(dtype=engine_dtype)
    if torch.isfinite(in_engine).all():
        load(folder, model)
    else:
        error = refusal(folder, model)
        assert error.code == "not_finite" and Q_B in str(error)


def test_tensors_at_odd_offsets_are_looked_at_too(folder: Path) -> None:
    def mix(tensors: Tensors) -> None:
        kept = dict(tensors)
        tensors.clear()
        odd = "model.layers.0.mlp.odd"
        tensors[names_of(odd)[0]] = encode(np.ones((1, 3), np.float32), "BF16")
        tensors[names_of(odd)[1]] = encode(np.ones((2, 1), np.float32), "BF16")
        tensors.update(kept)
        tensors[Q_A] = encode(np.full((8, 32), math.nan, np.float32), "F32")

    make_adapter(
        folder, modules=LINEARS, edit=mix, config_overrides={"rank_pattern": {"odd": 1}}, dtype="F32"
    )
    model = contract(modules={**LINEARS, "model.layers.0.mlp.odd": (3, 2)})
    files = inspect(folder, model)
    assert any(tensor.dtype == "F32" and tensor.offset % 4 for tensor in files.tensors), "the case is real"
    assert refusal(folder, model).code == "not_finite"


# --- the content's hash --------------------------------------------------------------------------------------------------------------


def hash_of(folder: Path) -> str:
    files, buffer = load(folder)
    return content_hash(files, memoryview(buffer))


def test_the_hash_is_that_of_the_content_and_of_nothing_else(tmp_path: Path) -> None:
    one = make_adapter(tmp_path / "one", modules=LINEARS, seed=1)
    two = make_adapter(tmp_path / "two", modules=LINEARS, seed=1)
    config = json.loads((two / CONFIG_FILE).read_text())
    (two / CONFIG_FILE).write_text(json.dumps(dict(reversed(config.items())), indent=7))
    os.utime(two / WEIGHTS_FILE, ns=(0, 0))
    assert hash_of(one) == hash_of(two), "path, times and the layout of the JSON do not count"
    assert re.fullmatch("[0-9a-f]{64}", hash_of(one))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"dtype": "F16"},
        {"config_overrides": {"lora_alpha": 17}},
        {"config_overrides": {"some_new_option": 1}},
    ],
)
def test_any_other_weight_or_option_is_another_hash(tmp_path: Path, change: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"modules": LINEARS, "seed": 1}
    one = make_adapter(tmp_path / "one", **plain)
    two = make_adapter(tmp_path / "two", **{**plain, **change})
    assert hash_of(one) != hash_of(two)


def test_a_weight_moved_to_another_module_is_another_hash(tmp_path: Path) -> None:
    modules = {name: (32, 32) for name in LINEARS}
    swapped = {"0.self_attn": "1.self_attn", "1.self_attn": "0.self_attn"}

    def swap(tensors: Tensors) -> None:
        rename(tensors, lambda name: re.sub(r"[01]\.self_attn", lambda match: swapped[match[0]], name))

    one = make_adapter(tmp_path / "one", modules=modules)
    two = make_adapter(tmp_path / "two", modules=modules, edit=swap)
    model = contract(modules=modules)
    hashes = {
        content_hash(files, memoryview(buffer)) for files, buffer in (load(one, model), load(two, model))
    }
    assert len(hashes) == 2, "the bytes of the data are equal, the header is not"


def test_the_hash_of_known_content_does_not_change_from_release_to_release(folder: Path) -> None:
    write_safetensors_of_zeros = {
        name: Tensor("F32", shape, bytes(4 * math.prod(shape)))
        for name, shape in {Q_A: (8, 32), Q_B: (48, 8)}.items()
    }
    folder.mkdir()
    write_safetensors(folder / WEIGHTS_FILE, write_safetensors_of_zeros)
    (folder / CONFIG_FILE).write_text('{"target_modules": ["q_proj"], "r": 8, "lora_alpha": 16}')
    raw = (folder / WEIGHTS_FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    config = b'{"lora_alpha":16,"r":8,"target_modules":["q_proj"]}'
    head = b"".join(len(part).to_bytes(8, "little") + part for part in (config, raw[8 : 8 + length]))
    expected = hashlib.sha256(hashlib.sha256(head).digest() + raw[8 + length :]).hexdigest()
    assert hash_of(folder) == expected
