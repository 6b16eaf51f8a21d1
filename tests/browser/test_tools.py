"""Tools of an MCP server in the page: switched on in the sheet, asked about, shown with what they were given and what they said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import Chat
from tests.browser.stage import Site, Stage
from tests.tool_servers import EVIL, ToolHost, raw_server

expect = pytest.importorskip("playwright.sync_api").expect

WEATHER, ROME = "files__get_weather", '{"city": "Rome"}'


@pytest.fixture(scope="module")
def host() -> ToolHost:
    return ToolHost()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, host: ToolHost) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"), "ann", "bob")
    refusing = raw_server(b"HTTP/1.1 500 E\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    with host.open() as url, refusing as broken:
        stage.settings = {"mcp_servers": (f"files={url}", f"broken={broken}")}
        with stage:
            yield stage


@pytest.fixture(scope="module")
def site(stage: Stage) -> Site:
    return Site(stage.url, stage.keys["ann"])


def picture(chat: Chat, name: str) -> None:
    """Keep a picture of the page where somebody wants to look at it."""
    if folder := os.environ.get("OVERTURE_TEST_PICTURES"):
        chat.page.screenshot(path=str(Path(folder) / f"{name}.png"))


def switch_on(chat: Chat, name: str = "files") -> None:
    chat.page.keyboard.press("Control+,")
    box = chat.page.get_by_role("checkbox", name=name)
    expect(box).not_to_be_checked()
    box.check()
    picture(chat, "sheet")
    chat.page.keyboard.press("Escape")


def test_a_tool_is_switched_on_asked_about_and_shown(chat, stage, host, audit) -> None:
    """In a new chat, too. What was allowed once is asked about again, what is allowed for good is not."""
    switch_on(chat)
    with stage.by_hand() as next_answer:
        chat.start("What is the weather in Rome?")
        first = next_answer()
        assert first.answer.request.tools[0].name == WEATHER
        first.say("Let me **look**.")
        first.call(WEATHER, ROME)
        call = chat.page.locator("details.call")
        expect(call).to_have_attribute("data-state", "asking")
        expect(call.locator("pre")).to_have_text('{ "city": "Rome" }', use_inner_text=False)
        expect(chat.turns.last.get_by_text("Waiting for you")).to_be_visible()
        expect(chat.page.locator("#announcer")).to_contain_text("get_weather of files")
        picture(chat, "asking")
        assert audit(chat.page) == []
        chat.page.get_by_role("button", name="Allow once").click()
        expect(call).to_have_attribute("data-state", "done")
        second = next_answer()
        second.finish("It is sunny in Rome.")
        chat.wait_done()
        assert call.get_attribute("open") is None, "what was answered is folded away"
        call.locator("summary").focus()
        chat.page.keyboard.press("Enter")
        expect(call.get_by_text("sunny, 24 degrees in Rome")).to_be_visible()
        texts = [part.inner_text().split("\n")[0] for part in chat.page.locator(".steps > *").all()]
        assert (
            texts[0] == "Let me look."
            and texts[1].startswith("get_weather of files")
            and texts[2] == "It is sunny in Rome."
        )
        picture(chat, "done")
        assert audit(chat.page) == []
        chat.start("And in Oslo?")
        next_answer().call(WEATHER, '{"city": "Oslo"}')
        chat.page.get_by_role("button", name="Always in this conversation").click()
        next_answer().finish("Sunny, too.")
        chat.wait_done()
        chat.start("And in Bonn?")
        next_answer().call(WEATHER, '{"city": "Bonn"}')
        next_answer().finish("Sunny again.")
        chat.wait_done()
    assert [city for _, city in host.calls] == ["Rome", "Oslo", "Bonn"]
    chat.page.reload()
    expect(chat.page.locator("details.call")).to_have_count(3)
    expect(chat.page.locator("details.call").first).to_have_attribute("data-state", "done")
    chat.page.keyboard.press("Control+,")
    expect(chat.page.get_by_text("Used without asking: files: get_weather.")).to_be_visible()
    picture(chat, "allowed")
    chat.page.get_by_role("button", name="Ask again before each").click()
    expect(chat.page.get_by_text("Used without asking")).to_be_hidden()
    chat.page.keyboard.press("Escape")


def test_what_a_tool_says_is_text_and_nothing_else(chat, stage) -> None:
    switch_on(chat)
    with stage.by_hand() as next_answer:
        chat.start("Say something evil.")
        next_answer().call("files__evil", '{"text": "<img src=x onerror=alert(1)>"}')
        chat.page.get_by_role("button", name="Allow once").click()
        next_answer().finish("Done.")
        chat.wait_done()
    call = chat.page.locator("details.call")
    call.locator("summary").click()
    expect(call.locator("pre").last).to_have_text(EVIL)
    assert call.locator("b, strong, a, img").count() == 1, "the tool's name alone"


def test_no_is_kept_and_stop_ends_what_waits(chat, stage, host) -> None:
    before = len(host.calls)
    switch_on(chat)
    with stage.by_hand() as next_answer:
        chat.start("What is the weather?")
        next_answer().call(WEATHER, ROME)
        chat.page.get_by_role("button", name="Don’t").click()
        expect(chat.page.locator("details.call")).to_have_attribute("data-state", "refused")
        next_answer().finish("Then I do not know.")
        chat.wait_done()
        chat.start("And now?")
        next_answer().call(WEATHER, ROME)
        expect(chat.page.locator("details.call").last).to_have_attribute("data-state", "asking")
        chat.page.reload()
        expect(chat.page.locator("details.call").last).to_have_attribute("data-state", "asking")
        chat.page.get_by_role("button", name="Stop").click()
        expect(chat.turns.last).to_have_attribute("data-status", "stopped")
        expect(chat.page.locator("details.call").last).to_have_attribute("data-state", "stopped")
        expect(chat.page.get_by_role("button", name="Continue")).to_have_count(0)
    assert len(host.calls) == before


def test_a_server_that_does_not_answer_is_named_in_the_sheet_and_in_the_answer(chat, stage) -> None:
    switch_on(chat, "broken")
    with stage.by_hand() as next_answer:
        chat.start("Hello!")
        next_answer().finish("Hello.")
        chat.wait_done()
    expect(chat.turns.last.get_by_text("broken answered with an error")).to_be_visible()
    picture(chat, "missing")
    stage.do(lambda: setattr(stage.gateway.node, "can_use_tools", False))
    chat.begin()
    chat.page.keyboard.press("Control+,")
    expect(chat.page.get_by_text("This model is not known to call tools")).to_be_visible()
    expect(chat.page.get_by_role("checkbox", name="files")).to_be_disabled()
    stage.do(lambda: setattr(stage.gateway.node, "can_use_tools", True))
    chat.page.keyboard.press("Escape")
