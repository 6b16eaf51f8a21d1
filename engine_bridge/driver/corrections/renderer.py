"""What vLLM's renderer does otherwise where it and the engine are one process.

Source: vLLM 0.32, `renderers/hf.py`, `renderers/base.py` and `config/vllm.py`.
"""

from __future__ import annotations

from typing import Any

# The number of no token.
NO_TOKEN = -1


def add_no_token() -> None:
    """Have the renderer add no token to the tokenizer for prompts that are embeddings.

    vLLM's token marks where embeddings stand in a message's text. Messages have none here. For a model whose vocabulary is as large as its
    tokenizer's, the token has a number that the model cannot write, and no grammar can be compiled.
    """
    from engine_bridge.driver.vllm_api import hf

    hf._ensure_prompt_embeds_placeholder_token = lambda tokenizer: NO_TOKEN


def take_no_embeddings() -> None:
    """Have engines with a connector take pictures, or none, as those without one do.

    vLLM believes that others have computed the pictures of an engine with a connector, and gets every model ready for what they send, also one that
    may get no pictures: it is no model of text alone then, and Mistral's own format of pictures (Pixtral) goes over the limit of none at the start.
    """
    from engine_bridge.driver.vllm_api import VllmConfig

    VllmConfig._resolve_mm_embedding_inputs = lambda config: None


def send_pictures_whole(engine: Any) -> None:
    """Have an engine's renderer keep the pictures that it has read, and send them whole with each prompt.

    It remembers which pictures the engine has, and sends those by name alone. It counts a picture as sent once it is read, but the prompt may still
    be refused (too long), cancelled, or rendered for its length only; the next request with that picture fails then. In one process a picture that is
    sent with each request costs nothing.
    """
    renderer = engine.renderer
    renderer._mm_processor_cache = renderer._mm_processor_only_cache
