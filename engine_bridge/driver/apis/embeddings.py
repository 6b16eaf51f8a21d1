"""Prompts that are embeddings, checked before vLLM reads them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch

from engine_bridge.calls.prompt_embeds import FIELD, file_of, unusable
from engine_bridge.protocol.errors import InvalidRequest


def check_embeddings(values: Iterable[Any], model_config: Any) -> None:
    """Check the values of `prompt_embeds`, which are decoded for it. Takes milliseconds for each MiB: not on the event loop.

    Raises:
        InvalidRequest: this engine takes none, a value is no plain tensor of finite numbers, or its memory would be larger than its file, or longer
            than the context.
    """
    if not model_config.enable_prompt_embeds:
        raise InvalidRequest(
            f"This server takes no `{FIELD}`. Its operator can allow them with --enable-prompt-embeds.",
            param=FIELD,
        )
    for value in values:
        _check(file_of(value), model_config.max_model_len, model_config.dtype)


def _check(file: bytes, max_tokens: int, dtype: torch.dtype) -> None:
    try:
        tensor = torch.load(io.BytesIO(file), weights_only=True, map_location="cpu")
    except Exception as error:
        raise unusable("cannot be read as a file of torch.save") from error
    if not isinstance(tensor, torch.Tensor) or tensor.dim() not in (2, 3):
        raise unusable("is no matrix")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise unusable("repeats the same numbers in place of holding them")
    if not tensor.to(dtype).isfinite().all():
        raise unusable("has numbers that are infinite or too large for this model, or are no numbers")
    if tensor.shape[-2] >= max_tokens:
        raise InvalidRequest(
            f"`{FIELD}` has {tensor.shape[-2]:,} tokens; the model reads at most {max_tokens:,}, its answer included.",
            param=FIELD,
            code="prompt_too_long",
        )
