"""The chat template of a model, and a plain one for models that have none: base models, which were made to continue a text."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def chat_templates(engine: Any, given: str | None) -> tuple[str | None, str]:
    """Return the template that vLLM is to be given, None where it finds the model's own, and the template that conversations are rendered with.

    given: the operator's. The second is "" for models whose conversations vLLM renders without a template.
    """
    from engine_bridge.driver.vllm_api import HfRenderer, resolve_chat_template

    tokenizer = engine.renderer.get_tokenizer()
    own: str = getattr(tokenizer, "chat_template", None) or ""
    if given or own or not isinstance(engine.renderer, HfRenderer):
        return given, given or own
    found = resolve_chat_template(tokenizer, None, None, model_config=engine.model_config)
    if found is not None:
        return None, found
    log.warning(
        "this model has no chat template: conversations are written as `User: …` and `Assistant: …`; a better one is given with --chat-template FILE"
    )
    return PLAIN, PLAIN
