"""The parser that separates a model's reasoning from its answer."""

from __future__ import annotations

from typing import Any

from engine_bridge.driver.vllm_api import (
    ReasoningParserManager,
)


def use_reasoning_parser(engine: Any, name: str) -> None:
    """Make grammars begin where the reasoning ends, not at the first token. On the engine thread, while no request runs.

    Args:
        engine: an in-process `LLMEngine`.
        name: the name of vLLM's parser; "" for a model that does not reason.
    """
    manager = engine.engine_core.engine_core.structured_output_manager
    manager.reasoner_cls = ReasoningParserManager.get_reasoning_parser(name) if name else None
