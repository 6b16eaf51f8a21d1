"""Rerankers that are models for text: what vLLM has to be told of them."""

from __future__ import annotations

import logging
import re
from typing import Any

log = logging.getLogger(__name__)

# The form in which these models were trained to read a query and a text, and the words between which they choose. Source: their model cards.
_QWEN3_TEMPLATE = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction | default("Given a web search query, retrieve relevant passages that answer the query", true) }}
<Query>: {{ messages[0].content }}
<Document>: {{ messages[1].content }}<|im_end|>
<|im_start|>assistant
<think>

</think>{{ "\n\n" }}"""
_QWEN3_OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
_QWEN3_NAME = re.compile("qwen3-reranker", re.IGNORECASE)


def score_template(args: Any, config: Any, given: str | None) -> str | None:
    """Return the template by which a query and a text are put together; None: as vLLM does without one.

    Qwen3's rerankers come as models for text, which vLLM takes for ones that make embeddings. Unless the operator says otherwise, `args` are
    completed so that they score as they were trained to. Any other model for text is served as it is, which the log says.

    Args:
        args: vLLM's arguments, which may be changed.
        config: what vLLM makes of them.
        given: the operator's template.
    """
    (architecture,) = config.model_config.hf_config.architectures[:1] or ("",)
    if args.hf_overrides or not architecture.endswith("ForCausalLM"):
        return given
    if architecture == "Qwen3ForCausalLM" and _QWEN3_NAME.search(args.model):
        args.hf_overrides = dict(_QWEN3_OVERRIDES)
        return given or _QWEN3_TEMPLATE
    log.warning(
        "%s is a model for text: its scores are how alike the embeddings are that vLLM makes of it. If it was trained to score by a word, "
        "say by which: docs/operations/models.md has the settings",
        args.served_model_name,
    )
    return given
