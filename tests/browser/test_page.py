"""The chat page in a real browser: what is asked, edited, kept and found, in front of a gateway whose answers are written here."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import openpyxl
import pytest
from PIL import Image

from tests.browser.conftest import Chat
from tests.browser.stage import Site

expect = pytest.importorskip("playwright.sync_api").expect

WAITS = "This will be sent as soon as the server is ready."


def asked(stage) -> list[str]:
    """The texts of the conversation that the node was given last."""
    return [message.content for message in stage.gateway.node.answers[-1].request.messages]


def test_stop_keeps_what_was_written(chat, stage) -> None:
    with stage.by_hand() as next_answer:
        for stop in (
            chat.page.get_by_role("button", name="Stop").click,
            lambda: chat.page.keyboard.press("Escape"),
        ):
            chat.start("Tell me a story.")
            next_answer().say("Once upon a time")
            expect(chat.answers.last).to_have_text("Once upon a time")
            stop()
            expect(chat.turns.last).to_have_attribute("data-status", "stopped")
            expect(chat.turns.last.get_by_text("What was written is kept.")).to_be_visible()
            expect(chat.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    chat.page.reload()
    expect(chat.answers).to_have_text(["Once upon a time"] * 2)


def test_arrow_up_edits_the_last_message_and_answer_again_keeps_the_answer_that_was_there(chat) -> None:
    chat.ask("Hello!")
    chat.question.press("ArrowUp")
    field = chat.page.get_by_role("textbox", name="Edit message")
    expect(field).to_have_value("Hello!")
    field.fill("something else")
    field.press("Escape")
    expect(field).to_have_count(0)
    expect(chat.page.locator(".bubble")).to_have_text("Hello!")

    first = chat.turns.first.get_attribute("data-turn")
    chat.page.get_by_role("button", name="Answer again").click()
    expect(chat.turns.first).not_to_have_attribute("data-turn", first)
    chat.wait_done()
    expect(chat.turns).to_have_count(1)
    expect(chat.page.locator(".bubble")).to_have_text("Hello!")
    chat.page.reload()
    expect(chat.turns).to_have_count(1)
    expect(chat.page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
    chat.page.get_by_role("button", name="Previous version").click()
    expect(chat.turns.first).to_have_attribute("data-turn", first)


def test_editing_an_earlier_message_hides_what_followed_until_its_arrow_is_pressed(
    chat, stage, audit
) -> None:
    chat.ask("Of plums.")
    chat.ask("And then?")
    chat.edit(chat.turns.first, "Of walnuts.")
    expect(chat.turns).to_have_count(1)
    chat.wait_done()
    chat.ask("What else?")
    assert asked(stage)[::2] == ["Of walnuts.", "What else?"]
    chat.page.reload()
    expect(chat.page.locator(".bubble")).to_have_text(["Of walnuts.", "What else?"])
    previous = chat.page.get_by_role("button", name="Previous version")
    previous.press("Enter")
    expect(chat.page.locator(".bubble")).to_have_text(["Of plums.", "And then?"])
    expect(chat.page.get_by_role("group", name="Version 1 of 2")).to_be_visible()
    expect(previous).to_be_focused()
    previous.press("Enter")  # leads nowhere
    assert audit(chat.page, "article.turn") == []
    chat.ask("What else?")
    assert asked(stage)[::2] == ["Of plums.", "And then?", "What else?"]
    chat.page.get_by_role("button", name="Next version").press("Space")
    expect(chat.page.locator(".bubble")).to_have_text(["Of walnuts.", "What else?"])


def test_a_renamed_and_pinned_conversation_stays_on_top_of_newer_ones(chat) -> None:
    """By the menu and by the keyboard; also after a reload."""
    first = "Kept on top"
    chat.ask("Hello!")
    row = chat.page.locator(".session-row").filter(has=chat.page.locator("[aria-current]"))
    row.get_by_role("button", name="Options").click()
    chat.page.get_by_role("menuitem", name="Rename").click()
    field = chat.page.get_by_role("textbox", name="New title")
    field.fill(first)
    field.press("Enter")
    expect(chat.page.locator("h1")).to_have_text(first)
    chat.row(first).get_by_role("button", name="Options").click()
    chat.page.get_by_role("menuitem", name="Pin").click()
    expect(chat.page.locator(".day").first).to_have_text("Pinned")
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    chat.ask("Hello!")
    expect(chat.page.locator(".session-row").first).to_contain_text(first)
    expect(chat.row(first).get_by_role("link")).to_have_attribute("title", re.compile(r"\n.*\d:\d\d"))
    chat.page.reload()
    expect(chat.page.locator(".session-row").first).to_contain_text(first)
    chat.row(first).locator(".session").press("p")
    expect(chat.page.locator(".day").first).to_have_text("Today")


def test_a_second_page_follows_what_is_asked_on_the_first_and_done_to_the_list(chat, visit) -> None:
    """A conversation that is asked in on either page, renamed, pinned and deleted on the first."""
    other = visit()
    expect(other.page.locator("#welcome")).to_be_visible()
    chat.ask("Seen elsewhere.")
    row = other.row("Seen elsewhere.")
    expect(row).to_have_count(1)
    row.locator(".session").click()
    expect(other.turns).to_have_count(1)
    chat.ask("Asked on the first page.")
    expect(other.turns).to_have_count(2)
    other.wait_done()
    expect(other.answers.last).to_have_text("Well, hello.")
    other.ask("Asked on the second.")
    expect(chat.turns).to_have_count(3)
    chat.wait_done()
    expect(chat.answers.last).to_have_text("Well, hello.")

    chat.row("Seen elsewhere.").locator(".session").press("p")
    expect(other.page.locator(".day").first).to_have_text("Pinned")
    chat.row("Seen elsewhere.").locator(".session").press("F2")
    chat.page.get_by_label("New title").fill("Named anew")
    chat.page.keyboard.press("Enter")
    expect(other.row("Named anew")).to_have_count(1)
    expect(other.page.locator("#title")).to_have_text("Named anew")
    other.question.fill("A thought that goes on")
    chat.row("Named anew").locator(".session").press("Delete")
    expect(other.row("Named anew")).to_have_count(0)
    expect(other.turns).to_have_count(0)
    expect(other.page.locator(".toast")).to_contain_text("does not exist any more")
    expect(other.question).to_have_value("")
    chat.page.get_by_role("button", name="Undo").click()
    expect(chat.turns).to_have_count(3)
    other.row("Named anew").locator(".session").click()
    expect(other.turns).to_have_count(3)
    expect(other.question).to_have_value("A thought that goes on")
    chat.row("Named anew").locator(".session").press("Delete")
    expect(other.turns).to_have_count(0)


def test_a_conversation_is_exported_and_imported(chat, tmp_path, page_watch) -> None:
    """As Markdown to be read; as JSON, which becomes another conversation that is opened. What is no conversation is refused in words."""
    name = "Copied out"
    chat.ask(f"{name}.")
    first = chat.session_id

    def exported(kind: str) -> Path:
        chat.row(name).first.get_by_role("button", name="Options").click()
        with chat.page.expect_download() as download:
            chat.page.get_by_role("menuitem", name=f"Export as {kind}").click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        return path

    markdown, whole = exported("Markdown"), exported("JSON")
    assert markdown.name == f"{name.replace(' ', '-')}.md" and f"## You\n\n{name}." in markdown.read_text()
    chat.page.keyboard.press("Control+,")
    chat.page.get_by_label("File to import").set_input_files(whole)
    expect(chat.row(name)).to_have_count(2)
    expect(chat.page.locator(".bubble")).to_have_text(f"{name}.")
    assert chat.session_id != first
    page_watch.forgive()
    chat.page.get_by_label("File to import").set_input_files(markdown)
    expect(
        chat.page.get_by_text("This file cannot be imported: it is neither JSON nor an archive")
    ).to_be_visible()


def test_search_finds_words_of_the_conversation_and_shows_the_version_that_holds_them(chat) -> None:
    chat.ask("My secret word is quincetree.")
    chat.edit(chat.turns.first, "Something else")
    expect(chat.page.locator(".bubble")).to_have_text("Something else")
    chat.wait_done()
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    chat.page.keyboard.press("Control+k")
    search = chat.page.get_by_role("searchbox", name="Search conversations")
    expect(search).to_be_focused()
    search.fill("quincetree")
    expect(chat.page.locator(".day").first).to_have_text("Results")
    expect(chat.page.locator(".session-row")).to_have_count(1)
    expect(chat.page.locator(".session-row .excerpt")).to_contain_text("secret word is quincetree.")
    expect(chat.page.locator(".session-row mark")).to_have_text("quincetree")
    search.press("Enter")
    chat.page.keyboard.press("Enter")
    expect(chat.page.locator(".bubble")).to_have_text("My secret word is quincetree.")
    search.fill("quincetreex")
    expect(chat.page.get_by_text("Nothing found.")).to_be_visible()
    search.press("Escape")
    expect(chat.page.locator(".day").first).to_have_text("Today")


def test_a_turn_that_was_found_is_at_the_top_of_a_long_conversation(chat) -> None:
    """Also where the turns before it have not been in sight yet, so that nobody knows how high they are."""
    page = chat.page
    turns = [
        {"role": role, "content": f"needle{number} " + "word " * (500 if role == "assistant" else 1)}
        for number in range(60)
        for role in ("user", "assistant")
    ]
    chat.bring_in({"messages": turns, "title": "Long"}, 60)
    for number in (20, 45, 3):
        page.get_by_role("searchbox").fill(f"needle{number} word")
        found = page.locator(".session-row", has_text=f"needle{number} word")
        expect(found).to_have_count(1)
        found.click()
        assert abs(page.evaluate(OFFSET_AT_REST, f"needle{number} ")) < 2


# How far below the top of what is seen a turn is, once that was the same for 20 frames.
OFFSET_AT_REST = """(word) => new Promise((resolve) => {
  const scroller = document.getElementById('scroller');
  const turn = [...document.querySelectorAll('.turn')].find((each) => each.textContent.includes(word));
  let [offset, frames] = [0, 0];
  const look = () => {
    const now = turn.getBoundingClientRect().top - scroller.getBoundingClientRect().top;
    frames = now === offset ? frames + 1 : 0;
    offset = now;
    if (frames < 20) requestAnimationFrame(look);
    else resolve(offset);
  };
  look();
})"""


def test_a_file_of_text_goes_along_with_a_message(chat) -> None:
    page = chat.page
    chooser = page.locator("#file")
    chooser.set_input_files([{"name": "notes.py", "mimeType": "text/x-python", "buffer": b"print('```')\n"}])
    chip = page.locator(".file")
    expect(chip).to_contain_text("notes.py")
    chooser.set_input_files([{"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\0\xff"}])
    expect(page.locator(".toast")).to_contain_text(
        "photo.png cannot be sent: the model of this server reads no pictures."
    )
    expect(chip).to_have_count(1)
    chat.ask("What is it?")
    expect(chip).to_have_count(0)
    assert chat.line.messages[-1]["content"] == "notes.py:\n````py\nprint('```')\n````\n\nWhat is it?"
    folded = page.locator(".bubble details")
    expect(folded.locator("summary")).to_have_text("notes.py")
    folded.locator("summary").click()
    expect(folded.locator("pre")).to_have_text("print('```')")


def test_a_document_goes_along_with_a_message_as_its_text(chat, page_watch, audit) -> None:
    """Its chip says how much it is and shows what will be sent; what cannot be read is said."""
    page_watch.forgive()  # the server refuses one
    page, book = chat.page, openpyxl.Workbook()
    book.active.append(["port", "height"])
    book.active.append(["Lisbon", 3.5])
    file = io.BytesIO()
    book.save(file)
    given = [("tides.xlsx", file.getvalue()), ("plan.pdf", b"%PDF-1.7 cut"), ("photo.raw", b"\0\1")]
    page.locator("#file").set_input_files(
        [
            {"name": name, "mimeType": "application/octet-stream", "buffer": data}
            for name, data in [*given, ("page.html", b"<h1>At sea</h1><script>no()</script>")]
        ]
    )
    chip = page.locator(".file")
    expect(chip).to_have_count(2)
    expect(chip.first).to_contain_text("tides.xlsx")
    expect(chip.first).to_contain_text("1 sheet · about 8 tokens")
    toast = page.locator(".toast")
    expect(toast).to_contain_text("plan.pdf could not be added. The document could not be read")
    expect(toast).to_contain_text("photo.raw is not a file of text, nor a document")
    chip.first.get_by_role("button", name="tides.xlsx", exact=True).click()
    preview = page.get_by_role("region", name="Text of tides.xlsx")
    expect(preview).to_have_text("# Sheet\nport,height\nLisbon,3.5")
    assert audit(page) == []
    page.keyboard.press("Escape")
    chat.ask("How high?")
    asked = chat.line.messages[-1]["content"]
    assert asked.startswith(
        "tides.xlsx:\n```xlsx\n# Sheet\nport,height\nLisbon,3.5\n```\n\npage.html:\n```html\nAt sea\n```"
    )
    expect(page.locator(".bubble summary")).to_have_text(["tides.xlsx", "page.html"])


def test_pictures_go_along_with_a_message_and_stay_in_its_conversation(chat, stage, page_watch) -> None:
    """Those that this browser can read are sent as PNG; a question may be a picture alone, and its edit keeps it."""
    page_watch.forgive()  # the server refuses one
    page, node = chat.page, stage.gateway.node
    node.max_images = 2
    try:
        page.reload()
        attach = page.get_by_role("button", name="Add pictures, documents or texts")
        expect(attach).to_be_visible()
        files = [("broken.png", "image/png", b"\x89PNG\0\xff"), ("ship.png", "image/png", shade(1))]
        files += [("old.bmp", "image/bmp", shade(2, "BMP")), ("third.png", "image/png", shade(3))]
        given = [{"name": name, "mimeType": kind, "buffer": data} for name, kind, data in files]
        page.locator("#file").set_input_files(given)
        toast = page.locator(".toast")
        expect(toast).to_contain_text("broken.png could not be added.")
        expect(toast).to_contain_text("third.png was left out: a message may have 2 pictures.")
        expect(page.locator(".file img")).to_have_count(2)
        page.get_by_role("button", name="Send", exact=True).click()
        chat.wait_done()
        expect(page.locator(".file")).to_have_count(0)
        sent = node.answers[-1].request.messages[-1]
        assert sent.content == "" and [each.media_type for each in sent.pictures] == ["image/png"] * 2
        page.reload()
        shown = page.get_by_role("img", name=re.compile("Picture [12],"))
        expect(shown).to_have_count(2)
        page.wait_for_function(
            "() => [...document.querySelectorAll('.pictures img')].every((each) => each.naturalWidth === 8)"
        )
        chat.edit(page.locator(".turn"), "What is it?")
        chat.wait_done()
        again = node.answers[-1].request.messages[-1]
        assert again.content == "What is it?" and again.pictures == sent.pictures
    finally:
        node.max_images = 0


def test_the_end_stays_in_sight_when_turns_are_laid_out_later_than_they_are_shown(chat) -> None:
    turns = [
        {"id": f"{number}", "parent": f"{number - 1}" if number else None, "content": f"number {number}"}
        | {"answer": "word " * 300, "status": "done"}
        for number in range(10)
    ]
    chat.bring_in({"format": "overture-conversation", "version": 1, "title": "Long", "turns": turns}, 10)
    below_px = "() => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight"
    chat.page.wait_for_function(f"{below_px} < 2")
    for height in (900, 0):
        chat.turns.last.evaluate("(turn, height) => { turn.style.paddingBottom = `${height}px`; }", height)
        chat.page.wait_for_function(f"{below_px} < 2")
    frames = "await new Promise((done) => { let left = 4; (function next() { if (left--) requestAnimationFrame(next); else done(); })(); });"
    chat.page.evaluate(f"async () => {{ scroller.scrollTop -= 50; {frames} }}")
    chat.turns.last.evaluate(f"async (turn) => {{ turn.style.paddingBottom = '900px'; {frames} }}")
    assert chat.page.evaluate(below_px) > 900


def test_pictures_are_read_when_they_come_into_sight(chat, stage) -> None:
    page, node = chat.page, stage.gateway.node
    node.max_images, read = 1, []
    page.on("request", lambda request: read.append(request.url) if "/api/pictures/" in request.url else None)
    turns = [
        {"id": f"{number}", "parent": f"{number - 1}" if number else None, "content": f"number {number}"}
        | {"answer": "word " * 500, "status": "done"}
        | {"pictures": [{"media_type": "image/png", "data": base64.b64encode(shade(number)).decode()}]}
        for number in range(30)
    ]
    whole = {"format": "overture-conversation", "version": 1, "title": "Pictures", "turns": turns}
    try:
        chat.bring_in(whole, 30)
        expect(page.get_by_role("img", name="Picture 1,").last).to_have_js_property("naturalWidth", 8)
        assert 0 < len(read) < 10
        page.locator("#scroller").evaluate("(scroller) => { scroller.scrollTop = 0; }")
        expect(page.get_by_role("img", name="Picture 1,").first).to_have_js_property("naturalWidth", 8)
        assert len(read) < 20
    finally:
        node.max_images = 0


def test_what_is_pasted_one_after_the_other_all_goes_along(chat, stage) -> None:
    """Browsers name every picture that is pasted "image.png"; what is still read when the message is sent is waited for."""
    page, node = chat.page, stage.gateway.node
    usual, node.max_model_len, node.max_images = node.max_model_len, 20000, 3
    try:
        page.reload()
        expect(page.get_by_role("button", name="Add pictures, documents or texts")).to_be_visible()
        page.evaluate(PASTE, [list(shade(grey)) for grey in (1, 2, 1)])
        page.get_by_role("button", name="Send", exact=True).click()
        chat.wait_done()
        message = node.answers[-1].request.messages[-1]
        assert [each.data for each in message.pictures] == [shade(2), shade(1)]
        assert [message.content.count(letter * 20000) for letter in "ab"] == [1, 1]
    finally:
        node.max_model_len, node.max_images = usual, 0


PASTE = """(pictures) => {
  const area = document.querySelector('.composer-box textarea');
  const paste = (fill) => {
    const clipboardData = new DataTransfer();
    fill(clipboardData);
    area.dispatchEvent(new ClipboardEvent('paste', { clipboardData, bubbles: true, cancelable: true }));
  };
  for (const letter of 'ab') paste((data) => data.setData('text/plain', letter.repeat(20000)));
  for (const bytes of pictures) {
    paste((data) => data.items.add(new File([new Uint8Array(bytes)], 'image.png', { type: 'image/png' })));
  }
  area.value = 'What is this?';
  area.dispatchEvent(new Event('input', { bubbles: true }));
}"""


def shade(grey: int, name: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (grey, grey, grey)).save(file, name)
    return file.getvalue()


def test_a_lost_server_is_said_and_what_is_sent_meanwhile_goes_once_it_is_back(chat, page_watch) -> None:
    """Unless its writer writes on: that takes it back."""
    page_watch.forgive()
    send = chat.page.get_by_role("button", name="Send", exact=True)

    def lose() -> None:
        chat.line.refuse = True
        chat.line.drop()
        expect(chat.banner).to_contain_text("The connection to the server is lost.")
        expect(chat.banner).to_contain_text(re.compile(r"Next try in \d+ s\."))
        chat.line.accept_from_click()

    lose()
    chat.question.fill("kept")
    expect(send).to_be_disabled()
    chat.send("Are you there?")
    expect(chat.page.get_by_text(WAITS)).to_be_visible()
    chat.question.press_sequentially(" And")
    expect(chat.page.get_by_text(WAITS)).to_be_hidden()
    chat.banner.get_by_role("button", name="Retry now").click()
    expect(chat.banner).to_be_hidden()
    expect(send).to_be_enabled()
    expect(chat.question).to_have_value("Are you there? And")
    assert not chat.line.messages

    chat.ask("Hello!")
    lose()
    chat.send("Are you there?")
    expect(chat.page.get_by_text(WAITS)).to_be_visible()
    expect(chat.question).to_have_value("Are you there?")
    chat.banner.get_by_role("button", name="Retry now").click()
    expect(chat.turns).to_have_count(2)
    chat.wait_done()
    expect(chat.question).to_have_value("")
    expect(chat.page.get_by_text(WAITS)).to_be_hidden()
    assert [frame["content"] for frame in chat.line.messages] == ["Hello!", "Are you there?"]


def test_a_starting_engine_shows_its_stage(wired) -> None:
    chat, wire = wired()
    starting = {"type": "error", "code": "starting", "message": "The engine is starting.", "retryable": True}
    state = {"status": "starting", "stage": "loading_weights", "elapsed_s": 4.2}
    wire.on_frame = lambda frame: starting if frame["type"] == "ready" else frame
    chat.page.route("**/readyz", lambda route: route.fulfill(status=200, json=state))
    chat.page.goto(chat.url)
    expect(chat.banner).to_contain_text("The engine is starting")
    expect(chat.banner).to_contain_text("loading weights · 4 s")
    wire.on_frame = lambda frame: frame
    chat.page.unroute("**/readyz")
    expect(chat.banner).to_be_hidden()
    expect(chat.picker).to_be_enabled()


def test_a_first_message_that_is_refused_and_dismissed_leaves_no_empty_conversation(chat) -> None:
    """Its text goes back to where it was written; dismissed or not, no list shows a conversation without a word."""
    chat.line.on_send = lambda frame: (
        chat.line.fail("bad_request", "Not like this.", turn=frame["id"], retryable=False)
        if frame["type"] == "message"
        else frame
    )
    chat.send("Hello!")
    dismiss = chat.page.get_by_role("button", name="Dismiss")
    expect(dismiss).to_be_visible()
    session_id = chat.session_id
    with chat.page.expect_response(lambda response: response.request.method == "DELETE"):
        dismiss.click()
    expect(chat.page.locator("#welcome")).to_be_visible()
    expect(chat.question).to_have_value("Hello!")
    expect(chat.page.locator(f".session[href$='{session_id}']")).to_have_count(0)
    assert chat.call("GET", f"/api/sessions/{session_id}").status == 404
    chat.send("Hello!")
    expect(chat.page.get_by_role("alert")).to_contain_text("Not like this.")
    session_id = chat.session_id
    chat.page.goto(chat.url)
    expect(chat.page.locator("#welcome")).to_be_visible()
    expect(
        chat.page.locator(".session-row")
        .or_(chat.page.get_by_text("Your conversations will be kept here."))
        .first
    ).to_be_visible()
    expect(chat.page.locator(f".session[href$='{session_id}']")).to_have_count(0)


def test_answers_go_on_in_sessions_that_are_not_shown(chat, stage) -> None:
    with stage.by_hand() as next_answer:
        chat.start("Hello!")
        answer = next_answer()
        link = chat.page.locator(f'.session[href="#/s/{chat.session_id}"]')
        chat.page.get_by_role("button", name="New chat", exact=True).click()
        expect(chat.page.locator("#welcome")).to_be_visible()
        expect(link.locator(".running")).to_have_text("(answering)")
        expect(link.locator(".running")).to_be_visible()
        answer.finish("Written in the background.")
    expect(link.locator(".running")).to_be_hidden()
    expect(chat.turns).to_have_count(0)
    link.click()
    chat.wait_done()


def test_drafts_survive_a_reload_and_belong_to_their_session(chat) -> None:
    chat.ask("Hello!")
    chat.question.fill("half a thought")
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    expect(chat.question).to_have_value("")
    chat.question.fill("another one")
    chat.page.reload()
    expect(chat.question).to_have_value("another one")
    chat.page.go_back()
    expect(chat.question).to_have_value("half a thought")
    chat.page.go_forward()
    expect(chat.question).to_have_value("another one")
    chat.question.fill("")


def test_typing_is_announced_without_the_text_and_anew_after_each_message(chat) -> None:
    chat.line.on_frame = lambda frame: None if frame["type"] == "advisory" else frame
    chat.ask("Hello!")
    for number in (1, 2, 3):
        chat.question.press_sequentially("abcdefgh")
        expect(chat.question).to_have_value("abcdefgh")
        typed = [frame for frame in chat.line.sent if frame["type"] == "typing"]
        assert len(typed) == number
        assert typed[-1]["session_id"] == chat.session_id
        assert "draft" not in typed[-1]
        chat.question.press("Enter")
        chat.wait_done(chat.turns.nth(number))


def test_examples_of_the_demo_model_are_not_offered_for_another(wired) -> None:
    chat, wire = wired()
    wire.on_frame = lambda frame: (
        frame | {"models": [model | {"id": "qwen3"} for model in frame["models"][:1]]}
        if frame["type"] == "ready"
        else frame
    )
    chat.open()
    expect(chat.page.locator("#welcome h2")).to_be_visible()
    expect(chat.page.locator("#examples li")).to_have_count(0)
    expect(chat.page.get_by_text("Pick a voice")).to_be_hidden()


def test_a_question_goes_along_while_it_is_typed_only_with_the_users_leave(wired) -> None:
    chat, wire = wired()
    wire.on_frame = lambda frame: (
        frame | {"server": frame["server"] | {"drafts": True}} if frame["type"] == "ready" else frame
    )
    chat.open()
    chat.question.press_sequentially("a secret")
    assert not [frame for frame in wire.sent if frame["type"] == "typing"]
    chat.page.get_by_role("button", name="Settings").click()
    chat.page.get_by_label("Prepare as I type").check()
    chat.question.press_sequentially(" plan")
    drafts: list[str] = []
    for _ in range(100):
        drafts = [frame["draft"] for frame in wire.sent if frame["type"] == "typing"]
        if drafts[-1:] == ["a secret plan"]:
            break
        chat.page.wait_for_timeout(50)
    assert drafts[-1] == "a secret plan"
    chat.page.reload()
    chat.page.get_by_role("button", name="Settings").click()
    expect(chat.page.get_by_label("Prepare as I type")).to_be_checked()


def test_settings_are_kept_with_their_conversation_and_sent_before_the_next_message(
    wired, stage, page_watch
) -> None:
    """Also those of a chat that has no id yet; the sheet's code is loaded when it is first opened, and Escape closes it."""
    chat, wire = wired()
    wire.sampling = None
    scripts: list[str] = []
    chat.page.on("request", lambda request: scripts.append(request.url))
    chat.open()
    assert not [url for url in scripts if "sheet" in url]
    button = chat.page.get_by_role("button", name="Settings")
    button.focus()
    chat.page.keyboard.press("Control+,")
    prompt = chat.page.get_by_label("System prompt")
    expect(prompt).to_be_focused()
    prompt.fill("Be brief.")
    chat.page.get_by_label("Longest answer").fill("3")
    with stage.by_hand() as next_answer:
        chat.start("Tell me a story.")
        writer = next_answer()
        writer.finish("Once", reason="length")
    chat.wait_done()
    request = writer.answer.request
    assert request.messages[0].content == "Be brief." and request.sampling.max_tokens == 3
    expect(chat.page.get_by_text("The answer reached the length limit.")).to_be_visible()
    temperature = chat.page.get_by_label("Temperature")
    temperature.fill("5")
    expect(chat.page.locator(".sheet-status")).to_contain_text("Not saved")
    page_watch.forgive()
    chat.page.route("**/api/sessions/*", lambda route: route.abort())
    temperature.fill("0.5")
    expect(chat.page.locator(".sheet-status")).to_contain_text("could not be reached")
    chat.page.unroute("**/api/sessions/*")
    chat.page.get_by_role("button", name="Try again").click()
    expect(chat.page.locator(".sheet-status")).to_have_text("Saved")
    temperature.press("Escape")
    expect(prompt).to_be_hidden()
    expect(button).to_be_focused()
    chat.page.reload()
    button.click()
    expect(prompt).to_have_value("Be brief.")
    expect(temperature).to_have_value("0.5")
    chat.page.keyboard.press("Control+Shift+O")
    expect(prompt).to_have_value("")


def test_an_address_that_is_none_and_a_list_with_odd_entries(visit) -> None:
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


def test_a_wrong_key_a_new_one_and_one_that_is_withdrawn(open_page, stage, page_watch) -> None:
    """The last test here: the page that the others share is locked when its key is withdrawn."""
    page_watch.forgive()
    chat = Chat(open_page(), Site(stage.url))
    page = chat.page
    page.goto(stage.url)

    def enter(key: str) -> None:
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Continue").click()

    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("It is kept in this browser only.")
    enter("ov-no-such-key-for-tests-only")
    expect(dialog).to_contain_text("did not accept that key")
    enter(stage.keys["ann"])
    expect(chat.question).to_be_focused()
    chat.ask("Hello!")
    session = chat.session_id
    chat.question.fill("half a thought")
    unsent = {
        "type": "message",
        "id": "left",
        "session_id": session,
        "content": "Words of ann alone",
        "adapter": None,
    }
    page.evaluate("text => localStorage.setItem('overture.unsent.left', text)", json.dumps(unsent))
    page.evaluate("localStorage.setItem('overture.draft.new', 'A question that ann did not ask')")
    page.locator("#file").set_input_files(
        [{"name": "plan.txt", "mimeType": "text/plain", "buffer": b"secret"}]
    )
    expect(page.locator(".file")).to_be_visible()
    page.get_by_role("button", name="Compare with another model").click()
    expect(page.get_by_role("dialog", name="Two answers")).to_be_visible()
    stage.write_keys("bob")
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    expect(dialog).to_contain_text("not accepted any more")
    shown = (".bubble", ".session", "#question", "#search", ".file", "dialog .answer")
    for part in shown:
        expect(page.locator(part).first).to_be_hidden()
    assert page.title() == "Overture"
    stage.line.freeze("down")
    enter(stage.keys["bob"])
    expect(page.get_by_label("API key")).to_have_count(0)
    for part in shown:
        expect(page.locator(part).first).to_be_hidden()
    stage.line.thaw()
    expect(page.get_by_text("Your conversations will be kept here.")).to_be_visible()
    expect(page.locator(".bubble")).to_have_count(0)
    expect(page.locator(f".session[href='#/s/{session}']")).to_have_count(0)
    expect(chat.question).to_have_value("")
    assert chat.ask("Hello from another key.")
    expect(page.locator(".session")).to_have_count(1)
    stage.write_keys("ann", "bob")
    page.evaluate("key => localStorage.setItem('overture.key', key)", stage.keys["ann"])
    page.goto("about:blank")
    page.goto(f"{stage.url}/#/s/{session}")
    expect(page.locator(".bubble")).to_have_text(["Hello!", "Words of ann alone"])
    expect(chat.question).to_have_value("half a thought")
    page.get_by_role("button", name="Settings").click()
    sheet = page.get_by_role("dialog")
    expect(sheet).to_contain_text("Signed in as ann")
    expect(sheet.get_by_role("link", name="People of this server")).to_be_hidden()
    sheet.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.locator(".bubble")).to_have_count(0)
    kept = page.evaluate("Object.keys(localStorage)")
    assert not [
        name for name in kept if name.startswith(("overture.key", "overture.draft", "overture.unsent"))
    ]
