"""The pictures of docs/tour.md: `python -m tests.browser.tour [FOLDER]`, docs/pictures by default.

A gateway with the demo model is started for the occasion. Every picture shows what the model really answered.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import ROOT, Chat, Line, visiting
from tests.browser.stage import Site

WIDE = {"width": 1120, "height": 700}
PHONE = {"width": 390, "height": 780}


# As long as it takes for the conversation to fill whole KV blocks, which are what is moved.
LONG_QUESTION = (
    "I would like to hear a story about the sea. It should have an old lighthouse in it, a keeper who cannot sleep, and a ship that comes home "
    "after many years. Please make it a quiet story, with good weather at the end."
)


def introduce(chat: Chat) -> None:
    chat.ask("Hello! My name is Ada and I live in Lisbon.")
    chat.ask("What is my name?")


def chat_picture(chat: Chat, line: Line) -> Page:
    introduce(chat)
    chat.ask("Where do I live?")
    return chat.page


def warm_picture(chat: Chat, line: Line) -> Page:
    """While a follow-up is typed: its KV is on the device before Enter."""
    introduce(chat)
    chat.ask(LONG_QUESTION)
    chat.question.press_sequentially("And where do I", delay=60)
    expect(chat.page.locator(".warmth")).to_be_visible()
    return chat.page


def adapter_picture(chat: Chat, line: Line) -> Page:
    chat.pick("pirate")
    chat.ask("Who are you?")
    return chat.page


def engine_picture(chat: Chat, line: Line) -> Page:
    """Beside an answer that is under way."""
    introduce(chat)
    chat.question.press_sequentially("Where do I live?")
    line.sampling = {"max_tokens": 3000, "ignore_eos": True}
    chat.question.press("Enter")
    room = chat.page.context.new_page()
    room.goto(f"{chat.url}/engine")
    expect(room.locator("#advisories table")).to_be_visible()
    room.wait_for_timeout(6000)  # for something to see in the lines
    return room


PICTURES: dict[str, tuple[Callable[[Chat, Line], Page], dict[str, object]]] = {
    "chat": (chat_picture, {"viewport": WIDE}),
    "warm": (warm_picture, {"viewport": WIDE}),
    "adapter": (adapter_picture, {"viewport": WIDE}),
    "phone": (chat_picture, {"viewport": PHONE, "color_scheme": "dark", "has_touch": True}),
    "engine": (engine_picture, {"viewport": {"width": 1120, "height": 1000}}),
}


def take_all(browser: Browser, url: str, folder: Path) -> None:
    for name, (scene, options) in PICTURES.items():
        context = browser.new_context(reduced_motion="reduce", **options)
        page = context.new_page()
        line = Line(page)
        picture = scene(Chat(page, Site(url)).open(), line)
        picture.screenshot(path=folder / f"{name}.png")
        print(folder / f"{name}.png", flush=True)
        context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "pictures")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with visiting() as (browser, url):
        take_all(browser, url, folder)


if __name__ == "__main__":
    main()
