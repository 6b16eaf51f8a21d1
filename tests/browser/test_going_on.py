"""How a conversation goes on: in a new chat with a summary, and past messages that failed."""

from __future__ import annotations

import pytest

expect = pytest.importorskip("playwright.sync_api").expect


def summed_up(content: str) -> dict:
    """A reply of the model to a request for a summary."""
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def test_a_full_conversation_goes_on_in_a_new_chat_with_a_summary(wired, stage, page_watch) -> None:
    page_watch.forgive()  # a first try is refused
    chat = wired()[0].open()
    page, node = chat.page, stage.gateway.node
    chat.ask("My secret word is marzipan.")
    expect(page.get_by_role("button", name="Summarise")).to_be_hidden()
    old = chat.session_id
    node.max_model_len, usual = 5, node.max_model_len
    try:
        page.reload()
        button = page.get_by_role("button", name="Summarise")
        replies = [
            {"status": 503, "json": {"error": {"message": "No room."}}},
            {"json": summed_up("The word is **marzipan**.")},
        ]
        asked = []

        def reply(route) -> None:
            asked.append(route.request.post_data_json)
            route.fulfill(**replies.pop(0))

        page.route("**/v1/chat/completions", reply)
        button.click()
        dialog = page.get_by_role("dialog", name="New chat with a summary")
        expect(dialog.get_by_role("alert")).to_have_text("No summary could be written. No room.")
        dialog.get_by_role("button", name="Close").click()
        expect(dialog).to_have_count(0)
        button.click()
        expect(chat.answers.last).to_contain_text("The word is marzipan.")
    finally:
        node.max_model_len = usual
    assert chat.session_id != old
    assert asked[-1]["messages"][-1]["content"].startswith("Summarise our conversation")
    link = chat.answers.last.get_by_role("link", name="My secret word is marzipan.")
    link.click()
    expect(page.locator(".bubble").last).to_have_text("My secret word is marzipan.")
    assert chat.session_id == old


def test_a_message_whose_answer_failed_can_be_dismissed_also_after_a_reload(wired, stage, page_watch) -> None:
    chat = wired()[0].open()
    page = chat.page
    chat.ask("Hello!")
    with stage.by_hand() as next_answer:
        chat.start("Are you there?")
        next_answer().fail()
    expect(chat.turns.last).to_have_attribute("data-status", "failed")
    page.reload()
    expect(chat.turns).to_have_count(2)
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Dismiss").click()
    expect(chat.turns).to_have_count(1)
    expect(other.locator(".turn")).to_have_count(1)
    assert [turn.content for turn in stage.turns(chat.session_id)] == ["Hello!"]
    with stage.by_hand() as next_answer:
        page.get_by_role("button", name="New chat", exact=True).click()
        chat.start("Only this.")
        next_answer().fail()
    page.get_by_role("button", name="Dismiss").click()
    expect(chat.turns).to_have_count(0)
    expect(chat.row("Only this.")).to_have_count(0)
    expect(chat.question).to_have_value("Only this.")
