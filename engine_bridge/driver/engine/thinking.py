"""How vLLM ends a thought whose budget of tokens is spent. The engine is built with it, so it is found out before."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from engine_bridge.driver.apis.chat_template import own_template
from engine_bridge.settings.parser_choice import choose_reasoning_parser

log = logging.getLogger(__name__)


def reasoning_config(args: Any, wished: str, given: str | None) -> Any | None:
    """Return vLLM's `ReasoningConfig` for an engine with these `EngineArgs`; None where no thought of its model can be ended by force.

    wished: the operator's choice of a reasoning parser: AUTO, NONE or a name. given: the operator's chat template; None: the model's own.
    """
    from engine_bridge.driver.vllm_api import ReasoningConfig, cached_tokenizer_from_config

    try:
        model = args.create_model_config()
        template = given or own_template(cached_tokenizer_from_config(model))
        name = choose_reasoning_parser(wished, model.hf_config.model_type, template).name
        found = args.reasoning_config
        if found is None and not name:
            return None
        if found is None:
            found = ReasoningConfig(reasoning_parser=name)
        elif not found.reasoning_parser:  # of the operator's own words
            found = replace(found, reasoning_parser=name)
        found.initialize_token_ids(model)
    except Exception as error:
        # What stands in the way of serving is said when the engine is built: here it costs the budgets alone.
        log.info("budgets for thinking are ignored: %s", type(error).__name__)
        return None
    return found if found.enabled else None
