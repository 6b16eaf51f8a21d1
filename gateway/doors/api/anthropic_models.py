"""`/v1/models` as Anthropic's API has it, for clients that name its version. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.errors import GatewayError

# Source: Anthropic's API reference, "List models".
DEFAULT_MODELS, MAX_MODELS = 20, 1000


def card_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's card in Anthropic's form, made of OpenAI's form."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card.get("max_model_len"),
        "max_tokens": card.get("max_model_len"),
    }


def page(cards: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the models' cards.

    Args:
        cards: all cards, in OpenAI's form.
        query: `limit`, and `after_id` or `before_id`.

    Raises:
        GatewayError: `bad_request`.
    """
    limit = _limit(query.get("limit", str(DEFAULT_MODELS)))
    ids = [card["id"] for card in cards]
    first, end = 0, len(ids)
    if "after_id" in query:
        first = _place(ids, query["after_id"], "after_id") + 1
    elif "before_id" in query:
        end = _place(ids, query["before_id"], "before_id")
        first = max(end - limit, 0)
    shown = [card_of(card) for card in cards[first:end][:limit]]
    has_more = first > 0 if "before_id" in query else first + limit < len(ids)
    return {
        "data": shown,
        "has_more": has_more,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_MODELS:
        raise GatewayError("bad_request", f"'limit' must be from 1 to {MAX_MODELS}.", param="limit")
    return int(text)


def _place(ids: Sequence[str], wanted: str, param: str) -> int:
    if wanted not in ids:
        raise GatewayError("bad_request", f"There is no model {wanted[:100]!r} here.", param=param)
    return ids.index(wanted)
