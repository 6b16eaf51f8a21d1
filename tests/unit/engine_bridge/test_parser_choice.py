import json
from pathlib import Path

from engine_bridge.settings import parser_choice
from engine_bridge.settings.parser_choice import choose_reasoning_parser, choose_tool_parser

DEMO = Path(__file__).parents[3] / "demo" / "model"
HERMES = "{% if tools %}<tools>{{ tools }}</tools> Answer with <tool_call>{...}</tool_call>{% endif %}"


TOOL_PARSERS = [
    ("qwen3", HERMES + "<think>{{ enable_thinking }}", "hermes"),
    ("qwen3_next", "tools <tool_call><function=x><parameter=y>", "qwen3_coder"),
    ("llama", "tools <|python_tag|> Environment: ipython", "llama3_json"),
    ("llama", 'tools Environment: ipython {"name": x, "parameters": y}', "llama3_json"),
    ("llama4", "tools [func_name1(params_name1=params_value1)]", "llama4_pythonic"),
    ("deepseek_v3", "tools <｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
    ("deepseek_v3", "tools <｜tool▁calls▁begin｜> thinking </think>", "deepseek_v31"),
    ("glm4_moe", "tools <tool_call>{name}<arg_key>", "glm47"),
    ("hy_v3", "tools <tool_calls><tool_call>name<tool_sep><arg_key>", "hy_v3"),
    ("bailing_hybrid", "tools <tool_call>{name}<arg_key>", "ling3"),
    ("laguna", "tools <tool_call>{name}<arg_key>", "poolside_v1"),
    ("plamo3", "tools <|plamo:begin_tool_requests:plamo|>", "plamo3"),
    ("k2_horizon", "tools <ifm|tool_calls><ifm|tool_call>", "k2_horizon"),
    ("deepseek_v3", """tools {{ {'role': 'function call'}.role }}<|role_sep|>""", "gigachat3"),
    ("gigachat3_5", "tools <|role_sep|> {{ messages[0]['role'] == 'function call' }}", ""),
    ("gpt_oss", "no word of them", "openai"),
    ("granitemoehybrid", "tools <tool_call>", "granite4"),
    ("granitemoehybrid", "tools <tool_call><function=x><parameter=y>", "qwen3_coder"),
    ("mimo_v2", "tools <tool_call><function=x><parameter=y>", "mimo"),
    ("mimo", HERMES, "hermes"),
    ("phi4mm", "{% if message['tools'] %}<|tool|>", "phi4_mini_json"),
]
REASONING_PARSERS = [
    ("qwen3", HERMES + "<think>{{ enable_thinking }}", "qwen3"),
    ("qwen2", HERMES + "<|assistant|><think>", "deepseek_r1"),
    ("deepseek_v3", "{% if thinking %}<think>{% else %}</think>{% endif %}", "deepseek_v3"),
    ("glm4_moe", "<think></think>", "glm45"),
    ("hy_v3", "<think>{{ reasoning_effort }}", "hy_v3"),
    ("bailing_hybrid", "<think> <arg_key>", "ling3"),
    ("bailing_hybrid", "<think>", "deepseek_r1"),
    ("minicpmv4_6", "<think>{{ enable_thinking }}", "minicpmv"),
    ("granite", "Here is my thought process <think>", "granite"),
    ("granite", "<think>{{ enable_thinking }}", "granite_thinking_parser"),
    ("granite", "{% if thinking %}<think></think> <response></response>", "deepseek_r1"),
    ("mimo_v2", "<think>{{ enable_thinking }}", "mimo"),
    ("nemotron_h_puzzle", "<think>{{ enable_thinking }}", "nemotron_v3"),
    ("qwen2", HERMES, ""),
]


def test_tool_calls_and_reasoning_are_read_as_the_family_writes_them() -> None:
    for choose, cases in ((choose_tool_parser, TOOL_PARSERS), (choose_reasoning_parser, REASONING_PARSERS)):
        for model_type, template, parser in cases:
            assert choose("auto", model_type, template).name == parser, (model_type, template)


def test_a_setting_goes_before_the_family_and_can_switch_it_off() -> None:
    assert choose_tool_parser("xlam", "qwen2", HERMES).name == "xlam"
    assert choose_tool_parser("none", "qwen2", HERMES).name == ""
    assert choose_reasoning_parser("", "gpt_oss", "").name == ""
    choice = choose_tool_parser("auto", "llama", "{{ messages }}")
    assert (choice.name, choice.why) == ("", "its chat template has no form of one")


def test_every_family_is_reached() -> None:
    """None is hidden by one before it."""
    choices = [(choose_tool_parser, family) for family in parser_choice.TOOL_FAMILIES]
    choices += [(choose_reasoning_parser, family) for family in parser_choice.REASONING_FAMILIES]
    for choose, family in choices:
        template = " ".join((*family.marks, "tools"))
        assert choose("auto", (*family.model_types, "llama")[0], template).name == family.parser, family


def test_only_calls_of_the_demo_models_template_are_held_to_the_tools() -> None:
    template = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
    demo = choose_tool_parser("auto", "llama", template)
    assert demo.name == "hermes" and demo.holds_calls
    assert not choose_tool_parser("auto", "qwen2", HERMES).holds_calls
