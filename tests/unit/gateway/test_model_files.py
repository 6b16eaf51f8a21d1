"""What is wrong with a model's folder is found before vLLM is asked, which would say it late and in other words."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.commands.doctor import at_start
from gateway.settings.config import Config
from gateway.settings.model_files import fault_of, weight_bytes_of

HEADER = json.dumps({"__metadata__": {}, "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER.encode() + bytes(16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder that is in order, as far as can be seen without its weights."""
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text('{"model_type": "llama"}')
    (found / "model.safetensors").write_bytes(WEIGHTS)
    (found / "tokenizer.json").write_text('{"model": {}}\n')
    (found / "tokenizer_config.json").write_text("{}")
    return found


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes]) and None


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def headed(text: str) -> str:
    """A file of tensors with this header, of up to 127 bytes."""
    return f"{chr(len(text))}{chr(0) * 7}{text}"


ODD_INDEXES = ("[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}')
ODD_HEADERS = ("[]", '{"a": 1}', '{"a": {}}', '{"a": {"data_offsets": [0]}}', '{"a": {"data_offsets": "ab"}}')
INDEX = json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (written("config.json", '{"model_type":'), "config.json is not JSON"),
        (written("config.json", "[]"), "config.json is not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "model-Q4_K_M.gguf") and None,
            "has no weights .*: GGUF files are not read",
        ),
        (cut("model.safetensors", len(WEIGHTS) - 1), f"has {len(WEIGHTS) - 1} of {len(WEIGHTS)} bytes"),
        (cut("model.safetensors", 20), "cut off: it has 20 bytes"),
        (cut("model.safetensors", 0), "cut off: it has 0 bytes"),
        (written("model.safetensors", "version https://git-lfs.github.com/spec/v1"), "git lfs pull"),
        (written("model.safetensors.index.json", INDEX), "lacks 1 of the files .* model-2.safetensors"),
        *((written("model.safetensors.index.json", text), "does not name the files") for text in ODD_INDEXES),
        *((written("model.safetensors", headed(text)), "is no safetensors file") for text in ODD_HEADERS),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
        (written("tokenizer.json", "{}"), "tokenizer.json holds no tokenizer"),
        (cut("tokenizer.json", 9), "tokenizer.json holds no tokenizer"),
    ],
)
def test_each_fault_is_a_problem_of_the_start_and_of_the_doctor(
    folder: Path, spoil: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    settings = {"model": str(folder), "device": "cpu", "data_dir": tmp_path}
    assert at_start(Config(**settings))[0] == []
    spoil(folder)
    (problem,) = at_start(Config(**settings))[0]
    assert re.search(says, problem.problem)
    assert "--model FOLDER" in problem.remedy


def test_what_comes_from_elsewhere_is_not_asked_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").unlink()
    elsewhere = ("load_format=dummy", "tokenizer=/somewhere/else", "hf_config_path=/somewhere/else")
    config = Config(model=str(folder), device="cpu", data_dir=tmp_path, engine_args=elsewhere)
    assert at_start(config)[0] == []


@pytest.mark.parametrize("name", ["tekken.json", "spiece.model", "vocab.json", "qwen.tiktoken"])
def test_a_tokenizer_may_come_in_other_forms(folder: Path, name: str) -> None:
    (folder / "tokenizer.json").rename(folder / name)
    assert fault_of(folder) == ""


def test_a_model_may_come_in_mistrals_own_format(folder: Path, tmp_path: Path) -> None:
    for old, new in {
        "config.json": "params.json",
        "model.safetensors": "consolidated.safetensors",
        "tokenizer.json": "tekken.json",
    }.items():
        (folder / old).rename(folder / new)
    config = Config(model=str(folder), device="cpu", data_dir=tmp_path)
    assert at_start(config)[0] == []
    (folder / "params.json").write_text("{")
    assert "params.json is not JSON" in at_start(config)[0][0].problem
    (folder / "params.json").unlink()
    assert "neither config.json nor params.json" in at_start(config)[0][0].problem


def test_weights_in_both_formats_are_loaded_from_one(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(WEIGHTS)
    assert weight_bytes_of(folder) == len(WEIGHTS)
    (folder / "pytorch_model.bin").write_bytes(bytes(len(WEIGHTS) + 1))
    assert weight_bytes_of(folder) == len(WEIGHTS) + 1, "one form of two is loaded"
