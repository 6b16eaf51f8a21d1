"""What is open, written or focused stays so while other things happen on the page."""

from __future__ import annotations

import pytest

from tests.browser.stage import Stage

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def gateway_url(stage: Stage) -> str:
    return stage.url


@pytest.fixture
def chat(wired, stage: Stage):
    """The page with a conversation of one turn; its websocket is in `line`."""
    stage.gateway.node.script = ["Well, ", "**hello**."]
    chat, line = wired()
    chat.line = line
    chat.page.add_init_script(f"localStorage.setItem('overture.key', '{stage.keys['ann']}')")
    chat.open().ask("Hello!")
    return chat


def test_open_timings_stay_open_and_arrow_up_goes_to_an_open_editor(chat) -> None:
    """While the next question is asked and answered, and when the conversation is read again."""
    timings = chat.page.locator(".timings").first
    timings.locator("summary").click()
    expect(timings.locator("dl")).to_contain_text("Computed anew")
    timings.locator("summary").focus()
    chat.line.inject({"type": "shown", "session_id": chat.session_id, "turn_id": "another"})
    chat.ask("And again?")
    expect(timings).to_have_attribute("open", "")
    expect(timings.locator("dl")).to_contain_text("Computed anew")

    chat.question.press("ArrowUp")
    field = chat.page.get_by_role("textbox", name="Edit message")
    field.fill("Rewritten with care")
    chat.question.press("ArrowUp")
    expect(field).to_be_focused()
    expect(field).to_have_value("Rewritten with care")


def test_the_focus_stays_in_the_list_when_a_conversation_is_deleted(chat) -> None:
    """By the keyboard and by the menu, in the middle and at the end."""
    for name in ("Two", "Three"):
        chat.page.keyboard.press("Control+Shift+O")
        chat.ask(name)
    chat.page.keyboard.press("Control+Shift+O")
    chat.ask("The open one")
    rows = chat.page.locator(".session-row")
    num = rows.count()
    chat.row("Three").first.locator(".session").press("Delete")
    expect(rows).to_have_count(num - 1)
    assert chat.page.evaluate("document.activeElement.closest('.session-row') !== null")
    chat.row("Two").first.get_by_role("button", name="Options").click()
    chat.page.get_by_role("menuitem", name="Delete").click()
    expect(rows).to_have_count(num - 2)
    assert chat.page.evaluate("document.activeElement.closest('.session-row') !== null")
