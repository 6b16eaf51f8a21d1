"""The list of models: what it says of each adapter, and how one finds one among many."""

from __future__ import annotations

import re

import pytest

expect = pytest.importorskip("playwright.sync_api").expect

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
MANY = [
    {"name": f"{tone}-{number:03}", "rank": 16, "place": "disk", "is_pinned": False}
    for number in range(15)
    for tone in ("legal", "poet", "support", "tutor")
]


def active(chat):
    """The row that Enter would take."""
    return chat.page.locator(".model.active .model-name")


def test_each_open_list_is_read_anew_and_says_of_each_adapter_its_rank_its_place_and_its_pin(
    chat, stage, page_watch
) -> None:
    """Where that cannot be read, one can still pick."""
    chat.pick("pirate")
    chat.picker.click()
    expect(chat.models.first).to_have_text(re.compile("base model"))
    expect(chat.model("pirate")).to_have_attribute("aria-selected", "true")
    for name in stage.gateway.node.adapter_names:
        expect(chat.model(name)).to_have_text(re.compile(rf"{name}.*rank 8.*on disk"))

    chat.page.keyboard.press("Escape")
    pinned = {"name": "pirate", "rank": 8, "place": "host", "is_pinned": True}
    chat.offer([pinned, {"name": "shout", "rank": 8, "place": "disk", "is_pinned": False}])
    chat.picker.click()
    expect(chat.models).to_have_count(3)
    for name in ("pirate ?, pinned ?, rank 8 ?, ready", "shout ?, rank 8 ?, on disk"):
        expect(chat.page.get_by_role("option", name=re.compile(f"^{name}$"))).to_be_visible()

    chat.page.keyboard.press("Escape")
    chat.offer([pinned | {"name": "newcomer", "is_pinned": False}])
    chat.pick("newcomer")
    expect(chat.picker).to_have_text(re.compile("newcomer"))

    page_watch.forgive()
    chat.page.unroute("**/v1/adapters")
    chat.page.route("**/v1/adapters", lambda route: route.abort())
    chat.page.reload()
    expect(chat.picker).to_be_enabled()
    chat.pick("shout")
    expect(chat.picker).to_have_text(re.compile("shout"))
    chat.ask("Hello!")
    assert stage.gateway.node.answers[-1].request.adapter == "shout"


def test_the_keyboard_opens_moves_picks_and_closes(chat) -> None:
    chat.picker.focus()
    chat.page.keyboard.press("ArrowDown")
    expect(chat.page.get_by_role("listbox")).to_be_focused()
    expect(chat.filter).to_have_count(0)
    expect(active(chat)).to_have_text(chat.models.first.get_attribute("data-name"))
    chat.page.keyboard.press("ArrowDown")
    second = active(chat).inner_text()
    chat.page.keyboard.press("p")
    expect(active(chat)).to_have_text(re.compile("^p"))
    chat.page.keyboard.press("Home")
    chat.page.keyboard.press("ArrowDown")
    chat.page.keyboard.press("Enter")
    expect(chat.models).to_have_count(0)
    expect(chat.picker).to_be_focused()
    expect(chat.picker).to_have_text(re.compile(second))
    chat.page.keyboard.press("Enter")
    expect(chat.picker).to_have_attribute("aria-expanded", "true")
    chat.page.keyboard.press("ArrowDown")
    chat.page.keyboard.press("Escape")
    expect(chat.picker).to_have_attribute("aria-expanded", "false")
    expect(chat.picker).to_be_focused()
    expect(chat.picker).to_have_text(re.compile(second))


def test_typing_finds_one_among_many(chat) -> None:
    chat.offer(MANY)
    chat.picker.click()
    expect(chat.models).to_have_count(len(MANY) + 1)
    expect(chat.filter).to_be_focused()
    chat.page.keyboard.type("poet 1")
    expect(chat.models).to_have_count(len([a for a in MANY if "poet" in a["name"] and "1" in a["name"]]))
    expect(chat.page.get_by_text(re.compile(rf"^\d+ of {len(MANY) + 1}$"))).to_be_visible()
    expect(active(chat)).to_have_text("poet-001")
    chat.page.keyboard.press("ArrowDown")
    chat.page.keyboard.press("ArrowDown")
    chat.page.keyboard.press("ArrowUp")
    expect(active(chat)).to_have_text("poet-010")
    chat.page.keyboard.press("Enter")
    expect(chat.picker).to_have_text(re.compile("poet-010"))
    chat.picker.click()
    expect(chat.filter).to_have_value("")
    expect(chat.model("poet-010")).to_be_in_viewport()
    chat.filter.fill("nobody")
    expect(chat.models).to_have_count(0)
    expect(chat.page.get_by_text(f"none of {len(MANY) + 1}")).to_be_visible()
    chat.page.keyboard.press("Enter")
    chat.page.keyboard.press("Escape")
    expect(chat.picker).to_have_text(re.compile("poet-010"))


def test_escape_closes_the_list_and_does_not_stop_the_answer(chat, stage) -> None:
    with stage.by_hand():
        chat.start("Tell me a long story.")
        chat.picker.click()
        expect(chat.models.first).to_be_visible()
        chat.page.keyboard.press("Escape")
        expect(chat.models).to_have_count(0)
        expect(chat.turns.first).to_have_attribute("data-status", "running")
        chat.page.keyboard.press("Escape")
        expect(chat.turns.first).to_have_attribute("data-status", "stopped")


def test_on_a_phone_no_keyboard_opens_until_one_wants_to_type(visit) -> None:
    chat = visit(**PHONE)
    chat.offer(MANY)
    chat.picker.tap()
    expect(chat.models).to_have_count(len(MANY) + 1)
    expect(chat.filter).not_to_be_focused()
    heights = chat.models.evaluate_all("nodes => nodes.map((node) => node.getBoundingClientRect().height)")
    assert min(heights) >= 44
    chat.filter.tap()
    chat.page.keyboard.type("tutor-009")
    chat.models.first.tap()
    expect(chat.picker).to_have_text(re.compile("tutor-009"))


def test_the_list_stays_inside_the_window(chat) -> None:
    page = chat.page
    chat.offer([adapter | {"name": adapter["name"] * 9} for adapter in MANY])
    for width, height in ((320, 568), (640, 400), (1280, 800)):
        page.set_viewport_size({"width": width, "height": height})
        chat.picker.click()
        expect(chat.models).to_have_count(len(MANY) + 1)
        box = page.locator("#models").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert box["y"] >= 0 and box["y"] + box["height"] <= height
        assert page.locator("#model-list").evaluate("node => node.scrollWidth - node.clientWidth") <= 0
        page.keyboard.press("Escape")
        expect(chat.models).to_have_count(0)


def test_axe_finds_nothing_serious_in_the_open_list(chat, audit) -> None:
    """In a wide light window and in a narrow dark one."""
    page = chat.page
    places = ("slot", "disk", "cached")
    chat.offer([a | {"place": places[i % 3], "is_pinned": i % 2 == 0} for i, a in enumerate(MANY)])
    for scheme, width in (("dark", 390), ("light", 1280)):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        chat.picker.click()
        expect(chat.models).to_have_count(len(MANY) + 1)
        assert audit(page, "#models") == []
        page.keyboard.press("Escape")
