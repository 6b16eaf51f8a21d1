"""Conversations have the form that the model's chat template takes: instructions stand where it takes them, behind all that was said before."""

from typing import Any

import pytest

from engine_bridge.calls.template_rules import Place, TemplateRules

ASKED, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOLD = {"role": "tool", "content": "12 °C", "tool_call_id": "1"}
BE = {"role": "system", "content": "Be brief."}
MARKED = "<system-reminder>\nBe brief.\n</system-reminder>"
IN_PARTS = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": "\n\n".join(texts)}


@pytest.mark.parametrize(
    ("place", "messages", "expected"),
    [
        ("anywhere", [ASKED, BE, SAID, BE], [ASKED, BE, SAID, BE]),
        ("first", [BE, ASKED, SAID], [BE, ASKED, SAID]),
        ("first", [BE, BE, ASKED], [{"role": "system", "content": "Be brief.\n\nBe brief."}, ASKED]),
        ("first", [BE, ASKED, BE], [BE, user("Hi", MARKED)]),
        ("first", [ASKED, BE, BE, SAID], [user("Hi", MARKED, MARKED), SAID]),
        ("first", [ASKED, SAID, BE, ASKED], [ASKED, SAID, user(MARKED, "Hi")]),
        ("first", [ASKED, SAID, BE], [ASKED, SAID, user(MARKED)]),
        ("first", [ASKED, SAID, TOLD, BE], [ASKED, SAID, TOLD | {"content": f"12 °C\n\n{MARKED}"}]),
        (
            "first",
            [IN_PARTS, BE],
            [IN_PARTS | {"content": [*IN_PARTS["content"], {"type": "text", "text": MARKED}]}],
        ),
        (
            "first",
            [ASKED, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}],
            [user("Hi", MARKED)],
        ),
        ("first", [ASKED, {"role": "system", "content": None}], [ASKED]),
        ("nowhere", [BE, ASKED], [user("Be brief.", "Hi")]),
        ("nowhere", [BE, BE, SAID], [user("Be brief.", "Be brief."), SAID]),
        ("nowhere", [BE], [user("Be brief.")]),
        ("nowhere", [ASKED, SAID], [ASKED, SAID]),
        ("first", [], []),
    ],
)
def test_instructions_are_placed(place: Place, messages: list[Any], expected: list[Any]) -> None:
    before = [dict(message) for message in messages]
    assert list(TemplateRules(place).applied(messages)) == expected
    assert messages == before


@pytest.mark.parametrize("place", ["anywhere", "first"])
def test_a_developers_are_a_systems_where_the_template_does_not_know_them(place: Place) -> None:
    developer = BE | {"role": "developer"}
    assert list(TemplateRules(place, has_developer=False).applied([developer, ASKED])) == [BE, ASKED]
    assert list(TemplateRules(place).applied([developer, ASKED])) == [developer, ASKED]


@pytest.mark.parametrize("place", ["first", "nowhere"])
def test_what_was_said_is_rendered_alike_when_instructions_come_later(place: Place) -> None:
    messages = [BE, ASKED, BE, SAID, TOLD, BE, SAID, ASKED, BE]
    whole = list(TemplateRules(place).applied(messages))
    for end in (3, 4, 6, 7):
        begun = list(TemplateRules(place).applied(messages[:end]))
        assert whole[: len(begun)] == begun


CALLING = SAID | {"tool_calls": [{"id": "1"}]}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([ASKED, ASKED, SAID, SAID, ASKED], [user("Hi", "Hi"), SAID | {"content": "Hello\n\nHello"}, ASKED]),
        ([BE, ASKED, BE, ASKED], [BE, user("Hi", MARKED, "Hi")]),
        ([ASKED, CALLING, TOLD, TOLD, SAID, ASKED], [ASKED, CALLING, TOLD, TOLD, SAID, ASKED]),
        ([ASKED, SAID, CALLING, TOLD, BE], [ASKED, SAID, CALLING, TOLD | {"content": f"12 °C\n\n{MARKED}"}]),
        (
            [IN_PARTS, ASKED],
            [IN_PARTS | {"content": [*IN_PARTS["content"], {"type": "text", "text": "Hi"}]}],
        ),
    ],
)
def test_messages_in_a_row_are_one_where_roles_must_alternate(
    messages: list[Any], expected: list[Any]
) -> None:
    assert list(TemplateRules("first", alternates=True).applied(messages)) == expected
