"""Conversations from elsewhere, all of them as one file, and all of them deleted."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest

expect = pytest.importorskip("playwright.sync_api").expect

CHATGPT = {
    "title": "Of ChatGPT",
    "create_time": 1700000000.5,
    "update_time": 1700000001,
    "current_node": "d",
    "mapping": {
        "r": {"id": "r", "message": None, "parent": None, "children": ["s"]},
        "s": {"id": "s", "message": {"author": {"role": "system"}, "content": {"parts": ["Be kind."]}}, "parent": "r"},
        "a": {"id": "a", "message": {"author": {"role": "user"}, "content": {"parts": ["How high?"]}}, "parent": "s"},
        "b": {"id": "b", "message": {"author": {"role": "assistant"}, "content": {"parts": ["Left aside."]}}, "parent": "a"},
        "c": {"id": "c", "message": {"author": {"role": "assistant"}, "content": {"content_type": "code", "text": "x"}}, "parent": "a"},
        "t": {"id": "t", "message": {"author": {"role": "tool"}, "content": {"parts": ["42"]}}, "parent": "c"},
        "d": {"id": "d", "message": {"author": {"role": "assistant"}, "content": {"parts": [{"image": 1}, "Three metres."]}}, "parent": "t"},
    },
}  # fmt: skip
CLAUDE = {
    "name": "Of Claude",
    "created_at": "2026-01-02T03:04:05Z",
    "chat_messages": [
        {"sender": "human", "text": "How low?", "content": [{"type": "text", "text": "How low?"}]},
        None,
        {"sender": "assistant", "text": "One metre.", "content": []},
    ],
}
OPEN_WEBUI = {
    "title": "Of Open WebUI",
    "created_at": 1700000000,
    "chat": {
        "history": {
            "currentId": "2",
            "messages": {
                "1": {"id": "1", "parentId": None, "role": "user", "content": "When?"},
                "2": {"id": "2", "parentId": "1", "role": "assistant", "content": "At six."},
                "3": {"id": "3", "parentId": "1", "role": "assistant", "content": "Never."},
            },
        }
    },
}


def test_conversations_of_others_are_understood(bare_page) -> None:
    found = bare_page.evaluate(
        "async (data) => (await import('/js/transfer/foreign.js')).conversationsOf(data)",
        [CHATGPT, CLAUDE, OPEN_WEBUI, {"messages": []}, {"mapping": {}}, 7, {"chat": {"messages": 3}}],
    )
    turns = [[(turn["content"], turn["answer"]) for turn in item["turns"]] for item in found[:3]]
    assert turns == [[("How high?", "Three metres.")], [("How low?", "One metre.")], [("When?", "At six.")]]
    assert [item["title"] for item in found[:3]] == ["Of ChatGPT", "Of Claude", "Of Open WebUI"]
    assert [item["created_at"] for item in found[:3]] == [1700000000.5, 1767323045, 1700000000]
    assert found[4].pop("turns") == []
    assert [found[3], *found[5:]] == [{"messages": []}, 7, {"chat": {"messages": 3}}], (
        "what is not understood is left to the server"
    )


def test_all_conversations_come_in_go_out_and_are_deleted(wired, page_watch) -> None:
    page_watch.forgive()  # the server refuses one
    chat = wired()[0].open()
    page = chat.page
    page.keyboard.press("Control+,")
    file = {"name": "conversations.json", "mimeType": "application/json"}
    several = json.dumps([CHATGPT, CLAUDE, OPEN_WEBUI, {"nothing": 1}]).encode()
    page.get_by_label("File to import").set_input_files([file | {"buffer": several}])
    expect(page.locator(".toast")).to_contain_text(
        "3 of 4 conversations were imported. This file cannot be imported."
    )
    expect(chat.row("Of Claude")).to_be_visible()
    expect(page.locator(".bubble")).to_have_text("When?")

    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    whole = json.loads(Path(download.value.path()).read_text())
    assert {item["title"] for item in whole} == {"Of ChatGPT", "Of Claude", "Of Open WebUI"}

    page.get_by_role("button", name="Delete all").click()
    dialog = page.get_by_role("dialog", name="Delete all 3 conversations?")
    dialog.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".session-row")).to_have_count(0)
    expect(chat.turns).to_have_count(0)
    page.locator(".toast").get_by_role("button", name="Undo").click()
    expect(page.locator(".session-row")).to_have_count(3)
    expect(page.locator(".toast")).to_contain_text("3 brought back.")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_is_imported_as_it_was_exported(wired, method: int) -> None:
    chat = wired()[0].open()
    chat.page.keyboard.press("Control+,")
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", method) as archive:
        archive.writestr("export/chat.html", "<p>How high?</p>" * 1000)
        archive.writestr("export/conversations.json", json.dumps([CHATGPT | {"title": f"Zip {method}"}]))
        archive.comment = b"made by a test"
    for buffer, said in (
        (whole.getvalue(), f"“Zip {method}” imported."),
        (whole.getvalue()[:-60], "it is neither JSON nor an archive"),
        (b"PK\x05\x06" + bytes(18), "it is neither JSON nor an archive"),
    ):
        file = {"name": "export.zip", "mimeType": "application/zip", "buffer": buffer}
        chat.page.get_by_label("File to import").set_input_files([file])
        expect(chat.page.locator(".toast").last).to_contain_text(said)
    expect(chat.row(f"Zip {method}")).to_be_visible()
