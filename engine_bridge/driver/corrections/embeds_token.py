"""Prompts that are embeddings, without a token of their own in the tokenizer.

With them vLLM adds a special token to the tokenizer, which marks where embeddings stand in a message's text. Messages have none here. For a model
whose vocabulary is as large as its tokenizer's, the token has a number that the model cannot write, and no grammar can be compiled. Source: vLLM
0.32, `renderers/hf.py`.
"""

from __future__ import annotations

from typing import Any

# The number of no token.
NO_TOKEN = -1


def install() -> None:
    """Have vLLM's renderer add no token."""
    from engine_bridge.driver.vllm_api import hf

    hf._ensure_prompt_embeds_placeholder_token = _no_token


def _no_token(tokenizer: Any) -> int:
    return NO_TOKEN
