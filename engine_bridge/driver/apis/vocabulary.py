"""The token ids that a model knows: some tokenizers have more, such as special tokens that were added without training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)

# vLLM's table of embeddings is so many rows, or a multiple of them, so it has room for some tokens more than a model's configuration says.
# Source: vLLM 0.32, `DEFAULT_VOCAB_PADDING_SIZE`.
_ROWS = 64


def refuse_unknown_tokens(renderer: Any, vocab_size: int) -> None:
    """Make a vLLM renderer refuse prompts with tokens that the model has no embedding for, where its tokenizer has such tokens.

    vLLM lets in what the tokenizer knows, and the step that looks the token up fails, and with it all answers. Models that read pictures are left as
    they are: the tokens that stand for pictures are not looked up. vocab_size: the number of tokens of the model's configuration.
    """
    from engine_bridge.driver.vllm_api import VLLMValidationError

    num_rows = -(-vocab_size // _ROWS) * _ROWS
    tokenizer = renderer.get_tokenizer()
    if renderer.mm_processor is not None or tokenizer.max_token_id < num_rows:
        return
    log.warning(
        "the tokenizer has tokens up to number %s, and the model's are below %s: prompts with others are refused",
        tokenizer.max_token_id,
        vocab_size,
    )
    validate = renderer.validate_token_ids

    def validate_token_ids(token_ids: Sequence[int], **options: Any) -> None:
        """Raise vLLM's error for a token that is not the model's."""
        validate(token_ids, **options)
        highest = max(token_ids, default=0)
        if highest >= num_rows:
            raise VLLMValidationError(
                f"Token id {highest} is out of vocabulary: the model has tokens below {vocab_size}", **options
            )

    renderer.validate_token_ids = validate_token_ids
