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
    """The modules ``text``, ``styles`` and ``tool_talks``, importable only while this file's tests run."""
    names = ("text", "styles", "phrases", "tool_talks", "check_tools")
    before = {n: sys.modules.pop(n) for n in names if n in sys.modules}
    sys.path.insert(0, str(DEMO))
    try:
        import styles
        import text
        import tool_talks

        yield text, styles, tool_talks
    finally:
        sys.path.remove(str(DEMO))
        for n in names:
            sys.modules.pop(n, None)
        sys.modules.update(before)


def sample(text, seed: int, count: int, **options) -> list:
    """``count`` training conversations."""
    rng = random.Random(seed)
    return [text.conversation(rng, **options) for _ in range(count)]


def test_held_out_words_never_occur_in_training_text(demo):
    text, styles, _ = demo
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


@pytest.mark.parametrize("distance", [1, 4, 10])
def test_probe_keeps_its_distance_and_asks_last(demo, distance):
    text, _, _ = demo
    messages, word = text.recall_probe(random.Random(distance), "secret", distance)
    users = [content for role, content in messages if role == "user"]
    assert messages[-1][0] == "user"
    assert len(users) == distance + 1
    assert word in users[0]
    assert text.is_held_out(word)


def test_styled_answers_pass_their_own_test_and_plain_ones_do_not(demo):
    text, styles, _ = demo
    assert styles.RANKS == STYLES
    for style in styles.NAMES:
        answers = [c for m in sample(text, 6, 200, style=style) for r, c in m if r == "assistant"]
        wrong = [a for a in answers if not styles.follows(style, a)]
        assert len(wrong) <= 0.01 * len(answers), wrong[:3]
        assert not styles.follows(style, "Your name is Anna.")


# ------------------------------------------------------------------ files on disk


def header(path: pathlib.Path) -> dict:
    """Names, types and shapes of the tensors in a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        head = json.loads(file.read(size))
    head.pop("__metadata__", None)
    return head


def test_the_model_is_a_plain_llama_and_all_weights_are_in_bfloat16():
    config = json.loads((DEMO / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["max_position_embeddings"] == 4096
    found = {path.parent.name: header(path) for path in DEMO.glob("*/**/*.safetensors")}
    assert found.keys() == {"model", *STYLES}
    assert {t["dtype"] for tensors in found.values() for t in tensors.values()} == {"BF16"}
    embeddings = found["model"]["model.embed_tokens.weight"]
    assert embeddings["shape"] == [config["vocab_size"], config["hidden_size"]]


# ------------------------------------------------------------------ chat template


def render(messages: list, **options) -> str:
    """The prompt for these messages, by the shipped template."""
    jinja2 = pytest.importorskip("jinja2")
    config = json.loads((DEMO / "model" / "tokenizer_config.json").read_text())
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    # As transformers has it: jinja2's own sorts keys and writes quotes for HTML.
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(config["chat_template"])
    return template.render(messages=messages, **options)


def test_template_writes_tools_calls_and_results_as_in_the_training_text(demo):
    _, _, tool_talks = demo
    for seed in range(30):
        rng = random.Random(seed)
        uses = tool_talks.uses(rng, 3)
        use = rng.choice(uses)
        messages = [
            {"role": "user", "content": use.question},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "function": {"name": use.name, "arguments": use.arguments}}
                ],
            },
            {"role": "tool", "content": use.result},
            {"role": "assistant", "content": use.answer},
        ]
        talk = [
            ("system", tool_talks.offered(uses)),
            ("user", use.question),
            ("assistant", use.call),
            ("user", tool_talks.result_of(use.result)),
            ("assistant", use.answer),
        ]
        trained = "".join(f"<|{role}|>{content}<|end|>" for role, content in talk)
        assert render(messages, tools=[use.tool() for use in uses]) == trained


def test_template_shows_required_arguments_and_the_first_line_of_a_description():
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}}
    function = {
        "name": "forecast",
        "description": "Tells the weather.\n\nArgs: many",
        "parameters": {"type": "object", "properties": properties, "required": ["city", "days"]},
    }
    line = '{"name": "forecast", "arguments": {"city": "text", "days": number}} Tells the weather.'
    bare = {"name": "now", "description": None, "parameters": None}
    tools = [{"type": "function", "function": function}, {"type": "function", "function": bare}]
    assert render([], tools=tools) == (
        f'<|system|>Tools:\n{line}\n{{"name": "now", "arguments": {{}}}}<|end|>'
    )
    call = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert render([{"role": "assistant", "content": "", "tool_calls": [call]}]) == (
        '<|assistant|><tool_call>{"name": "now", "arguments": {}}</tool_call><|end|>'
    )


def test_tools_of_the_measurement_are_unknown_to_the_training_text(demo):
    text, _, tool_talks = demo
    rng = random.Random(4)
    trained = "".join(content for _ in range(600) for _, content in tool_talks.conversation(rng)).lower()
    words = set(re.findall("[a-z]+", trained))
    for _ in range(200):
        for use in tool_talks.uses(rng, 4, held_out=True):
            values = [v.lower() for v in use.arguments.values() if isinstance(v, str)]
            assert all(text.is_held_out(value) for value in values)
            assert not words & set(values)


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
