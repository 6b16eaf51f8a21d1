"""The chat template of a model, and a plain one for models that have none: base models, which were made to continue a text."""

from __future__ import annotations

import logging
from typing import Any

from jinja2 import TemplateSyntaxError

from engine_bridge.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_PLAINLY = "conversations are written as `User: …` and `Assistant: …`; a better one is given with --chat-template FILE"


def fault_of(template: str) -> str:
    """Return why a text is no template, with the line; "" if it is one."""
    # As transformers, and so vLLM, reads it, with tags that Jinja alone does not know.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""


def chat_templates(engine: Any, given: str | None) -> tuple[str | None, str]:
    """Return the template that vLLM is to be given, None where it finds the model's own, and the template that conversations are rendered with.

    given: the operator's. The second is, for models whose conversations vLLM renders without a template, the special tokens of which it makes them.

    Raises:
        InvalidRequest: the operator's is no template. Where the model's own is none, a plain one stands in for it.
    """
    from engine_bridge.driver.vllm_api import HfRenderer, resolve_chat_template

    tokenizer = engine.renderer.get_tokenizer()
    own = own_template(tokenizer)
    if given and (fault := fault_of(given)):
        raise InvalidRequest(f"--chat-template: the file is no Jinja template: {fault}")
    if not given and (fault := fault_of(own)):
        log.warning(
            "this model's chat template is no Jinja template (%s): %s",
            fault,
            _PLAINLY,
        )
        return PLAIN, PLAIN
    if given or own:
        return given, given or own
    if not isinstance(engine.renderer, HfRenderer):
        return None, " ".join(getattr(tokenizer, "all_special_tokens", ()))
    found = resolve_chat_template(tokenizer, None, None, model_config=engine.model_config)
    if found is not None:
        return None, found
    log.warning("this model has no chat template: %s", _PLAINLY)
    return PLAIN, PLAIN


def own_template(tokenizer: Any) -> str:
    """Return the template of a tokenizer, or all of those that it has by names, such as one for calls with tools; "" where none is for all calls."""
    found: str | dict[str, str] = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(found, str):
        return found
    return "\n".join(found.values()) if "default" in found else ""
