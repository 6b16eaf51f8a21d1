"""The chat page in a real browser against a real gateway with the demo model."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

expect = pytest.importorskip("playwright.sync_api").expect

STATIC = Path(__file__).resolve().parents[2] / "static"
# Of the chat page, and of what is loaded later or by other pages: the page of the API, the engine room, what these share, the side sheet,
# formulas, files, the list of shortcuts, the menu and the title field of a conversation, an answer's timings, the form that edits a question,
# the question for a key, dialogs, export and import, the way without websockets, what the demo model is asked for example, the list of
# adapters, what copies to the clipboard, and what renders Markdown with its code and formulas, which comes with the first answer.
OWN_BYTES_MAX = 150 * 1000
LATER_BYTES_MAX = {
    "docs": 30 * 1000,
    "engine": 35 * 1000,
    "sheet": 20 * 1000,
    "maths": 5 * 1000,
    "files": 10 * 1000,
    "shortcuts": 2 * 1000,
    "menu": 2 * 1000,
    "transfer": 3 * 1000,
    "events": 2 * 1000,
    "welcome": 2 * 1000,
    "rename": 2 * 1000,
    "timings": 2 * 1000,
    "editor": 2 * 1000,
    "key": 2 * 1000,
    "dialogs": 1000,
    "beside": 1000,
    "copy": 2 * 1000,
    "models": 9 * 1000,
    "markdown": 9 * 1000,
    "formulas": 4 * 1000,
    "highlight": 2 * 1000,
}
STORY = "Tell me a long story."
WAITS = "This will be sent as soon as the server is ready."
# Goes on for long enough to be interrupted, however fast the machine.
ROOMY = {"temperature": 1.0, "max_tokens": 3000, "ignore_eos": True}


def test_the_first_screen_offers_examples_an_answer_streams_and_shows_its_timings_and_keys_have_help(
    wired,
) -> None:
    chat, wire = wired()
    pieces: list[str] = []

    def note(frame):
        if frame["type"] == "delta":
            pieces.append(frame["text"])
        return frame

    wire.on_frame = note
    chat.open()
    expect(chat.page.get_by_role("heading", name="What would you like to talk about?")).to_be_visible()
    # They come once the server has said which model it is.
    expect(chat.page.locator(".example").nth(2)).to_be_visible()
    chat.page.locator(".example").first.click()
    expect(chat.question).not_to_have_value("")
    expect(chat.question).to_be_focused()
    chat.question.fill("one")
    chat.question.press("Shift+Enter")
    chat.question.press_sequentially("two")
    expect(chat.question).to_have_value("one\ntwo")

    answer = chat.ask(STORY)
    expect(chat.question).to_have_value("")
    assert len(pieces) > 1, "the answer came in one piece"
    assert answer.split() == "".join(pieces).split()
    summary = chat.page.locator(".timings summary")
    expect(summary).to_contain_text("first word")
    expect(summary).not_to_contain_text("tokens")
    summary.click()
    expect(chat.page.locator(".timings dl")).to_contain_text("Computed anew")
    expect(chat.page.locator("h1")).not_to_have_text("New chat")

    chat.page.locator("#scroller").focus()
    chat.page.keyboard.press("?")
    expect(chat.page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    chat.page.keyboard.press("Escape")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)


def test_it_remembers_a_secret_word_also_after_a_reload(open_page, make_chat, gateway_url) -> None:
    chat = make_chat(open_page(), gateway_url).open()
    chat.ask("My secret word is marzipan.")
    before = chat.answers.all_inner_texts()
    chat.page.reload()
    expect(chat.answers).to_have_text(before)
    assert "marzipan" in chat.ask("What is my secret word?").lower()


def test_an_adapter_changes_the_voice_stays_with_the_session_and_gives_way_to_another(chat) -> None:
    plain = chat.ask("Hello!")
    assert plain != plain.upper()
    chat.pick("shout")
    answer = chat.ask("Hello!")
    assert answer == answer.upper() and "!!!" in answer
    expect(chat.page.locator(".timings summary").last).to_contain_text("shout")
    chat.page.reload()
    expect(chat.picker).to_have_text(re.compile("shout"))
    chat.pick("pirate")
    assert chat.ask("How are you?").startswith("Arr")


def test_stop_keeps_what_was_written(wired) -> None:
    chat, wire = wired()
    wire.sampling = ROOMY
    chat.open()
    for stop in (
        chat.page.get_by_role("button", name="Stop").click,
        lambda: chat.page.keyboard.press("Escape"),
    ):
        chat.send(STORY)
        expect(chat.turns.last).to_have_attribute("data-status", "running")
        expect(chat.answers.last).not_to_be_empty()
        stop()
        expect(chat.turns.last).to_have_attribute("data-status", "stopped")
        expect(chat.turns.last.get_by_text("What was written is kept.")).to_be_visible()
        expect(chat.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    kept = chat.answers.all_inner_texts()
    assert len(kept) == 2
    chat.page.reload()
    expect(chat.answers).to_have_text(kept, use_inner_text=True)


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


def test_editing_an_earlier_message_hides_what_followed_until_its_arrow_is_pressed(chat, audit) -> None:
    chat.ask("My secret word is plum.")
    chat.ask("Hello!")
    chat.turns.first.hover()
    chat.turns.first.get_by_role("button", name="Edit message").click()
    field = chat.page.get_by_role("textbox", name="Edit message")
    expect(field).to_be_focused()
    field.fill("My secret word is walnut.")
    field.press("Enter")
    expect(chat.turns).to_have_count(1)
    chat.wait_done()
    assert "walnut" in chat.ask("What is my secret word?").lower()
    chat.page.reload()
    expect(chat.page.locator(".bubble")).to_have_text(
        ["My secret word is walnut.", "What is my secret word?"]
    )
    previous = chat.page.get_by_role("button", name="Previous version")
    previous.press("Enter")
    expect(chat.page.locator(".bubble")).to_have_text(["My secret word is plum.", "Hello!"])
    expect(chat.page.get_by_role("group", name="Version 1 of 2")).to_be_visible()
    expect(previous).to_be_focused()
    previous.press("Enter")  # leads nowhere
    assert audit(chat.page) == []
    assert "plum" in chat.ask("What is my secret word?").lower()
    chat.page.get_by_role("button", name="Next version").press("Space")
    expect(chat.page.locator(".bubble")).to_have_text(
        ["My secret word is walnut.", "What is my secret word?"]
    )


def test_rename_delete_and_undo(chat) -> None:
    name = f"Plans {uuid.uuid4().hex[:8]}"
    chat.ask("Hello!")
    session_id = chat.session_id
    row = chat.page.locator(".session-row").filter(has=chat.page.locator("[aria-current]"))
    row.get_by_role("button", name="Options").click()
    chat.page.get_by_role("menuitem", name="Rename").click()
    field = chat.page.get_by_role("textbox", name="New title")
    field.fill(name)
    field.press("Enter")
    expect(chat.page.locator("h1")).to_have_text(name)

    chat.row(name).get_by_role("button", name="Options").click()
    chat.page.get_by_role("menuitem", name="Delete").click()
    expect(chat.row(name)).to_have_count(0)
    expect(chat.page.locator("#welcome")).to_be_visible()
    assert chat.page.request.get(f"{chat.url}/api/sessions/{session_id}").status == 404

    chat.page.get_by_role("button", name="Undo").click()
    expect(chat.row(name)).to_have_count(1)
    expect(chat.page.locator(".bubble")).to_have_text("Hello!")
    assert chat.page.request.get(f"{chat.url}/api/sessions/{session_id}").ok


def test_a_pinned_conversation_stays_on_top_of_newer_ones(chat) -> None:
    """By the menu and by the keyboard; also after a reload."""
    first = f"Pinned {uuid.uuid4().hex[:8]}"
    chat.ask(f"{first}.")
    chat.row(first).get_by_role("button", name="Options").click()
    chat.page.get_by_role("menuitem", name="Pin").click()
    expect(chat.page.locator(".day").first).to_have_text("Pinned")
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    chat.ask("Hello!")
    expect(chat.page.locator(".session-row").first).to_contain_text(first)
    expect(chat.row(first).locator("time")).to_have_text(re.compile(r"\d:\d\d"))
    chat.page.reload()
    expect(chat.page.locator(".session-row").first).to_contain_text(first)
    chat.row(first).locator(".session").press("p")
    expect(chat.page.locator(".day").first).to_have_text("Today")


def test_a_second_page_follows_what_is_asked_on_the_first_and_done_to_the_list(
    chat, open_page, make_chat
) -> None:
    """A conversation that is asked in on either page, renamed, pinned and deleted on the first, and one that a call of the API goes on with."""
    other = make_chat(open_page(), chat.url).open()
    expect(other.page.locator("#welcome")).to_be_visible()
    name = f"Seen {uuid.uuid4().hex[:8]}"
    chat.ask(f"{name}.")
    row = other.row(name)
    expect(row).to_have_count(1)
    row.locator(".session").click()
    expect(other.turns).to_have_count(1)

    chat.ask("My secret word is marzipan.")
    expect(other.turns).to_have_count(2)
    other.wait_done()
    expect(other.answers.last).to_have_text(chat.answers.last.inner_text())
    other.ask("What is my secret word?")
    expect(chat.turns).to_have_count(3)
    chat.wait_done()
    expect(chat.answers.last).to_contain_text("marzipan")

    question = {"role": "user", "content": "And now?"}
    body = {"messages": [question], "max_tokens": 4, "session_id": chat.session_id}
    assert chat.page.request.post(f"{chat.url}/v1/chat/completions", data=body).ok
    for page in (chat, other):
        expect(page.turns).to_have_count(4)
    chat.row(name).locator(".session").press("p")
    expect(other.page.locator(".day").first).to_have_text("Pinned")
    renamed = f"Named {uuid.uuid4().hex[:8]}"
    chat.row(name).locator(".session").press("F2")
    chat.page.get_by_label("New title").fill(renamed)
    chat.page.keyboard.press("Enter")
    expect(other.row(renamed)).to_have_count(1)
    expect(other.page.locator("#title")).to_have_text(renamed)
    chat.row(renamed).locator(".session").press("Delete")
    expect(other.row(renamed)).to_have_count(0)


def test_a_conversation_is_exported_and_imported(chat, tmp_path, page_watch) -> None:
    """As Markdown to be read; as JSON, which becomes another conversation that is opened. What is no conversation is refused in words."""
    name = f"Copied {uuid.uuid4().hex[:8]}"
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
    expect(chat.page.get_by_text("The body is not valid JSON")).to_be_visible()


def test_conversations_of_api_calls_are_listed_when_asked_for(chat) -> None:
    name = f"agent-{uuid.uuid4().hex[:8]}"
    question = {"role": "user", "content": name}
    body = {"model": "overture-demo", "messages": [question], "max_tokens": 4, "session_id": name}
    assert chat.page.request.post(f"{chat.url}/v1/chat/completions", data=body).ok
    chat.page.reload()
    chat.open().ask("Hello!")
    expect(chat.row(name)).to_have_count(0)
    button = chat.page.get_by_role("button", name="Show API calls")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(chat.row(name).locator(".origin")).to_have_text("API")
    button.click()
    expect(chat.row(name)).to_have_count(0)


def test_search_finds_words_of_the_conversation_and_shows_the_version_that_holds_them(chat) -> None:
    word = f"quince{uuid.uuid4().hex[:8]}"
    chat.ask(f"My secret word is {word}.")
    chat.turns.first.get_by_role("button", name="Edit message").click()
    field = chat.page.get_by_role("textbox", name="Edit message")
    field.fill("Hello!")
    field.press("Enter")
    expect(chat.page.locator(".bubble")).to_have_text("Hello!")
    chat.wait_done()
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    chat.page.keyboard.press("Control+k")
    search = chat.page.get_by_role("searchbox", name="Search conversations")
    expect(search).to_be_focused()
    search.fill(word)
    expect(chat.page.locator(".day").first).to_have_text("Results")
    expect(chat.page.locator(".session-row")).to_have_count(1)
    expect(chat.page.locator(".session-row .excerpt")).to_contain_text(f"secret word is {word}.")
    expect(chat.page.locator(".session-row mark")).to_have_text(word)
    search.press("Enter")
    chat.page.keyboard.press("Enter")
    expect(chat.page.locator(".bubble")).to_have_text(f"My secret word is {word}.")
    search.fill(word + "x")
    expect(chat.page.get_by_text("Nothing found.")).to_be_visible()
    search.press("Escape")
    expect(chat.page.locator(".day").first).to_have_text("Today")


def test_model_output_becomes_lists_tables_and_code_that_can_be_copied_and_never_html(wired) -> None:
    chat, wire = wired()
    payloads = [
        "<script>window.hacked = 1</script>",
        '<img src="x" onerror="window.hacked = 2">',
        "[click](javascript:window.hacked=3)",
        "[click](JaVaScRiPt&colon;window.hacked=4)",
        "<javascript:window.hacked=5>",
        '<svg onload="window.hacked = 6"></svg>',
        "![p](https://elsewhere.example/pixel.png)",
        '[t](https://ok.example "x\\" onmouseover=\\"window.hacked = 7")',
        "```js\n</code></pre><img src=x onerror=window.hacked=8>\n```",
        "<a href='data:text/html,<script>window.hacked=9</script>'>data</a>",
    ]
    wire.say("\n\n".join(payloads))
    chat.open()
    chat.ask("Hello!")
    answer = chat.answers.first
    expect(answer).to_contain_text("<script>window.hacked = 1</script>")
    expect(answer).to_contain_text('<img src="x" onerror="window.hacked = 2">')
    assert answer.locator("img, script, svg, iframe, style").count() == 0
    links = answer.locator("a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    assert links and all(link.startswith("https://") for link in links)
    handlers = (
        "nodes => nodes.flatMap((node) => node.getAttributeNames()).filter((name) => name.startsWith('on'))"
    )
    assert answer.locator("*").evaluate_all(handlers) == []
    assert chat.page.evaluate("window.hacked") is None

    text = "# Title\n\n- one\n- **two**\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint('hi')\n```\n"
    wire.say(text)
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.ask("Hello!")
    answer = chat.answers.last
    expect(answer.locator("h3")).to_have_text("Title")
    expect(answer.locator("li")).to_have_text(["one", "two"])
    expect(answer.locator("td[align=right]")).to_have_text("2")
    expect(answer.locator(".hljs-string")).to_have_text("'hi'")
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert chat.page.evaluate("navigator.clipboard.readText()") == "print('hi')"


def test_a_file_of_text_goes_along_with_a_message(wired) -> None:
    chat, wire = wired()
    page = chat.open().page
    chooser = page.locator("#file")
    chooser.set_input_files([{"name": "notes.py", "mimeType": "text/x-python", "buffer": b"print('```')\n"}])
    chip = page.locator(".file")
    expect(chip).to_contain_text("notes.py")
    chooser.set_input_files([{"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\0\xff"}])
    expect(page.locator(".toast")).to_contain_text("photo.png is not a file of text.")
    expect(chip).to_have_count(1)
    chat.ask("What is it?")
    expect(chip).to_have_count(0)
    assert wire.messages[-1]["content"] == "notes.py:\n````py\nprint('```')\n````\n\nWhat is it?"
    folded = page.locator(".bubble details")
    expect(folded.locator("summary")).to_have_text("notes.py")
    folded.locator("summary").click()
    expect(folded.locator("pre")).to_have_text("print('```')")


def test_a_dropped_socket_loses_nothing_and_repeats_nothing(wired, page_watch) -> None:
    """Where the first piece is lost with it, between two pieces, and before a message is acknowledged."""
    page_watch.forgive()
    chat, wire = wired()
    chat.open()
    seqs: list[int] = []

    def drop_at(kind: str, number: int, *, is_lost: bool) -> None:
        """Cut the connection once, behind the frame of this kind and number, or instead of it."""
        seen: list[dict] = []

        def pass_on(frame: dict) -> dict | None:
            if frame["type"] != kind:
                return frame
            seen.append(frame)
            if len(seen) != number:
                return frame
            wire.drop_after = True
            seqs.append(frame.get("seq"))
            return None if is_lost else frame

        wire.on_frame = pass_on

    answers = []
    for number, case in enumerate([("delta", 1, True), ("delta", 2, False), ("accepted", 1, True)]):
        drop_at(*case[:2], is_lost=case[2])
        answers.append(chat.ask(STORY if case[0] == "delta" else "Hello!"))
        assert wire.num_opened == number + 2
    resumes = [frame["resume"] for frame in wire.sent if frame["type"] == "hello" and "resume" in frame]
    assert [[turn["seq"] for turn in resume] for resume in resumes] == [[0], [seqs[1]]]
    messages = [frame["id"] for frame in wire.messages]
    assert len(messages) == 4 and messages[2] == messages[3] and len(set(messages)) == 3
    expect(chat.turns).to_have_count(3)
    stored = chat.page.request.get(f"{chat.url}/api/sessions/{chat.session_id}").json()["turns"]
    assert [answer.split() for answer in answers] == [turn["answer"].split() for turn in stored]


def test_a_lost_server_is_said_and_what_is_sent_meanwhile_goes_once_it_is_back(wired, page_watch) -> None:
    """Unless its writer writes on: that takes it back."""
    page_watch.forgive()
    chat, wire = wired()
    chat.open()
    send = chat.page.get_by_role("button", name="Send", exact=True)

    def lose() -> None:
        wire.refuse = True
        wire.drop()
        expect(chat.banner).to_contain_text("The connection to the server is lost.")
        expect(chat.banner).to_contain_text(re.compile(r"Next try in \d+ s\."))
        wire.accept_from_click()

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
    assert not wire.messages

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
    assert [frame["content"] for frame in wire.messages] == ["Hello!", "Are you there?"]


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


def test_a_failed_turn_says_why_and_can_be_tried_again(wired) -> None:
    chat, wire = wired()
    refused = []

    def refuse_once(frame):
        if frame["type"] == "message" and not refused:
            refused.append(frame)
            return wire.fail("overloaded", "Too busy.", turn=frame["id"])
        return frame

    wire.on_send = refuse_once
    chat.open()
    chat.send("Hello!")
    expect(chat.page.get_by_role("alert")).to_contain_text("Too busy.")
    chat.page.get_by_role("button", name="Try again").click()
    chat.wait_done()
    expect(chat.page.get_by_role("alert")).to_have_count(0)
    expect(chat.turns).to_have_count(1)


def test_a_first_message_that_is_refused_and_dismissed_leaves_no_empty_conversation(wired) -> None:
    """Its text goes back to where it was written; dismissed or not, no list shows a conversation without a word."""
    chat, wire = wired()
    wire.on_send = lambda frame: (
        wire.fail("bad_request", "Not like this.", turn=frame["id"], retryable=False)
        if frame["type"] == "message"
        else frame
    )
    chat.open()
    chat.send("Hello!")
    dismiss = chat.page.get_by_role("button", name="Dismiss")
    expect(dismiss).to_be_visible()
    session_id = chat.session_id
    with chat.page.expect_response(lambda response: response.request.method == "DELETE"):
        dismiss.click()
    expect(chat.page.locator("#welcome")).to_be_visible()
    expect(chat.question).to_have_value("Hello!")
    expect(chat.page.locator(f".session[href$='{session_id}']")).to_have_count(0)
    assert chat.page.request.get(f"{chat.url}/api/sessions/{session_id}").status == 404
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


@pytest.fixture
def scripted(wired):
    """A page with one question under way, whose answer the test writes: (chat, wire, delta, done)."""

    def make(**options):
        chat, wire = wired(**options)
        accepted = []
        ended = []

        def note(frame):
            if frame["type"] == "accepted":
                accepted.append(frame)
            if frame["type"] == "done":
                ended.append(frame)
            return None if frame["type"] in {"delta", "done"} else frame

        def delta(seq: int, text: str) -> None:
            wire.inject({"type": "delta", "id": accepted[0]["id"], "seq": seq, "text": text})

        def done(seq: int) -> None:
            # The page may read the session again at its end, so the server must have ended it too.
            while not ended:
                chat.page.wait_for_timeout(50)
            end = {"finish_reason": "stop", "usage": None, "timings": None, "seq": seq}
            wire.inject(accepted[0] | end | {"type": "done"})

        wire.on_frame = note
        chat.open()
        chat.send("Hello!")
        expect(chat.turns.first).to_have_attribute("data-status", "running")
        return chat, wire, delta, done

    return make


def test_answers_go_on_in_sessions_that_are_not_shown(scripted) -> None:
    chat, _, delta, done = scripted()
    session_id = chat.session_id
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    expect(chat.page.locator("#welcome")).to_be_visible()
    link = chat.page.locator(f'.session[href="#/s/{session_id}"]')
    expect(link.locator(".running")).to_have_text("(answering)")
    expect(link.locator(".running")).to_be_visible()
    delta(1, "Written in the background.")
    done(1)
    expect(link.locator(".running")).to_be_hidden()
    expect(chat.turns).to_have_count(0)
    link.click()
    expect(chat.turns.first).to_have_attribute("data-status", "done")


@pytest.mark.parametrize("step_px", [200, 5])
def test_the_reader_is_not_pulled_along(scripted, step_px: int) -> None:
    """Neither by one turn of a wheel nor in a trackpad's small steps, each of which ends close to the end."""
    chat, _, delta, _ = scripted(viewport={"width": 800, "height": 420})
    delta(1, "Paragraph 1. " + "word " * 400)
    expect(chat.answers.first).to_contain_text("Paragraph 1.")
    scroller = chat.page.locator("#scroller")
    at_end = "node => node.scrollHeight - node.scrollTop - node.clientHeight < 2"
    assert scroller.evaluate(at_end), "the text is followed while the reader is at its end"
    scroller.hover()
    for seq in range(2, 2 + 200 // step_px):
        chat.page.mouse.wheel(0, -step_px)
        chat.page.wait_for_timeout(30)
        delta(seq, "word ")
    chat.page.wait_for_function(
        f"() => !({at_end.replace('< 2', '< 150')})(document.getElementById('scroller'))"
    )
    top = scroller.evaluate("node => node.scrollTop")
    delta(100, "\n\nParagraph 2. " + "word " * 400)
    pill = chat.page.get_by_role("button", name="New text")
    expect(pill).to_be_visible()
    assert scroller.evaluate("node => node.scrollTop") == top
    pill.click()
    expect(pill).to_be_hidden()
    assert scroller.evaluate(at_end)


def test_who_opens_the_reasoning_stays_at_its_beginning(scripted) -> None:
    chat, wire, delta, done = scripted(viewport={"width": 800, "height": 420})
    turn = next(frame["id"] for frame in wire.sent if frame["type"] == "message")
    wire.inject({"type": "delta", "id": turn, "seq": 1, "text": "", "reasoning": "Let me see. " * 600})
    delta(2, "It is so.")
    done(2)
    chat.wait_done()
    summary = chat.page.locator(".reasoning summary")
    before = summary.bounding_box()["y"]
    summary.click()
    expect(chat.page.locator(".reasoning")).to_contain_text("Let me see.")
    chat.page.wait_for_timeout(200)
    assert abs(summary.bounding_box()["y"] - before) < 50


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


def test_typing_is_announced_without_the_text_and_anew_after_each_message(wired) -> None:
    chat, wire = wired()
    wire.on_frame = lambda frame: None if frame["type"] == "advisory" else frame
    chat.open()
    chat.ask("Hello!")
    for number in (1, 2, 3):
        chat.question.press_sequentially("abcdefgh")
        expect(chat.question).to_have_value("abcdefgh")
        typed = [frame for frame in wire.sent if frame["type"] == "typing"]
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


def test_a_conversation_is_marked_as_warm_while_one_types(chat) -> None:
    chat.ask("Please remember all of this: " + " ".join(f"the {n}th is called Anna." for n in range(30)))
    expect(chat.page.locator(".warmth")).to_be_hidden()
    chat.question.press_sequentially("And")
    expect(chat.page.locator(".warmth")).to_be_visible()
    expect(chat.page.locator(".session.warm")).to_have_count(1)
    chat.page.keyboard.press("Control+,")
    expect(chat.page.get_by_role("dialog", name="Settings")).to_be_visible()
    expect(chat.page.get_by_label("Prepare as I type")).to_be_hidden()  # the operator has not allowed it


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
    wired, page_watch
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
    chat.ask("Tell me a long story.")
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


def test_the_theme_is_the_browsers_choice_and_stays(open_page, make_chat, gateway_url) -> None:
    page = open_page(color_scheme="light")
    make_chat(page, gateway_url).open()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("radio", name="Dark").check()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("radio", name="Light").check()
    assert page.evaluate(ground) == light


def test_an_address_opens_its_session_and_a_wrong_one_says_so(chat, open_page, make_chat) -> None:
    chat.ask("Hello!")
    other = make_chat(open_page(), chat.url).open(f"#/s/{chat.session_id}")
    expect(other.page.locator(".bubble")).to_have_text("Hello!")
    lost = make_chat(open_page(), chat.url).open("#/s/there-is-no-such-session")
    expect(lost.page.get_by_text("does not exist any more")).to_be_visible()
    expect(lost.page.locator("#welcome")).to_be_visible()
    assert lost.ask("Hello!")


def test_a_key_is_asked_for_and_kept(wired) -> None:
    chat, wire = wired()
    keys = []

    def ask_key(frame):
        if frame["type"] == "hello":
            keys.append(frame.get("api_key"))
            if frame.get("api_key") != "let-me-in":
                return wire.fail("unauthorized", "Wrong or missing key.", retryable=False)
            return {name: value for name, value in frame.items() if name != "api_key"}
        return frame

    wire.on_send = ask_key
    chat.page.goto(chat.url)
    chat.page.get_by_label("API key").fill("wrong")
    chat.page.get_by_role("button", name="Continue").click()
    expect(chat.page.get_by_role("dialog")).to_contain_text("did not accept")
    chat.page.get_by_label("API key").fill("let-me-in")
    with chat.page.expect_request("**/api/sessions?*") as listing:
        chat.page.get_by_role("button", name="Continue").click()
    assert listing.value.headers["authorization"] == "Bearer let-me-in"
    expect(chat.picker).to_be_enabled()
    chat.page.reload()
    expect(chat.picker).to_be_enabled()
    assert keys == [None, "wrong", "let-me-in", "let-me-in"]


def test_on_a_phone_the_list_is_a_drawer_and_what_one_touches_is_large_enough(
    open_page, make_chat, gateway_url
) -> None:
    page = open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    chat = make_chat(page, gateway_url).open()
    chat.ask("Hello!")
    menu = page.get_by_role("button", name="Conversations")
    assert page.get_by_role("searchbox").count() == 0, "a closed drawer is out of reach"
    menu.tap()
    expect(page.get_by_role("searchbox")).to_be_visible()
    expect(menu).to_have_attribute("aria-expanded", "true")
    page.evaluate("Promise.all(document.getAnimations().map((each) => each.finished))")  # some begin smaller
    small = page.locator("button:visible, a:visible, .search").evaluate_all(
        "nodes => nodes.filter((node) => !node.closest('.skip')).map((node) => [node.getBoundingClientRect(), node])"
        ".filter(([box]) => box.height < 44 || box.width < 44).map(([, node]) => node.outerHTML.slice(0, 120))"
    )
    assert small == []
    page.keyboard.press("Escape")
    expect(page.get_by_role("searchbox")).to_have_count(0)
    expect(menu).to_be_focused()
    menu.tap()
    page.locator(".session").first.tap()
    expect(page.get_by_role("searchbox")).to_have_count(0)


def test_nothing_is_wider_than_a_small_window(wired) -> None:
    chat, wire = wired(viewport={"width": 320, "height": 600})
    table = "| " + " | ".join("column" * 3 for _ in range(9)) + " |\n" + "|---" * 9 + "|"
    wire.say(f"{'x' * 300}\n\n{table}\n\n```\n{'y' * 300}\n```")
    chat.open()
    chat.ask("Hello " + "z" * 200)
    boxes = chat.page.locator("html, #scroller, #composer, .top")
    for width in (320, 640):
        chat.page.set_viewport_size({"width": width, "height": 600})
        excess = boxes.evaluate_all("nodes => nodes.map((node) => node.scrollWidth - node.clientWidth)")
        assert max(excess) <= 0
        expect(chat.page.get_by_role("button", name="Send", exact=True)).to_be_in_viewport()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_serious(open_page, make_chat, gateway_url, audit, scheme: str, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce")
    chat = make_chat(page, gateway_url).open()
    findings = audit(page)
    chat.ask("Show me some Markdown.")
    chat.page.locator(".timings summary").click()
    findings += audit(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_be_visible()
    findings += audit(page)
    page.keyboard.press("Escape")
    if width < 720:
        page.get_by_role("button", name="Conversations").click()
        expect(page.get_by_role("searchbox")).to_be_visible()
    page.locator(".session").first.press("Delete")
    findings += audit(page)
    assert findings == []


def test_a_screen_reader_hears_sentences_and_a_long_answer_keeps_its_finished_blocks(scripted) -> None:
    chat, _, delta, _ = scripted()
    region, answer = chat.page.locator("#announcer"), chat.answers.first
    delta(1, "This is **half a")
    expect(answer).to_contain_text("half a")
    expect(region).to_be_empty()
    delta(2, " sentence**. And")
    expect(region).to_have_text("This is half a sentence.")
    for seq in range(3, 43):
        delta(seq, f"\n\nParagraph {seq} " + "word " * 75)
    expect(answer).to_contain_text("Paragraph 42")
    answer.locator(".block").first.evaluate("node => { node.dataset.kept = 'yes'; }")
    delta(43, "\n\nParagraph 43")
    expect(answer).to_contain_text("Paragraph 43")
    expect(answer.locator(".block").first).to_have_attribute("data-kept", "yes")
    assert answer.locator("p").count() == 42


def test_formulas_are_set_and_their_code_is_loaded_with_the_first_one(scripted) -> None:
    """Markdown leaves them alone, code and prices are none, and what is unfinished or not understood stays as it was written."""
    chat, _, delta, _ = scripted()
    scripts: list[str] = []
    chat.page.on("request", lambda request: scripts.append(request.url))
    answer = chat.answers.first
    delta(1, r"It costs $5 and $6, or \$7. `$x$` is code. So *much*.")
    expect(answer.locator("em")).to_have_text("much")
    assert not [url for url in scripts if "katex" in url]
    delta(
        2,
        "\n\nHere $a_1*b + c_1*d$ stands, *and* \\(x_{1}\\,y\\).\n\\[\n a\n- b\n\\]\n\n$\\nonsense{x}$\n\n$$\nx_1 + ",
    )
    expect(answer.locator("math")).to_have_count(3)
    sources = answer.locator("annotation").all_text_contents()
    assert sources == ["a_1*b + c_1*d", "x_{1}\\,y", "\n a\n- b\n"]
    expect(answer.locator("math[display=block]")).to_have_count(1)
    expect(answer.locator("em")).to_have_count(2)
    expect(answer).to_contain_text("$5 and $6, or $7. $x$ is code")
    expect(answer).to_contain_text(r"$\nonsense{x}$")
    expect(answer.locator("p").last).to_have_text("$$ x_1 +")
    delta(3, "y_1\n$$")
    expect(answer.locator("math[display=block]")).to_have_count(2)


def test_own_script_and_style_stay_small() -> None:
    own = [
        path
        for path in STATIC.rglob("*")
        if path.suffix in {".js", ".css", ".html"} and "vendor" not in path.parts
    ]
    for name, most in LATER_BYTES_MAX.items():
        of_page = [path for path in own if name in path.relative_to(STATIC).parts or path.stem == name]
        assert of_page and len(of_page) < len(own)
        assert sum(path.stat().st_size for path in of_page) <= most
        own = [path for path in own if path not in of_page]
    assert sum(path.stat().st_size for path in own) <= OWN_BYTES_MAX


@pytest.mark.parametrize("name", ["index.html", "docs.html", "engine.html"])
def test_the_page_holds_no_inline_script_or_style(name: str) -> None:
    html = (STATIC / name).read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
