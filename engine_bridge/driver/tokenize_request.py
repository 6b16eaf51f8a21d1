"""The body of `/tokenize`, which vLLM declares as one of two classes: a text, or a conversation."""

from __future__ import annotations

from typing import Any

from pydantic import RootModel

from engine_bridge.driver.vllm_api import TokenizeChatRequest, TokenizeCompletionRequest


class TokenizeBody(RootModel[TokenizeChatRequest | TokenizeCompletionRequest]):
    """Either of them, for the OpenAPI document. What it reads from a body is vLLM's own class."""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Any:
        """The request. The class is chosen by the field, so that an error speaks of one class and not of both."""
        is_chat = isinstance(obj, dict) and "messages" in obj
        request_class = TokenizeChatRequest if is_chat else TokenizeCompletionRequest
        return request_class.model_validate(obj, **options)
