"""A chat template that cannot be read is found when the server starts, not by the first conversation."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.calls.template_rules import TemplateRules
from engine_bridge.driver.apis.chat_template import PLAIN, chat_templates, opener_of_calls, rules_of
from engine_bridge.driver.pooling.engine import PoolingDriver
from engine_bridge.policy.limits.model_support import UnusableModel
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.settings.engine_config import EngineConfig
from engine_bridge.settings.parser_choice import choose_tool_parser

DEMO = Path(__file__).parents[3] / "demo/model"
SOUND = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% break %}{% endfor %}"
BROKEN = "{% for message in messages %}\n{{ message.content "


def engine(own: Any, special: tuple[str, ...] = ()) -> Any:
    """An engine of vLLM's with a tokenizer that has this template and these special tokens."""
    tokenizer = SimpleNamespace(chat_template=own, all_special_tokens=special)
    return SimpleNamespace(renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer))


def test_a_template_that_can_be_read_is_taken() -> None:
    assert chat_templates(engine(SOUND), None) == (None, SOUND)
    assert chat_templates(engine(BROKEN), SOUND) == (SOUND, SOUND)


def test_the_operators_template_is_refused_with_the_line() -> None:
    with pytest.raises(InvalidRequest, match=r"--chat-template: .* line 2: "):
        chat_templates(engine(SOUND), BROKEN)
    scores = EngineConfig(model=str(DEMO), served_model_name="scores", chat_template=BROKEN)
    with pytest.raises(UnusableModel, match=r"--rerank-chat-template: .* line 2: "):
        PoolingDriver(scores, "rerank")


def test_a_plain_template_stands_in_for_a_models_that_cannot_be_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert chat_templates(engine(BROKEN), None) == (PLAIN, PLAIN)
    assert "line 2" in caplog.text and "--chat-template FILE" in caplog.text


def test_of_several_templates_all_tell_how_the_model_writes_calls() -> None:
    given, template = chat_templates(engine({"default": SOUND, "tool_use": "<tool_call>"}), None)
    assert given is None
    assert choose_tool_parser("auto", "llama", template).name == "hermes"


@pytest.mark.parametrize(
    ("own", "default"), [(SOUND, SOUND), ("{{ tools[0] + messages[0].content }}", PLAIN)]
)
def test_a_template_for_calls_with_tools_alone_stays_theirs(own: str, default: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = {"tool_use": own}
    found = SimpleNamespace(renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer))
    given, template = chat_templates(found, None)
    assert given is None and template.startswith(own)
    assert tokenizer.get_chat_template(tools=[{}]) == own
    assert tokenizer.get_chat_template() == default


def test_without_a_template_special_tokens_tell_how_the_model_writes_calls() -> None:
    given, template = chat_templates(engine(None, ("[INST]", "[TOOL_CALLS]")), None)
    assert given is None
    assert choose_tool_parser("auto", "mistral", template).name == "mistral"


EACH = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
SYSTEM_FIRST = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
)
SILENT = "{% for message in messages %}{% if loop.first or message.role != 'system' %}{{ message.content }}{% endif %}{% endfor %}"
IN_TURN = (
    "{% set rest = messages %}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}{% endif %}"
    "{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn!') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)
NO_SYSTEM = "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no!') }}{% endif %}{{ message.content }}{% endfor %}"
PARTS = (
    "{% for message in messages %}{% for part in message.content %}{{ part['text'] }}{% endfor %}{% endfor %}"
)
DEVELOPER = "{% for message in messages %}{{ 'system' if message.role == 'developer' else message.role }}{{ message.content }}{% endfor %}"
TWO_ROLES = "{% for message in messages %}{% if message.role in ('user', 'system') %}{{ message.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (EACH, TemplateRules("anywhere", False)),
        (SYSTEM_FIRST, TemplateRules("first", False)),
        (SILENT, TemplateRules("first", False)),
        (IN_TURN, TemplateRules("first", False, alternates=True)),
        (NO_SYSTEM, TemplateRules("nowhere", False)),
        (PARTS, TemplateRules("anywhere", False)),
        (DEVELOPER, TemplateRules("anywhere", True)),
        (TWO_ROLES, TemplateRules("anywhere", False)),
        ("{{ messages | length }}", TemplateRules("anywhere", True)),
    ],
)
def test_a_template_shows_what_it_takes(template: str, expected: TemplateRules) -> None:
    from transformers import AutoTokenizer

    assert rules_of(AutoTokenizer.from_pretrained(DEMO), template) == expected


CALLS_LATER = "{% for message in messages %}<|user|>{{ message.content }}{% if message.tool_calls %}\n\n<tool_call>{% endif %}{% endfor %}"
CALLS_AS_TEXT = "{% for message in messages %}{{ message.content or '{\"name\"' }}{% endfor %}"
CALLS_END_OTHERWISE = "{% for message in messages %}{{ message.content }}{{ '<|end|>' if message.tool_calls else '.' }}{% endfor %}"
OPENS_BOTH = "{% for message in messages %}{{ message.content or 'a' }}{% endfor %}<tool_call>"


@pytest.mark.parametrize(
    ("template", "opener"),
    [
        (None, "<tool_call>"),
        (CALLS_LATER, "<tool_call>"),
        (CALLS_AS_TEXT, None),
        (CALLS_END_OTHERWISE, None),
        (OPENS_BOTH, None),
        (EACH, None),
        (PLAIN, None),
        ("{{ raise_exception('no calls!') }}", None),
    ],
)
def test_a_template_shows_by_which_token_a_call_begins(template: str | None, opener: str | None) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    expected = tokenizer.convert_tokens_to_ids(opener) if opener else None
    assert opener_of_calls(tokenizer, template) == expected
