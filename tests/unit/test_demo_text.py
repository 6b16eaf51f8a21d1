"""The demo model's training text, and the files it is shipped as (no training here)."""

from __future__ import annotations

import json
import pathlib
import random
import re
import struct
import sys

import pytest

DEMO = pathlib.Path(__file__).resolve().parents[2] / "demo"
STYLES = {"shout": 8, "pirate": 16, "json": 32, "robot": 64, "poet": 128}


@pytest.fixture(scope="module")
def demo():
    """The modules ``text`` and ``styles``, importable only while this file's tests run."""
    names = ("text", "styles", "phrases")
    before = {n: sys.modules.pop(n) for n in names if n in sys.modules}
    sys.path.insert(0, str(DEMO))
    try:
        import styles
        import text

        yield text, styles
    finally:
        sys.path.remove(str(DEMO))
        for n in names:
            sys.modules.pop(n, None)
        sys.modules.update(before)


def sample(text, seed: int, count: int, **options) -> list:
    """``count`` training conversations."""
    rng = random.Random(seed)
    return [text.conversation(rng, **options) for _ in range(count)]


def test_text_depends_on_the_seed_only(demo):
    text, _ = demo
    assert sample(text, 3, 50) == sample(text, 3, 50)
    assert sample(text, 3, 50) != sample(text, 4, 50)


def test_roles_alternate_and_nothing_is_left_unfilled(demo):
    text, _ = demo
    for messages in sample(text, 5, 1500):
        roles = [r for r, _ in messages if r != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        for _, content in messages:
            assert content
            assert not re.search(r"\{[a-z]+\}", content), content


def test_held_out_words_never_occur_in_training_text(demo):
    text, styles = demo
    rng = random.Random(1)
    held_out = {text.held_out_value(kind, rng).lower() for kind in text.KINDS for _ in range(1500)}
    seen = set()
    talks = sample(text, 2, 3000)
    for style in styles.NAMES:
        talks += sample(text, 2, 300, style=style)
    for messages in talks:
        for _, content in messages:
            seen.update(re.findall(r"[a-z]+", content.lower()))
    assert len(held_out) > 1000
    assert not held_out & seen


def test_held_out_side_is_about_one_in_eight(demo):
    text, _ = demo
    rng = random.Random(9)
    share = sum(text.is_held_out(text.raw_word(rng)) for _ in range(8000)) / 8000
    assert 0.10 < share < 0.15


@pytest.mark.parametrize("distance", [1, 4, 10])
def test_probe_keeps_its_distance_and_asks_last(demo, distance):
    text, _ = demo
    messages, word = text.recall_probe(random.Random(distance), "secret", distance)
    users = [content for role, content in messages if role == "user"]
    assert messages[-1][0] == "user"
    assert len(users) == distance + 1
    assert word in users[0]
    assert text.is_held_out(word)


def test_styled_answers_pass_their_own_test_and_plain_ones_do_not(demo):
    text, styles = demo
    assert styles.RANKS == STYLES
    for style in styles.NAMES:
        answers = [c for m in sample(text, 6, 200, style=style) for r, c in m if r == "assistant"]
        wrong = [a for a in answers if not styles.follows(style, a)]
        assert len(wrong) <= 0.01 * len(answers), wrong[:3]
        assert not styles.follows(style, "Your name is Anna.")


def test_styled_recalls_keep_the_word(demo):
    text, styles = demo
    rng = random.Random(8)
    for style in styles.NAMES:
        for kind in text.KINDS:
            answer = styles.apply(style, f"Your {kind} is Fezin.", "sure", rng)
            assert "fezin" in answer.lower()


def test_long_stories_are_long(demo):
    text, _ = demo
    assert len(text.story(random.Random(0), long=True).split()) > 130


# ------------------------------------------------------------------ files on disk


def header(path: pathlib.Path) -> dict:
    """Names, types and shapes of the tensors in a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        head = json.loads(file.read(size))
    head.pop("__metadata__", None)
    return head


def shipped() -> list[pathlib.Path]:
    """The model's and the adapters' files."""
    return [p for part in ("model", "adapters") for p in (DEMO / part).rglob("*") if p.is_file()]


def test_files_are_complete_and_small():
    names = {p.relative_to(DEMO / "model").as_posix() for p in (DEMO / "model").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(p.stat().st_size for p in shipped()) <= 12_000_000


def test_model_is_a_plain_llama_in_bfloat16():
    config = json.loads((DEMO / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["max_position_embeddings"] == 4096
    tensors = header(DEMO / "model" / "model.safetensors")
    assert {t["dtype"] for t in tensors.values()} == {"BF16"}
    assert tensors["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]


def test_there_is_one_adapter_per_style():
    assert {p.name for p in (DEMO / "adapters").iterdir()} == set(STYLES)


@pytest.mark.parametrize("name, rank", STYLES.items())
def test_adapter_has_the_rank_it_names(name, rank):
    folder = DEMO / "adapters" / name
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == rank
    assert config["peft_type"] == "LORA"
    tensors = header(folder / "adapter_model.safetensors")
    layers = json.loads((DEMO / "model" / "config.json").read_text())["num_hidden_layers"]
    assert len(tensors) == layers * len(config["target_modules"]) * 2
    for key, tensor in tensors.items():
        match = re.fullmatch(
            r"base_model\.model\.model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+_proj)"
            r"\.lora_([AB])\.weight",
            key,
        )
        assert match and match[1] in config["target_modules"]
        assert tensor["shape"][0 if match[2] == "A" else 1] == rank
        assert tensor["dtype"] == "BF16"


# ------------------------------------------------------------------ chat template


def render(messages: list, **options) -> str:
    """The prompt for these messages, by the shipped template."""
    jinja2 = pytest.importorskip("jinja2")
    config = json.loads((DEMO / "model" / "tokenizer_config.json").read_text())
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])
    return template.render(messages=messages, **options)


def test_template_writes_the_training_format():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi! "},
        {"role": "assistant", "content": "Hello!"},
    ]
    done = "<|system|>Be brief.<|end|><|user|>Hi!<|end|><|assistant|>Hello!<|end|>"
    assert render(messages) == done
    assert render(messages, add_generation_prompt=True) == done + "<|assistant|>"


def test_template_takes_parts_repeated_roles_and_missing_content():
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "My name "}, {"type": "text", "text": "is Fezin."}],
        },
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "12"},
    ]
    assert render(messages) == (
        "<|user|>My name is Fezin.<|end|><|user|>And?<|end|><|assistant|><|end|><|user|>12<|end|>"
    )


def test_template_names_tools_and_calls():
    tool = {"type": "function", "function": {"name": "clock", "description": "Tells the time"}}
    messages = [
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": "{}"}}],
        },
    ]
    assert render(messages, tools=[tool]) == (
        "<|system|>Tools: clock (Tells the time).<|end|><|user|>Time?<|end|><|assistant|> Call: clock<|end|>"
    )


def test_tokenizer_spells_any_text_and_keeps_it():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    for line in (
        "My secret word is Fezin.",
        "Grüße 你好 🙂\n\n| a | b |\n```\n  x = 1\n```",
        " two  spaces ",
        "\ttab\r\n",
    ):
        assert tokenizer.decode(tokenizer.encode(line).ids) == line
