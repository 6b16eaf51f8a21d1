"""Hooks for Schemathesis, where the server's own limits are not small: no answer is longer than a few tokens."""

from __future__ import annotations

from typing import Any

import schemathesis

MOST_TOKENS = 4
FIELDS = {
    "/v1/responses": ("max_output_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
}
CALLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Give the call a small token limit if it has none or a larger one; values that the server refuses stay."""
    if case.operation.path not in CALLS or not isinstance(case.body, dict):
        return
    for name in FIELDS.get(case.operation.path, ("max_tokens",)):
        value = case.body.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or (is_number and value > MOST_TOKENS):
            case.body[name] = MOST_TOKENS
