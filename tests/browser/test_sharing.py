"""Conversations by link, and presets, as two people see them."""

from __future__ import annotations

import base64

import pytest

from tests.browser.conftest import Chat
from tests.browser.stage import Site
from tests.unit.gateway.test_pictures import image

expect = pytest.importorskip("playwright.sync_api").expect


def test_a_conversation_is_read_by_its_link_until_that_is_withdrawn(
    wired, open_page, stage, page_watch, audit
) -> None:
    page_watch.forgive()  # the withdrawn link is not found
    chat = wired()[0].open()
    chat.ask("How high is the tide?")
    row = chat.row("How high is the tide?")
    row.hover()
    row.get_by_role("button", name="Options").click()
    chat.page.get_by_role("menuitem", name="Share with the team").click()
    dialog = chat.page.get_by_role("dialog", name="Share with the team")
    field = dialog.get_by_label("Link")
    label, box = dialog.locator("label").bounding_box(), field.bounding_box()
    assert box["y"] >= label["y"] + label["height"] and box["width"] > 350, (
        "the label stands above, the link in full width"
    )
    link = field.input_value()
    assert link.startswith(f"{stage.url}/#/shared/")

    other = Chat(open_page(), Site(stage.url, stage.keys["bob"]))
    other.page.goto(link)
    shown = other.page.get_by_role("dialog", name="How high is the tide?")
    expect(shown.locator(".bubble")).to_have_text("How high is the tide?")
    expect(shown.locator(".answer")).to_have_text("Well, hello.")
    assert other.page.evaluate("location.hash") == ""
    assert audit(other.page, "dialog") == audit(chat.page, "dialog") == []
    shown.get_by_role("button", name="Go on in a copy").click()
    expect(shown).to_have_count(0)
    expect(other.page.locator("#transcript .turn")).to_have_count(1)
    other.ask("And low?")

    dialog.get_by_role("button", name="Stop sharing").click()
    expect(dialog).to_have_count(0)
    other.page.goto("about:blank")
    other.page.goto(link)
    expect(other.page.locator(".toast")).to_contain_text("There is no such link, or it was withdrawn.")


def test_a_reader_sees_the_pictures_of_a_shared_conversation(visit, open_page, stage, audit) -> None:
    """Once they are almost in sight; the last one stands below a long answer."""
    chat = visit()
    turns = [
        {"id": f"{number}", "parent": f"{number - 1}" if number else None, "status": "done"}
        | {"content": "What is it?" if number else "", "answer": "A ship. " * 2000}
        | {"pictures": [{"media_type": "image/png", "data": base64.b64encode(image(90 * number)).decode()}]}
        for number in range(2)
    ]
    whole = {"format": "overture-conversation", "version": 1, "title": "Ships", "turns": turns}
    chat.bring_in(whole, 2)
    token = chat.call("POST", f"/api/sessions/{chat.session_id}/link").json()["token"]
    other = Chat(open_page(), Site(stage.url, stage.keys["bob"]))
    read: list[str] = []
    other.page.on(
        "request", lambda request: read.append(request.url) if "/pictures/" in request.url else None
    )
    other.page.goto(f"{stage.url}/#/shared/{token}")
    shown = other.page.get_by_role("dialog", name="Ships")
    pictures = shown.get_by_role("img", name="Picture 1, 8 × 6 pixels")
    expect(pictures).to_have_count(2)
    expect(pictures.first).to_have_js_property("naturalWidth", 8)
    expect(shown.locator(".bubble")).to_have_text(["What is it?"])
    assert len(read) == 1 and f"/api/shared/{token}/pictures/" in read[0]
    assert audit(other.page, "dialog") == []
    pictures.last.scroll_into_view_if_needed()
    expect(pictures.last).to_have_js_property("naturalWidth", 8)
    shown.get_by_role("button", name="Go on in a copy").click()
    expect(shown).to_have_count(0)
    expect(other.page.locator("#transcript .pictures img")).to_have_count(2)


def test_a_preset_brings_its_settings_and_is_shared_by_operators_alone(wired, stage, audit) -> None:
    chat = wired()[0].open()
    page = chat.page
    page.keyboard.press("Control+,")
    prompt, preset = page.get_by_label("System prompt"), page.get_by_label("Preset", exact=True)
    expect(preset).to_be_disabled()
    prompt.fill("Be patient.")
    page.get_by_text("More about sampling").click()
    page.get_by_label("Stop at").fill("END\nSTOP")
    page.get_by_label("Top p").fill("0.5")
    page.get_by_role("button", name="Save as preset").click()
    dialog = page.get_by_role("dialog", name="Save as preset")
    expect(dialog.get_by_label("Share with the team")).to_have_count(0)
    assert audit(page) == []
    dialog.get_by_label("Name").fill("Patient")
    dialog.get_by_role("button", name="Save").click()
    expect(preset).to_have_value("0")
    page.reload()
    page.keyboard.press("Control+,")
    expect(prompt).to_have_value("")
    preset.select_option(label="Patient")
    expect(prompt).to_have_value("Be patient.")
    expect(page.get_by_text("Kept for this new chat")).to_be_visible()
    chat.ask("Hello!")
    sampling = stage.gateway.node.answers[-1].request.sampling
    assert (sampling.stop, sampling.top_p) == (["END", "STOP"], 0.5)
    page.get_by_role("button", name="Delete preset").click()
    expect(preset).to_be_disabled()
