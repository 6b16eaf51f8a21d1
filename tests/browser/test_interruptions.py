"""What a person does in the middle of something else: nothing that was written is lost, or goes where it was not meant."""

from __future__ import annotations

import re

import pytest

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


@pytest.fixture
def held():
    """A function that lets requests wait: the list fills with their routes, to be continued."""

    def hold(page, pattern: str, method: str) -> list:
        routes: list = []
        page.route(
            pattern,
            lambda route: routes.append(route) if route.request.method == method else route.continue_(),
        )
        return routes

    return hold


def wait_for(page, happened) -> None:
    """Until `happened()`, while the page goes on."""
    for _ in range(600):
        if happened():
            return
        page.wait_for_timeout(50)
    pytest.fail("it did not happen")


def pick(chat, session_id: str) -> None:
    chat.page.locator(f'.session[href="#/s/{session_id}"]').click()
    expect(chat.page).to_have_url(re.compile(session_id))


@pytest.mark.parametrize("widths", [(320, 390), (1280,)])
def test_every_deletion_can_be_undone_on_any_screen(wired, widths: tuple[int, ...]) -> None:
    """However long the title is; a second one, or another message, does not take the first one's button away."""
    is_phone = max(widths) < 700
    chat, _ = wired(viewport={"width": widths[0], "height": 700}, has_touch=is_phone, is_mobile=is_phone)
    chat.open()
    names = (f"One of {widths[0]}", f"Two of {widths[0]}")
    for name in names:
        chat.page.keyboard.press("Control+Shift+O")
        chat.ask(f"{name}, please tell me about the history of the railway in Norway and Sweden.")
    if is_phone:
        chat.page.locator("#menu-button").click()
    undo = chat.page.get_by_role("button", name="Undo")
    for width in widths:
        chat.page.set_viewport_size({"width": width, "height": 700})
        for name in names:
            chat.row(name).locator(".session").press("Delete")
            expect(chat.row(name)).to_have_count(0)
        expect(undo).to_have_count(2)
        for box in (each.bounding_box() for each in undo.all()):
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
        for _ in range(2):
            undo.first.click()
        for name in names:
            expect(chat.row(name)).to_have_count(1)
        expect(undo).to_have_count(0)
        # Its attribute, since what slides out of sight still counts as visible on its way.
        menu = chat.page.locator("#menu-button")
        if is_phone and menu.get_attribute("aria-expanded") == "false":
            menu.click()


def test_messages_stand_over_the_sheet_and_stay_when_it_opens_or_closes(wired, page_watch) -> None:
    page_watch.forgive()  # the browser notes the refusal
    chat, _ = wired(viewport={"width": 390, "height": 844})
    page = chat.open().page
    chat.ask("One to delete.")
    page.locator("#menu-button").click()
    chat.row("One to delete.").locator(".session").press("Delete")
    page.keyboard.press("Escape")
    settings = page.get_by_role("button", name="Settings")
    settings.click()
    sheet, toast = page.locator(".sheet"), page.locator(".toast")
    expect(sheet).to_be_visible()
    is_on_top = """node => {
        const { x, y } = node.getBoundingClientRect();
        return node.contains(document.elementFromPoint(x + 9, y + 9));
    }"""
    wait_for(page, lambda: toast.evaluate(is_on_top))
    page.keyboard.press("Escape")
    expect(sheet).to_be_hidden()
    wait_for(page, lambda: toast.evaluate(is_on_top))
    settings.click()
    page.get_by_role("button", name="Undo").click()
    expect(toast).to_have_count(0)

    bad = {"name": "x.json", "mimeType": "application/json", "buffer": b"not json"}
    page.locator(".sheet input[type=file]").set_input_files([bad])
    expect(toast).to_contain_text("cannot be imported")
    wait_for(page, lambda: toast.evaluate(is_on_top))
    page.keyboard.press("Escape")
    page.locator("#file").set_input_files([bad | {"name": "x.png", "buffer": b"\x89PNG\0\xff"}])
    expect(toast).to_contain_text("x.png")
    wait_for(page, lambda: toast.evaluate(is_on_top))


def test_typing_goes_where_one_clicked_after_a_rename_and_a_sent_message_with_a_file_is_no_draft(
    chat,
) -> None:
    """A confirmed word of an input method ends no rename, and text that also comes as a picture, as office programs copy it, is pasted."""
    page = chat.page
    name = "Old"
    chat.ask(f"{name}.")
    chat.row(name).locator(".session").press("F2")
    field = page.get_by_role("textbox", name="Title")
    field.fill(f"{name} made new")
    field.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(field).to_be_focused()
    chat.question.click()
    page.keyboard.type("please")
    expect(chat.question).to_have_value("please")
    expect(chat.row(f"{name} made new")).to_have_count(1)
    row = chat.row(f"{name} made new").locator(".session")
    row.press("F2")
    page.get_by_role("textbox", name="Title").press("Enter")
    expect(row).to_be_focused()

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate(
        """async () => {
          const canvas = document.createElement('canvas');
          const image = await new Promise((resolve) => canvas.toBlob(resolve, 'image/png'));
          const text = (type, value) => new Blob([value], { type });
          await navigator.clipboard.write([new ClipboardItem({ 'image/png': image,
            'text/plain': text('text/plain', 'Sum 42'), 'text/html': text('text/html', '<b>Sum 42</b>') })]);
        }"""
    )
    chat.question.fill("")
    chat.question.focus()
    page.keyboard.press("Control+V")
    expect(chat.question).to_have_value("Sum 42")
    expect(page.locator(".toast")).to_have_count(0)

    note = {"name": "note.txt", "mimeType": "text/plain", "buffer": b"some text"}
    page.locator("#file").set_input_files([note])
    expect(page.locator(".file")).to_have_count(1)
    chat.ask("What does it say?")
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(chat.turns).to_have_count(0)
    expect(chat.question).to_have_value("")


def test_a_message_that_waits_for_its_settings_goes_into_no_other_conversation(chat, held) -> None:
    """It stays the draft of the one in which it was written, and the other one's draft stays, too."""
    chat.ask("The other one.")
    other = chat.session_id
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    chat.ask("This one.")
    this = chat.session_id
    chat.page.keyboard.press("Control+,")
    chat.page.get_by_label("System prompt").fill("Be terse.")
    patches = held(chat.page, "**/api/sessions/*", "PATCH")
    chat.send("For this one alone")
    wait_for(chat.page, lambda: patches)
    pick(chat, other)
    expect(chat.page.locator(".bubble")).to_have_text(["The other one."])
    chat.question.fill("A draft of the other one")
    with chat.page.expect_response(lambda response: response.request.method == "PATCH"):
        patches[0].continue_()
    chat.page.wait_for_timeout(200)
    expect(chat.question).to_have_value("A draft of the other one")
    pick(chat, this)
    expect(chat.question).to_have_value("For this one alone")
    assert [each["content"] for each in chat.line.messages] == ["The other one.", "This one."]


def test_a_message_that_waits_for_its_document_sends_no_other_conversation_s_draft(chat, held) -> None:
    chat.ask("The other one.")
    other = chat.session_id
    chat.question.fill("A draft of the other one")
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    chat.ask("This one.")
    this = chat.session_id
    documents = held(chat.page, "**/api/documents", "POST")
    page_of_it = {"name": "page.html", "mimeType": "text/html", "buffer": b"<p>some text</p>"}
    chat.page.locator("#file").set_input_files([page_of_it])
    wait_for(chat.page, lambda: documents)
    chip = chat.page.locator(".file")
    expect(chip).to_have_text("Reading page.html")
    chat.send("What does it say?")
    pick(chat, other)
    expect(chip).to_have_count(0)
    with chat.page.expect_response("**/api/documents"):
        documents[0].continue_()
    pick(chat, this)
    expect(chat.page.locator(".file")).to_contain_text("page.html")
    expect(chat.question).to_have_value("What does it say?")
    pick(chat, other)
    expect(chat.question).to_have_value("A draft of the other one")
    assert [each["content"] for each in chat.line.messages] == ["The other one.", "This one."]


def test_who_opens_another_conversation_while_one_is_made_stays_there(chat, held) -> None:
    chat.ask("The old one.")
    old = chat.session_id
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    posts = held(chat.page, "**/api/sessions", "POST")
    chat.send("A new question")
    wait_for(chat.page, lambda: posts)
    pick(chat, old)
    with chat.page.expect_response(lambda response: response.request.method == "POST"):
        posts[0].continue_()
    chat.page.wait_for_timeout(200)
    expect(chat.page).to_have_url(re.compile(old))
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    expect(chat.question).to_have_value("A new question")
    assert len(chat.line.messages) == 1


def test_an_edited_message_is_kept_while_another_is_answered(chat) -> None:
    chat.ask("Hello!")
    chat.page.get_by_role("button", name="Edit message").click()
    editor = chat.page.get_by_role("textbox", name="Edit message")
    editor.fill("Rewritten with care")
    chat.line.on_frame = lambda frame: None if frame["type"] == "done" else frame
    chat.send("Another")
    expect(chat.turns.nth(1)).to_have_attribute("data-status", "running")
    editor.press("Enter")
    expect(chat.page.locator(".toast")).to_contain_text("Wait for the answer")
    expect(editor).to_have_value("Rewritten with care")
    assert "Rewritten with care" not in [each.get("content") for each in chat.line.sent]


def test_what_could_not_be_loaded_is_said_and_can_be_tried_again(chat, page_watch) -> None:
    """A rename while the server is away, and a file: neither leaves anything dead."""
    page_watch.forgive()
    name = "Kept"
    chat.ask(f"{name}.")
    chat.page.route("**/rename.js", lambda route: route.abort())
    row = chat.row(name).locator(".session")
    row.press("F2")
    expect(chat.page.locator(".toast")).to_contain_text("could not be reached")
    chat.page.route("**/files.js", lambda route: route.abort())
    note = {"name": "note.txt", "mimeType": "text/plain", "buffer": b"some text"}
    chat.page.locator("#file").set_input_files([note])
    expect(chat.page.locator(".toast")).to_contain_text("could not be reached")
    chat.ask("Are you still there?")
    expect(chat.turns).to_have_count(2)


def test_a_style_that_could_not_be_loaded_comes_later(wired, page_watch) -> None:
    page_watch.forgive()
    page = wired()[0].open().page
    page.route("**/css/sheet.css", lambda route: route.abort(), times=1)
    page.keyboard.press("Control+,")
    sheet = page.get_by_role("dialog", name="Settings")
    expect(sheet).to_be_visible()
    expect(sheet).to_have_css("position", "fixed")


def test_the_browser_asks_before_attached_files_are_lost(wired) -> None:
    chat = wired()[0].open()
    asked: list[str] = []

    def stay(dialog) -> None:
        asked.append(dialog.type)
        dialog.dismiss()

    chat.page.on("dialog", stay)
    chat.question.click()
    chat.page.locator("#file").set_input_files([{"name": "n.txt", "mimeType": "text/plain", "buffer": b"hi"}])
    expect(chat.page.locator(".file")).to_have_count(1)
    chat.page.evaluate("setTimeout(() => location.reload())")
    wait_for(chat.page, lambda: asked)
    expect(chat.page.locator(".file")).to_have_count(1)
    chat.ask("What does it say?")
    chat.page.reload()
    chat.wait_done()
    assert asked == ["beforeunload"]


def test_a_search_that_is_given_up_shows_the_list(chat, held) -> None:
    """Also where its answer comes afterwards."""
    name = "Findable"
    chat.ask(f"{name}.")
    search = chat.page.get_by_role("searchbox")
    found = held(chat.page, "**/api/sessions?*q=*", "GET")
    search.fill(name)
    wait_for(chat.page, lambda: found)
    search.press("Escape")
    with chat.page.expect_response(lambda response: "q=" in response.url):
        found[0].continue_()
    chat.page.wait_for_timeout(200)
    expect(search).to_have_value("")
    expect(chat.page.locator(".day").first).to_have_text("Today")


def test_open_timings_stay_open_and_arrow_up_goes_to_an_open_editor(chat) -> None:
    """While the next question is asked and answered, and when the conversation is read again."""
    chat.ask("Hello!")
    timings = chat.page.locator(".timings").first
    timings.locator("summary").click()
    expect(timings.locator("dl")).to_contain_text("Computed anew")
    timings.locator("summary").focus()
    chat.line.inject({"type": "shown", "session_id": chat.session_id, "turn_id": "another"})
    chat.ask("And again?")
    expect(timings).to_have_attribute("open", "")
    expect(timings.locator("dl")).to_contain_text("Computed anew")

    chat.question.press("ArrowUp")
    field = chat.page.get_by_role("textbox", name="Edit message")
    field.fill("Rewritten with care")
    chat.question.press("ArrowUp")
    expect(field).to_be_focused()
    expect(field).to_have_value("Rewritten with care")


def test_the_focus_stays_in_the_list_when_a_conversation_is_deleted(chat) -> None:
    """By the keyboard and by the menu, in the middle and at the end."""
    for name in ("Two", "Three"):
        chat.page.keyboard.press("Control+Shift+O")
        chat.ask(name)
    chat.page.keyboard.press("Control+Shift+O")
    chat.ask("The open one")
    rows = chat.page.locator(".session-row")
    num = rows.count()
    chat.row("Three").first.locator(".session").press("Delete")
    expect(rows).to_have_count(num - 1)
    assert chat.page.evaluate("document.activeElement.closest('.session-row') !== null")
    chat.row("Two").first.get_by_role("button", name="Options").click()
    chat.page.get_by_role("menuitem", name="Delete").click()
    expect(rows).to_have_count(num - 2)
    assert chat.page.evaluate("document.activeElement.closest('.session-row') !== null")


def test_a_click_counts_though_the_list_changes_while_the_button_is_down(chat, visit) -> None:
    chat.ask("The pressed one.")
    chat.begin()
    listed: list = []
    chat.line.on_frame = lambda frame: listed.append(frame["type"]) or frame
    chat.row("The pressed one.").hover()
    chat.page.mouse.down()
    visit().ask("From the side.")
    wait_for(chat.page, lambda: "listed" in listed)
    chat.page.mouse.up()
    expect(chat.page.locator(".bubble")).to_have_text(["The pressed one."])
    expect(chat.row("From the side.")).to_have_count(1)


def test_what_is_typed_before_the_page_s_script_is_there_stays(chat, held) -> None:
    chat.question.fill("It was a draft, ")
    found = held(chat.page, "**/main.js", "GET")
    chat.page.reload(wait_until="commit")
    chat.question.press_sequentially("and it goes on.")
    expect(chat.question).to_have_value("and it goes on.")
    wait_for(chat.page, lambda: found)
    found[0].continue_()
    expect(chat.question).to_have_value("It was a draft, and it goes on.")
