"""The body of `/tokenize`, which vLLM declares as one of two classes: a text, or a conversation; and the reply of `/tokenizer_info`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, RootModel

from engine_bridge.driver.vllm_api import TokenizeChatRequest, TokenizeCompletionRequest


class TokenizeBody(RootModel[TokenizeChatRequest | TokenizeCompletionRequest]):
    """A text or a conversation to tokenize, for the OpenAPI document; a body is read as one of vLLM's two classes."""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Any:
        """Return the request. The field decides the class, so that an error speaks of one class and not of both."""
        is_chat = isinstance(obj, dict) and "messages" in obj
        request_class = TokenizeChatRequest if is_chat else TokenizeCompletionRequest
        return request_class.model_validate(obj, **options)


class NoBody(BaseModel):
    """The body of a call without one."""


def tokenizer_facts(found: Any, tokenizer: Any) -> Any:
    """Return vLLM's reply with the chat template and the special tokens, which clients need, and without paths of files on this machine."""
    known = found.model_dump()
    template = getattr(tokenizer, "chat_template", None)
    facts = {"chat_template": template} | getattr(tokenizer, "special_tokens_map", {}) | known
    return type(found)(
        **{name: value for name, value in facts.items() if not name.endswith(("_file", "_path"))}
    )
