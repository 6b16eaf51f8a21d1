"""Two answers to one question side by side."""

from __future__ import annotations

import pytest

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.mark.parametrize("kept", ["The answer that is there", "The other answer", None])
def test_the_picker_and_the_list_name_the_model_that_the_conversation_goes_on_with(
    kept: str | None, wired, stage
) -> None:
    chat = wired()[0].open()
    chat.pick("shout")
    chat.ask("How high is the tide?")
    chat.page.get_by_role("button", name="Compare with another model").click()
    dialog = chat.page.get_by_role("dialog", name="Two answers")
    dialog.get_by_label("Compare with").select_option("pirate")
    dialog.get_by_role("button", name="Ask").click()
    keep = [
        dialog.get_by_role("region", name=name, exact=True).get_by_role("button", name="Keep this answer")
        for name in ("The answer that is there", "The other answer")
    ]
    expect(keep[1]).to_be_visible()
    with chat.page.expect_response(lambda response: response.request.method == "PATCH"):
        (
            dialog.get_by_role("button", name="Close") if kept is None else keep[kept == "The other answer"]
        ).click()
    name = "pirate" if kept == "The other answer" else "shout"
    expect(chat.picker).to_contain_text(name)
    expect(chat.page.locator(".session-row").first).to_contain_text(f", {name}")
    chat.ask("And now?")
    assert stage.gateway.node.answers[-1].request.adapter == name


def test_two_answers_stand_side_by_side_and_one_is_kept(wired, stage, audit, monkeypatch) -> None:
    chat = wired()[0].open()
    page = chat.page
    chat.ask("How high is the tide?")
    monkeypatch.setattr(stage.gateway.node, "script", ("It is ", "low."))
    page.get_by_role("button", name="Compare with another model").click()
    dialog = page.get_by_role("dialog", name="Two answers")
    dialog.get_by_label("Compare with").select_option("pirate")
    dialog.get_by_role("button", name="Ask").click()
    first = dialog.get_by_role("region", name="The answer that is there", exact=True)
    other = dialog.get_by_role("region", name="The other answer", exact=True)
    expect(other.locator(".answer")).to_have_text("It is low.")
    expect(other.get_by_role("heading")).to_have_text("pirate")
    expect(first.locator(".answer")).to_have_text("Well, hello.")
    assert audit(page, "dialog") == []
    request = stage.gateway.node.answers[-1].request
    assert request.adapter == "pirate" and [each.content for each in request.messages] == [
        "How high is the tide?"
    ]

    first.get_by_role("button", name="Keep this answer").click()
    expect(dialog).to_have_count(0)
    expect(page.locator("#transcript .answer")).to_have_text("Well, hello.")
    expect(page.locator(".version-count")).to_have_text("1/2")
    chat.ask("And now?")
    assert stage.gateway.node.answers[-1].request.adapter == ""
    asked = [each.content for each in stage.gateway.node.answers[-1].request.messages]
    assert asked == ["How high is the tide?", "Well, **hello**.", "And now?"]
