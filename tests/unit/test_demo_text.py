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


def test_text_depends_on_the_seed_only(demo):
    text, _, _ = demo
    assert sample(text, 3, 50) == sample(text, 3, 50)
    assert sample(text, 3, 50) != sample(text, 4, 50)


def test_roles_alternate_and_nothing_is_left_unfilled(demo):
    text, _, _ = demo
    for messages in sample(text, 5, 1500):
        roles = [r for r, _ in messages if r != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        for _, content in messages:
            assert content
            assert not re.search(r"\{[a-z]+\}", content), content


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


def test_held_out_side_is_about_one_in_eight(demo):
    text, _, _ = demo
    rng = random.Random(9)
    share = sum(text.is_held_out(text.raw_word(rng)) for _ in range(8000)) / 8000
    assert 0.10 < share < 0.15


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


def test_styled_recalls_keep_the_word(demo):
    text, styles, _ = demo
    rng = random.Random(8)
    for style in styles.NAMES:
        for kind in text.KINDS:
            answer = styles.apply(style, f"Your {kind} is Fezin.", "sure", rng)
            assert "fezin" in answer.lower()


def test_long_stories_are_long(demo):
    text, _, _ = demo
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


def test_clients_that_name_no_temperature_get_the_one_that_spells_words_right():
    generation = json.loads((DEMO / "model" / "generation_config.json").read_text())
    assert 0 < generation["temperature"] <= 0.4


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
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    # As transformers has it: jinja2's own sorts keys and writes quotes for HTML.
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(config["chat_template"])
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
        "<|user|>My name is Fezin.<|end|><|user|>And?<|end|><|assistant|><|end|>"
        "<|user|><tool_response>12</tool_response><|end|>"
    )


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


def test_tools_of_the_served_measurement_have_names_that_no_tool_of_the_training_text_has(demo):
    _, _, tool_talks = demo
    import check_tools

    names, arguments = set(), set()
    for seed in range(1500):
        for use in tool_talks.uses(random.Random(seed), 4):
            names.add(use.name)
            arguments |= use.arguments.keys()
    tools = check_tools.TOOLS | check_tools.FRESH_TOOLS
    assert len(names) > 1500 and not names & tools.keys()
    assert not arguments & {key for _, kinds in tools.values() for key in kinds}
    asked = [*check_tools.QUESTIONS, *check_tools.FRESH_QUESTIONS, *check_tools.COMMON_QUESTIONS]
    tools |= check_tools.COMMON_TOOLS
    assert all(tools[name][1].keys() == values.keys() for _, name, values, _, _ in asked)


def test_a_tool_that_is_not_offered_is_not_called(demo):
    _, _, tool_talks = demo
    for seed in range(300):
        talk = tool_talks.conversation(random.Random(seed))
        names = re.findall(r'^\{"name": "(\w+)"', talk[0][1], flags=re.M)
        for role, content in talk:
            if role == "assistant" and content.startswith(tool_talks.CALL):
                call = json.loads(content.removeprefix(tool_talks.CALL).removesuffix(tool_talks.CALL_END))
                assert call["name"] in names


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
