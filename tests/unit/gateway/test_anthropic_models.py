"""`/v1/models` in the form of Anthropic's API."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.doors.api.anthropic_models import card_of, page
from gateway.errors import GatewayError

CARDS: Any = [{"id": name, "created": 0, "max_model_len": 4096, "root": "/secret"} for name in "abcde"]


def ids(query: dict[str, str]) -> tuple[str, bool]:
    found = page(CARDS, query)
    names = "".join(card["id"] for card in found["data"])
    assert (found["first_id"], found["last_id"]) == ((names[0], names[-1]) if names else (None, None))
    return names, found["has_more"]


def test_a_card_has_that_apis_fields_and_no_others() -> None:
    assert card_of(CARDS[0]) == {
        "type": "model",
        "id": "a",
        "display_name": "a",
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": 4096,
        "max_tokens": 4096,
    }


def test_pages_go_both_ways() -> None:
    assert ids({}) == ("abcde", False)
    assert ids({"limit": "2"}) == ("ab", True)
    assert ids({"limit": "2", "after_id": "b"}) == ("cd", True)
    assert ids({"limit": "2", "after_id": "d"}) == ("e", False)
    assert ids({"limit": "2", "before_id": "d"}) == ("bc", True)
    assert ids({"limit": "2", "before_id": "c"}) == ("ab", False)
    assert ids({"after_id": "e"}) == ("", False)


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"after_id": "z"}])
def test_what_no_page_can_be_made_of_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(GatewayError):
        page(CARDS, query)
