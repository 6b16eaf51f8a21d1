"""Files to import that are broken, or made to do harm: they are refused in words, or read as far as they can be, and the page stays well."""

from __future__ import annotations

import io
import json
import zipfile

import pytest

from tests.browser.test_transfers import CHATGPT, CLAUDE, OPEN_WEBUI

expect = pytest.importorskip("playwright.sync_api").expect


def said(text: object, parent: object = None, role: object = "user") -> dict[str, object]:
    return {"parent": parent, "message": {"author": {"role": role}, "content": {"parts": [text]}}}


HOSTILE = [
    {"mapping": {"a": said("one", "b"), "b": said("two", "a")}, "current_node": "a"},
    {"mapping": {"a": said("alone", "a")}, "current_node": "a"},
    {"mapping": {"a": said("last")}, "current_node": "gone"},
    {"mapping": {"a": said("x" * 5), "b": said(7, "a"), "c": said("deep", "b", {"role": []}), "d": 5, "e": None}},
    {"mapping": {"a": said("own", "__proto__")}, "title": "x" * 199 + "🙂"},
    {"mapping": {"a": said("half \ud83d")}, "title": {"toString": 1}},
    {"mapping": {"a": said("half \ud83d")}, "title": ["\udc00"], "create_time": "1e999", "update_time": {}},
    {"chat_messages": [{"sender": "human", "content": {"map": 1}, "text": "x"}]},
    {"chat_messages": [{"sender": "human", "content": [None, {"text": {}}], "text": "fallen back"}, 3]},
    {"chat": {"history": {"messages": {"1": {"parentId": "1", "role": "user", "content": "loop"}}, "currentId": "1"}}},
    {"chat": {"history": {"messages": 4, "currentId": {}}}},
]  # fmt: skip
UNDERSTOOD = [
    ["two\n\none"],
    ["alone"],
    ["last"],
    ["xxxxx"],
    ["own"],
    None,
    ["half \ufffd"],
    None,
    ["fallen back"],
    ["loop"],
    [],
]


def test_hostile_conversations_of_others_do_no_harm(bare_page) -> None:
    """Circles, wrong types, half characters, missing nodes; and as many messages as fit into a file."""
    understand = "async (text) => (await import('/js/transfer/foreign.js')).conversationsOf(JSON.parse(text))"
    found = bare_page.evaluate(understand, json.dumps(HOSTILE))
    asked = [item.get("turns") and [turn["content"] for turn in item["turns"]] for item in found]
    assert [turns or [] for turns in asked] == [turns or [] for turns in UNDERSTOOD]
    assert [("turns" in item) for item in found] == [turns is not None for turns in UNDERSTOOD]
    assert found[4]["title"] == "x" * 199 + "\ufffd" and found[6]["title"] == "\ufffd"
    assert found[6]["created_at"] == found[6]["updated_at"] == 0
    many = f"""() => {{
      const mapping = {{}};
      const message = {{ author: {{ role: 'user' }}, content: {{ parts: ['x'] }} }};
      for (let at = 0; at < 500000; at += 1) mapping[at] = {{ parent: at - 1, message }};
      return ({understand})(JSON.stringify({{ mapping }})).then(([found]) => found.turns.length);
    }}"""
    assert bare_page.evaluate(many) == 1


def test_what_a_hostile_file_holds_is_refused_in_words_and_the_rest_imported(wired, page_watch) -> None:
    page_watch.forgive()  # the server refuses some
    chat = wired()[0].open()
    chat.page.keyboard.press("Control+,")
    file = {"name": "conversations.json", "mimeType": "application/json"}
    deep = "[" * 200_000 + "]" * 200_000
    own = {"format": "overture-conversation", "version": 1}
    many = own | {"turns": [{"id": f"{number}", "content": "x"} for number in range(10_001)]}
    empty = {"mapping": {}}
    for text, said in (
        (f"[{deep}, {json.dumps(CHATGPT | {'title': 'Beside it'})}]", "1 of 2 conversations were imported. The body nests 200,000 levels deep"),
        (json.dumps([many, CLAUDE, empty]), "It has 10001 turns, and 10000 are the most. 1 without messages left out."),
        (json.dumps(empty), "There is no conversation in this file."),
        (json.dumps([OPEN_WEBUI, empty]), "“Of Open WebUI” imported. 1 without messages left out."),
        ('{"format": "overture-conversation"' * 1000, "it is broken"),
    ):  # fmt: skip
        chat.page.get_by_label("File to import").set_input_files([file | {"buffer": text.encode()}])
        expect(chat.page.locator(".toast").last).to_contain_text(said)
        expect(chat.page.locator("dialog[open] progress")).to_have_count(0)
    for title in ("Beside it", "Of Claude", "Of Open WebUI"):
        expect(chat.row(title)).to_be_visible()


def archive_of(name: str, content: bytes, num_bytes: int | None = None) -> bytes:
    """A packed archive of one file. num_bytes: what it says of the file's size."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    data = whole.getvalue()
    if num_bytes is not None:
        for mark, field in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
            at = data.index(mark) + field
            data = data[:at] + num_bytes.to_bytes(4, "little") + data[at + 4 :]
    return data


def test_a_bomb_is_not_unpacked_and_a_path_leads_nowhere(wired) -> None:
    chat = wired()[0].open()
    chat.page.keyboard.press("Control+,")
    one = json.dumps([CHATGPT | {"title": "Out of a path"}]).encode()
    bomb = one + b" " * (200 << 20)
    for buffer, said in (
        (archive_of("conversations.json", bomb, len(one)), "or it is broken"),
        (archive_of("conversations.json", bomb, 0xFFFFFFF0), "or it is broken"),
        (archive_of("../../etc/conversations.json", one), "“Out of a path” imported."),
        (archive_of("C:\\conversations.json", one), "or it is broken"),
    ):
        file = {"name": "export.zip", "mimeType": "application/zip", "buffer": buffer}
        chat.page.get_by_label("File to import").set_input_files([file])
        expect(chat.page.locator(".toast").last).to_contain_text(said)
