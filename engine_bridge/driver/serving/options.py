"""The settings of the serving classes, and what is put under vLLM's renderer, as a node is configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_bridge.calls.context_overflow import ContextOverflow
from engine_bridge.calls.plain_content import ContentFormat
from engine_bridge.driver.apis.chat_template import chat_templates, opener_of_calls
from engine_bridge.driver.apis.content_tokens import split_contents
from engine_bridge.driver.apis.tool_calls import NO_FORM, check_reasoning_parser, install_tool_parser
from engine_bridge.driver.apis.vocabulary import refuse_unknown_tokens
from engine_bridge.driver.serving.engine_client import BridgeEngineClient
from engine_bridge.driver.serving.tokenizer_queue import NoTokenizerQueue, TokenizerQueue, be_fair
from engine_bridge.driver.vllm_api.features import TOKENIZER_TURNS
from engine_bridge.driver.vllm_api.start import Off
from engine_bridge.settings.node_config import LocalNodeConfig
from engine_bridge.settings.parser_choice import choose_reasoning_parser, choose_tool_parser


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The settings of the serving classes.

    Attributes:
        model_names: the names that requests may use for the base model; replies have the first.
        chat_template: the template's text; None: the tokenizer's template.
        default_chat_template_kwargs: arguments of the template for every conversation; those of a request win.
        chat_template_content_format: the form in which the template gets contents; auto: as vLLM reads off the template.
        api_switches: what of vLLM's API classes is switched on for every call, by their arguments' names.
        call_opener: the token by which the model begins a tool call; None: it begins one with usual tokens, or is not known to make any.
        keeps_token_ids: whether a session's prompts begin with the ids that it has, as far as they fit.
    """

    model_names: tuple[str, ...]
    model_path: str
    tool_parser: str = NO_FORM
    reasoning_parser: str = ""
    chat_template: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template_content_format: ContentFormat = "auto"
    api_switches: tuple[str, ...] = ()
    max_prompt_chars: int = 1 << 20
    call_opener: int | None = None
    context_overflow: ContextOverflow = "error"
    keeps_token_ids: bool = True


def serving_options(config: LocalNodeConfig, engine: Any, *, keeps_token_ids: bool) -> ServingOptions:
    """Return the settings of the serving classes. Raises ParserRefused for a parser that was set and cannot be used."""
    tokenizer, model = engine.renderer.get_tokenizer(), engine.model_config
    family = model.hf_config.model_type
    given, template = chat_templates(engine, config.engine.chat_template)
    reasoning = choose_reasoning_parser(config.engine.reasoning_parser, family, template)
    return ServingOptions(
        model_names=config.engine.model_names,
        model_path=config.engine.model,
        tool_parser=install_tool_parser(choose_tool_parser(config.tool_parser, family, template), tokenizer),
        reasoning_parser=check_reasoning_parser(reasoning, tokenizer),
        chat_template=given,
        call_opener=opener_of_calls(tokenizer, given),
        default_chat_template_kwargs=config.default_chat_template_kwargs,
        chat_template_content_format=config.chat_template_content_format,
        api_switches=config.api_switches,
        keeps_token_ids=keeps_token_ids,
        context_overflow=config.context_overflow,
        max_prompt_chars=config.limits.prompt_chars(model.max_model_len),
    )


def prepare_renderer(
    client: BridgeEngineClient, config: LocalNodeConfig, off: Off
) -> TokenizerQueue | NoTokenizerQueue:
    """Put our queue under vLLM's renderer, and have it refuse what the model cannot read.

    Raises NotSupported, SeamMoved where contents are to be split and cannot be.
    """
    refuse_unknown_tokens(client.renderer, client.model_config.get_vocab_size())
    queue = be_fair(client.renderer) if TOKENIZER_TURNS not in off else NoTokenizerQueue()
    if config.special_tokens_in_content == "split":
        client.continuing.known = split_contents(client.renderer, off)
    return queue
