"""The chat page in front of a gateway with the demo model: what an engine alone can show."""

from __future__ import annotations

import re

import pytest

from tests.browser.stage import Site

expect = pytest.importorskip("playwright.sync_api").expect

STORY = "Tell me a long story."


@pytest.fixture(scope="module")
def site(engine: Site) -> Site:
    return engine


def test_the_first_screen_offers_examples_an_answer_streams_and_shows_its_timings_and_keys_have_help(
    chat,
) -> None:
    pieces: list[str] = []

    def note(frame):
        if frame["type"] == "delta":
            pieces.append(frame["text"])
        return frame

    chat.line.on_frame = note
    expect(chat.page.get_by_role("heading", name="What would you like to talk about?")).to_be_visible()
    # They come once the server has said which model it is.
    expect(chat.page.locator(".example").nth(2)).to_be_visible()
    chat.page.locator(".example").first.click()
    expect(chat.question).not_to_have_value("")
    expect(chat.question).to_be_focused()
    chat.question.fill("one")
    chat.question.press("Shift+Enter")
    chat.question.press_sequentially("two")
    expect(chat.question).to_have_value("one\ntwo")

    answer = chat.ask(STORY)
    expect(chat.question).to_have_value("")
    assert len(pieces) > 1, "the answer came in one piece"
    assert answer.split() == "".join(pieces).split()
    summary = chat.page.locator(".timings summary")
    expect(summary).to_contain_text("first word")
    expect(summary).not_to_contain_text("tokens")
    summary.click()
    expect(chat.page.locator(".timings dl")).to_contain_text("Computed anew")
    expect(chat.page.locator("h1")).not_to_have_text("New chat")

    chat.page.locator("#scroller").focus()
    chat.page.keyboard.press("?")
    expect(chat.page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    chat.page.keyboard.press("Escape")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)


def test_a_secret_word_is_remembered_after_a_reload_and_an_adapter_changes_the_voice_until_another_does(
    chat,
) -> None:
    plain = chat.ask("My secret word is marzipan.")
    assert plain != plain.upper()
    before = chat.answers.all_inner_texts()
    chat.page.reload()
    expect(chat.answers).to_have_text(before)
    assert "marzipan" in chat.ask("What is my secret word?").lower()
    chat.pick("shout")
    answer = chat.ask("Hello!")
    assert answer == answer.upper() and "!!!" in answer
    expect(chat.page.locator(".timings summary").last).to_contain_text("shout")
    chat.page.reload()
    expect(chat.picker).to_have_text(re.compile("shout"))
    chat.pick("pirate")
    assert chat.ask("How are you?").startswith("Arr")


def test_conversations_of_api_calls_are_listed_when_asked_for_and_those_in_an_open_one_are_shown(
    chat,
) -> None:
    def call(session_id: str) -> None:
        question = {"role": "user", "content": f"What is {session_id}?"}
        body = {
            "model": "overture-demo",
            "messages": [question],
            "max_tokens": 4,
            "session_id": session_id,
        }
        assert chat.call("POST", "/v1/chat/completions", data=body).ok

    call("an-agents-own")
    chat.page.reload()
    chat.open().ask("Hello!")
    call(chat.session_id)
    expect(chat.turns).to_have_count(2)
    row = chat.row("an-agents-own")
    expect(row).to_have_count(0)
    button = chat.page.get_by_role("button", name="Show API calls")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(row.locator(".origin")).to_have_text("API")
    button.click()
    expect(row).to_have_count(0)


def test_a_conversation_is_marked_as_warm_while_one_types(chat) -> None:
    chat.ask("Please remember all of this: " + " ".join(f"the {n}th is called Anna." for n in range(30)))
    expect(chat.page.locator(".warmth")).to_be_hidden()
    chat.question.press_sequentially("And")
    expect(chat.page.locator(".warmth")).to_be_visible()
    expect(chat.page.locator(".session.warm")).to_have_count(1)
    chat.page.keyboard.press("Control+,")
    expect(chat.page.get_by_role("dialog", name="Settings")).to_be_visible()
    expect(chat.page.get_by_label("Prepare as I type")).to_be_hidden()  # the operator has not allowed it


def test_one_node_is_seen_live_and_what_one_types_makes_ready(chat, audit) -> None:
    """In a wide light window and in a narrow dark one."""
    page = chat.page
    chat.ask("My secret word is marzipan.")
    title = page.locator("h1").inner_text()
    chat.question.press_sequentially("What")
    page.keyboard.press("Control+Shift+E")
    expect(page).to_have_title("Engine room · Overture")
    expect(page.get_by_role("table", name="Nodes and what each one does")).to_contain_text("ready")
    row = page.get_by_role("table", name="Your last advisories").get_by_role("row").nth(1)
    expect(row.get_by_role("link", name=title)).to_be_visible()
    expect(row.locator(".trail")).to_have_text(re.compile("staging|host|warm|unknown"))
    expect(page.get_by_role("table", name="Memory of local, by tier")).to_contain_text("256 MiB")
    expect(page.locator("#lanes")).to_contain_text("One queue, without lanes (--scheduling-policy bounded).")
    for scheme, width in (("dark", 390), ("light", 1280)):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert audit(page) == []
    page.keyboard.press("Control+Shift+E")
    expect(chat.picker).to_be_enabled()
