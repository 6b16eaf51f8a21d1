"""The page in front of a server with a key file: what people do with it; and keys that are wrong, replaced or withdrawn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.stage import Stage

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def gateway_url(stage: Stage) -> str:
    return stage.url


@pytest.fixture
def visit(open_page, make_chat, stage: Stage) -> Callable:
    """A function that opens the page for somebody, who enters a key. Takes the end of the address."""
    stage.gateway.node.script = ["Well, ", "**hello**."]

    def make(hash_: str = "", who: str = "ann", **options: object):
        chat = make_chat(open_page(**options), stage.url)
        chat.page.goto(f"{chat.url}/{hash_}")
        enter(chat, stage.keys[who])
        expect(chat.picker).to_be_enabled()
        return chat

    return make


def enter(chat, key: str) -> None:
    chat.page.get_by_label("API key").fill(key)
    chat.page.get_by_role("button", name="Continue").click()


def test_messages_conversations_a_reload_and_a_second_page(visit) -> None:
    chat = visit()
    chat.ask("My first message.")
    expect(chat.answers.first).to_have_text("Well, hello.")
    chat.ask("And a second.")
    first = chat.session_id
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    chat.ask("Another conversation.")
    chat.page.locator(f".session[href='#/s/{first}']").click()
    expect(chat.turns).to_have_count(2)
    chat.ask("A third one here.")
    chat.page.reload()
    expect(chat.turns).to_have_count(3)
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    chat.ask("And one after the reload.")
    other = visit(f"#/s/{first}")
    expect(other.turns).to_have_count(4)
    other.ask("From the second page.")
    expect(chat.turns).to_have_count(5)
    expect(chat.page.get_by_role("alert")).to_have_count(0)


def test_titles_deletion_search_and_files(visit, tmp_path: Path) -> None:
    chat = visit()
    page = chat.page
    chat.ask("Find the quince.")
    row = chat.row("Find the quince.").first
    row.locator(".session").press("F2")
    page.get_by_label("New title").fill("Renamed")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Renamed")
    page.get_by_role("searchbox").fill("quince")
    expect(page.locator(".session-row mark").first).to_have_text("quince")
    page.keyboard.press("Escape")
    chat.row("Renamed").get_by_role("button", name="Options").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="Export as JSON").click()
    download.value.save_as(tmp_path / "exported.json")
    chat.row("Renamed").locator(".session").press("Delete")
    expect(chat.row("Renamed")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(chat.row("Renamed")).to_have_count(1)
    page.keyboard.press("Control+,")
    page.get_by_label("File to import").set_input_files(tmp_path / "exported.json")
    expect(chat.row("Renamed")).to_have_count(2)
    page.get_by_label("System prompt").fill("Be brief.")
    expect(page.locator(".sheet-status")).to_have_text("Saved")


def test_adapters_versions_and_the_engine_room(visit, stage: Stage) -> None:
    chat = visit()
    chat.pick("pirate")
    chat.ask("Ahoy!")
    assert stage.gateway.node.answers[-1].request.adapter == "pirate"
    chat.page.get_by_role("button", name="Answer again").click()
    expect(chat.page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
    chat.wait_done()
    chat.page.get_by_role("button", name="Previous version").click()
    expect(chat.page.get_by_role("group", name="Version 1 of 2")).to_be_visible()
    chat.page.goto(f"{chat.url}/engine")
    expect(chat.page.locator("#live")).to_have_text("live")
    expect(chat.page.locator("#nodes")).to_contain_text("local")


def test_a_wrong_key_a_new_one_and_one_that_is_withdrawn(
    open_page, make_chat, stage: Stage, page_watch
) -> None:
    page_watch.forgive()
    chat = make_chat(open_page(), stage.url)
    page = chat.page
    page.goto(stage.url)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("It is kept in this browser only.")
    enter(chat, "ov-no-such-key-for-tests-only")
    expect(dialog).to_contain_text("did not accept that key")
    enter(chat, stage.keys["ann"])
    chat.ask("Hello!")
    session = chat.session_id
    chat.question.fill("half a thought")
    stage.write_keys("bob")
    expect(dialog).to_contain_text("did not accept that key")
    enter(chat, stage.keys["bob"])
    expect(page.get_by_text("does not exist any more")).to_be_visible()
    expect(page.locator(f".session[href='#/s/{session}']")).to_have_count(0)
    assert chat.ask("Hello from another key.")
    stage.write_keys("ann", "bob")
    page.evaluate("key => localStorage.setItem('overture.key', key)", stage.keys["ann"])
    page.goto("about:blank")
    page.goto(f"{stage.url}/#/s/{session}")
    expect(page.locator(".bubble")).to_have_text("Hello!")
    expect(chat.question).to_have_value("half a thought")


def test_the_conversation_of_an_answer_that_no_page_can_render_is_shown(visit, stage: Stage) -> None:
    """With what stands before and behind it."""
    chat = visit()
    deep = "> " * 3000 + "x"
    turns = [{"id": "a", "content": "before", "answer": "The answer **before**."}]
    turns += [{"id": "b", "parent": "a", "content": "deep", "answer": deep}]
    turns += [{"id": "c", "parent": "b", "content": "after", "answer": "The answer **after**."}]
    archive = {"format": "overture-conversation", "version": 1, "title": "Deep", "turns": turns}
    headers = {"Authorization": f"Bearer {stage.keys['ann']}"}
    reply = chat.page.request.post(
        f"{stage.url}/api/sessions/import",
        data=json.dumps(archive),
        headers=headers | {"Content-Type": "application/json"},
    )
    assert reply.ok, reply.text()
    chat.row("Deep").first.locator(".session").click()
    expect(chat.answers).to_have_count(3)
    expect(chat.answers.first.locator("strong")).to_have_text("before")
    expect(chat.answers.nth(1)).to_have_text(deep)
    expect(chat.answers.last.locator("strong")).to_have_text("after")
    stage.gateway.node.script, script = (
        [deep[:3000], deep[3000:], "\n\nThe **end**."],
        stage.gateway.node.script,
    )
    try:
        chat.send("And as it comes?")
        chat.wait_done(chat.turns.nth(3))
    finally:
        stage.gateway.node.script = script
    expect(chat.answers.last.locator("strong")).to_have_text("end")


def test_an_address_that_is_none_and_a_list_with_odd_entries(visit, stage: Stage) -> None:
    chat = visit("#/s/%E0%A4%A")
    expect(chat.page.get_by_text("does not exist any more")).to_be_visible()
    odd = [
        {"id": "a", "title": "\u202e\u0000 \ud800", "updated_at": 1e300},
        {"id": "b", "title": "x" * 200_000, "updated_at": "soon"},
    ]
    sessions = [
        {"adapter": None, "origin": "chat", "num_turns": 1, "is_pinned": False} | each for each in odd
    ]
    sessions.append(sessions[0] | {"id": "c", "title": "An ordinary one", "updated_at": 1_700_000_000})
    body = json.dumps({"sessions": sessions, "next": None, "pinned": []})
    chat.page.route(
        re.compile("/api/sessions\\?"),
        lambda route: route.fulfill(body=body, content_type="application/json"),
    )
    chat.page.reload()
    expect(chat.row("An ordinary one")).to_have_count(1)
    expect(chat.page.locator(".session-row")).to_have_count(3)
