"""A server that stands still, and a line that is dead, at each stage of what a person does.

No message is lost, and the page says what it waits for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import pytest

from tests.browser.conftest import Chat
from tests.browser.stage import Stage

expect = pytest.importorskip("playwright.sync_api").expect

SILENT = re.compile(r"The server has not answered for \d+ s\.")
# Past the page's patience with a silent server, and past its tries to open another connection.
LONG_MS = 45_000


@pytest.fixture
def visit(open_page, site, stage: Stage, page_watch, caplog, monkeypatch) -> Iterator[Callable]:
    """A function that opens the page, whose clock can be put forward. To the server, pages that come and go are no error."""
    page_watch.forgive()  # connections break
    monkeypatch.setattr(stage.gateway.node, "script", None)

    def make():
        chat = Chat(open_page(), site)
        chat.page.clock.install()
        return chat.open()

    yield make
    stage.line.thaw()
    stage.do(stage.gateway.node.cut_off)
    assert [
        record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR
    ] == []


def passes(chat, milliseconds: int) -> None:
    """Let the page believe that so much time has passed, in steps, so that what happens on the network meanwhile is seen."""
    for _ in range(0, milliseconds, 3000):
        chat.page.clock.run_for(3000)


def freeze(stage: Stage, how: str) -> None:
    """The server hears and says nothing, or is heard no more."""
    stage.line.freeze(*(("down",) if how == "deaf" else ("up", "down")))


def stands_still(stage: Stage, chat, how: str, milliseconds: int = LONG_MS) -> None:
    """For so long, nothing comes from the server; then all is well again. A line that is dead loses what was under way."""
    freeze(stage, how)
    passes(chat, milliseconds)
    if how == "dead":
        stage.line.cut()
    stage.line.thaw()
    passes(chat, 6000)


HOW = pytest.mark.parametrize("how", ["stopped", "dead"])


def begun(stage: Stage, chat, text: str = "Hello!"):
    """A question whose answer is not begun, and the hand that writes it."""
    number = stage.num_asked
    chat.send(text)
    return stage.answer(number)


@HOW
def test_a_stall_before_and_after_the_first_message_of_a_new_chat_and_the_second(
    visit, stage: Stage, how: str
) -> None:
    chat = visit()
    freeze(stage, how)
    number = stage.num_asked
    chat.send("The very first.")
    stands_still(stage, chat, how)
    stage.answer(number).finish("One.")
    expect(chat.answers).to_have_text(["One."])
    assert stage.num_asked == number + 1
    expect(chat.question).to_have_value("")
    chat.wait_done()

    freeze(stage, how)
    chat.send("Are you there?")
    passes(chat, 6000)
    expect(chat.banner).to_contain_text(SILENT)
    expect(chat.banner).to_contain_text("your message is then sent again")
    stands_still(stage, chat, how)
    stage.answer(number + 1).finish("Yes.")
    expect(chat.answers.last).to_have_text("Yes.")
    chat.wait_done()
    expect(chat.banner).to_be_hidden()
    assert stage.num_asked == number + 2
    assert [turn.answer for turn in stage.turns(chat.session_id)] == ["One.", "Yes."]


@pytest.mark.parametrize("how", ["stopped", "deaf", "dead"])
def test_a_stall_while_an_answer_is_written(visit, stage: Stage, how: str) -> None:
    """Before its first word, in the middle, and between its last word and its end."""
    chat = visit()
    pieces = ("One, ", "two.")
    for num_before in range(3):
        writer = begun(stage, chat)
        expect(chat.turns.last).to_have_attribute("data-status", "running")
        writer.say(*pieces[:num_before])
        expect(chat.answers.last).to_have_text("".join(pieces[:num_before]).strip())
        stage.line.freeze("down")
        writer.finish(*pieces[num_before:])
        stands_still(stage, chat, how)
        expect(chat.answers.last).to_have_text("One, two.")
        chat.wait_done()
        expect(chat.banner).to_be_hidden()
    expect(chat.turns).to_have_count(3)


@HOW
def test_a_stall_around_a_stop_an_edit_and_another_try(visit, stage: Stage, how: str) -> None:
    chat = visit()
    begun(stage, chat).say("One, ")
    expect(chat.answers.last).to_have_text("One,")
    freeze(stage, how)
    chat.page.get_by_role("button", name="Stop").click()
    expect(chat.page.locator(".waiting")).to_contain_text("Stopping")
    stands_still(stage, chat, how)
    expect(chat.turns.last).to_have_attribute("data-status", "stopped")
    expect(chat.answers.last).to_have_text("One,")
    for act in ("Edit message", "Answer again"):
        number = stage.num_asked
        button = chat.turns.last.get_by_role("button", name=act)
        if act == "Edit message":
            button.click()
            field = chat.page.get_by_role("textbox", name=act)
            field.fill("Rewritten")
        freeze(stage, how)
        if act == "Edit message":
            field.press("Enter")
        else:
            button.click()
        expect(chat.turns.last).to_have_attribute("data-status", "sending")
        stands_still(stage, chat, how)
        stage.answer(number).finish(f"After {act}.")
        expect(chat.answers).to_have_text([f"After {act}."])
        chat.wait_done()
    expect(chat.page.get_by_role("group", name="Version 3 of 3")).to_be_visible()


@HOW
def test_a_stall_while_a_conversation_is_opened_renamed_and_deleted(visit, stage: Stage, how: str) -> None:
    chat = visit()
    begun(stage, chat).finish("One.")
    chat.wait_done()
    session = chat.session_id
    chat.page.reload()
    chat.open()
    row = chat.page.locator(f".session[href='#/s/{session}']")
    expect(row).to_be_visible()
    freeze(stage, how)
    row.click()
    passes(chat, 6000)
    expect(chat.banner).to_contain_text(SILENT)
    stands_still(stage, chat, how)
    expect(chat.answers).to_have_text(["One."])

    row.press("F2")
    chat.page.get_by_label("New title").fill("Renamed")
    freeze(stage, how)
    chat.page.keyboard.press("Enter")
    passes(chat, 6000)
    expect(chat.banner).to_contain_text(SILENT)
    with chat.page.expect_response(lambda reply: reply.request.method == "PATCH" and reply.ok):
        stands_still(stage, chat, how)
    expect(row).to_contain_text("Renamed")
    chat.page.reload()
    expect(row).to_contain_text("Renamed")
    freeze(stage, how)
    row.press("Delete")
    stands_still(stage, chat, how)
    expect(row).to_have_count(0)
    chat.page.get_by_role("button", name="Undo").click()
    expect(row).to_have_count(1)


def test_a_message_that_was_not_acknowledged_is_sent_again_after_a_reload(visit, stage: Stage) -> None:
    """Once, wherever the page is then; it is no draft, and it is not kept once the server has it."""
    chat = visit()
    begun(stage, chat).finish("One.")
    chat.wait_done()
    session, number = chat.session_id, stage.num_asked
    stage.line.freeze("up", "down")
    chat.send("Do not lose me.")
    expect(chat.turns.last).to_have_attribute("data-status", "sending")
    stage.line.cut()
    chat.page.goto("about:blank")
    stage.line.thaw()
    chat.open()
    stage.answer(number).finish("I did not.")
    chat.page.locator(f".session[href='#/s/{session}']").click()
    expect(chat.answers).to_have_text(["One.", "I did not."])
    expect(chat.page.locator(".bubble")).to_have_text(["Hello!", "Do not lose me."])
    expect(chat.question).to_have_value("")
    assert stage.num_asked == number + 1
    kept = "Object.keys(localStorage).filter((name) => name.startsWith('overture.unsent'))"
    assert chat.page.evaluate(kept) == []


def test_a_message_whose_conversation_is_gone_becomes_a_draft(visit, stage: Stage) -> None:
    chat = visit()
    request = {
        "type": "message",
        "id": "lost",
        "session_id": "nowhere",
        "content": "Do not lose me.",
        "adapter": None,
    }
    chat.question.fill("Written since.")
    chat.page.evaluate(
        "request => localStorage.setItem('overture.unsent.lost', JSON.stringify(request))", request
    )
    chat.page.reload()
    expect(chat.page.get_by_text("its conversation is gone")).to_be_visible()
    expect(chat.question).to_have_value("Written since.\n\nDo not lose me.")
    chat.page.reload()
    expect(chat.question).to_have_value("Written since.\n\nDo not lose me.")
    assert chat.page.evaluate("localStorage.getItem('overture.unsent.lost')") is None


def test_a_page_that_is_opened_while_the_server_stands_still(visit, stage: Stage) -> None:
    chat = visit()
    stage.line.freeze("down")
    chat.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    passes(chat, 9000)
    expect(chat.banner).to_contain_text(SILENT)
    passes(chat, LONG_MS)
    stage.line.thaw()
    passes(chat, 30_000)
    expect(chat.banner).to_be_hidden()
    number = stage.num_asked
    chat.send("Hello!")
    stage.answer(number).finish("One.")
    expect(chat.answers).to_have_text(["One."])


def test_a_new_title_stays_though_the_page_has_read_the_old_one_meanwhile(wired, page_watch) -> None:
    """It is stored on another connection than the one that tells of conversations, which may tell of the old title last."""
    page_watch.forgive()
    chat, line = wired()
    page = chat.page
    line.on_frame = lambda frame: None if frame["type"] == "listed" else frame
    held: list = []
    page.route(
        "**/api/sessions/*",
        lambda route: held.append(route) if route.request.method == "PATCH" else route.continue_(),
    )
    chat.open()
    chat.ask("An old title.")
    row = page.locator(f".session[href='#/s/{chat.session_id}']")
    row.press("F2")
    page.get_by_label("New title").fill("Renamed")
    page.keyboard.press("Enter")
    expect(row).to_contain_text("Renamed")
    with page.expect_request(lambda request: request.method == "PATCH"):  # it is repeated
        line.drop()
    expect(row).to_contain_text("An old title.")
    with page.expect_response(lambda reply: reply.request.method == "PATCH" and reply.ok):
        held[-1].continue_()
    expect(row).to_contain_text("Renamed")
    expect(page.locator("#title")).to_have_text("Renamed")
