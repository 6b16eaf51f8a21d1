"""How a conversation goes on: in a new chat with a summary, and past messages that failed."""

from __future__ import annotations

import pytest

expect = pytest.importorskip("playwright.sync_api").expect


def summed_up(content: str) -> dict:
    """A reply of the model to a request for a summary."""
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def test_a_full_conversation_goes_on_in_a_new_chat_with_a_summary(wired, stage, page_watch) -> None:
    page_watch.forgive()  # a first try is refused
    chat = wired()[0].open()
    page, node = chat.page, stage.gateway.node
    chat.ask("My secret word is marzipan.")
    expect(page.get_by_role("button", name="Summarise")).to_be_hidden()
    old = chat.session_id
    node.max_model_len, usual = 5, node.max_model_len
    try:
        page.reload()
        button = page.get_by_role("button", name="Summarise")
        replies = [
            {"status": 503, "json": {"error": {"message": "No room."}}},
            {"json": summed_up("The word is **marzipan**.")},
        ]
        asked = []

        def reply(route) -> None:
            asked.append(route.request.post_data_json)
            route.fulfill(**replies.pop(0))

        page.route("**/v1/chat/completions", reply)
        button.click()
        dialog = page.get_by_role("dialog", name="New chat with a summary")
        expect(dialog.get_by_role("alert")).to_have_text("No summary could be written. No room.")
        dialog.get_by_role("button", name="Close").click()
        expect(dialog).to_have_count(0)
        button.click()
        expect(chat.answers.last).to_contain_text("The word is marzipan.")
    finally:
        node.max_model_len = usual
    assert chat.session_id != old
    assert asked[-1]["messages"][-1]["content"].startswith("Summarise our conversation")
    link = chat.answers.last.get_by_role("link", name="My secret word is marzipan.")
    link.click()
    expect(page.locator(".bubble").last).to_have_text("My secret word is marzipan.")
    assert chat.session_id == old


def test_a_message_whose_answer_failed_can_be_dismissed_also_after_a_reload(wired, stage, page_watch) -> None:
    chat = wired()[0].open()
    page = chat.page
    chat.ask("Hello!")
    with stage.by_hand() as next_answer:
        chat.start("Are you there?")
        next_answer().fail()
    expect(chat.turns.last).to_have_attribute("data-status", "failed")
    page.reload()
    expect(chat.turns).to_have_count(2)
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Dismiss").click()
    expect(chat.turns).to_have_count(1)
    expect(other.locator(".turn")).to_have_count(1)
    assert [turn.content for turn in stage.turns(chat.session_id)] == ["Hello!"]
    with stage.by_hand() as next_answer:
        page.get_by_role("button", name="New chat", exact=True).click()
        chat.start("Only this.")
        next_answer().fail()
    page.get_by_role("button", name="Dismiss").click()
    expect(chat.turns).to_have_count(0)
    expect(chat.row("Only this.")).to_have_count(0)
    expect(chat.question).to_have_value("Only this.")


TOP = "node => node.getBoundingClientRect().top - document.getElementById('scroller').getBoundingClientRect().top"


def test_a_question_goes_to_the_top_once_and_the_page_stays_there(wired, stage) -> None:
    """While its answer grows past the window, too; who wants to follow says so in the settings."""
    chat = wired(viewport={"width": 800, "height": 420})[0].open()
    page = chat.page
    chat.ask("One?")
    with stage.by_hand() as next_answer:
        chat.start("Two?")
        answer = next_answer()
        turn = chat.turns.last
        page.wait_for_function(f"() => Math.abs(({TOP})(document.querySelector('.turn:last-child'))) < 2")
        answer.say("word " * 40)
        expect(chat.answers.last).to_contain_text("word")
        expect(page.get_by_role("button", name="New text")).to_be_hidden()
        answer.say("word " * 2000)
        expect(page.get_by_role("button", name="New text")).to_be_visible()
        assert abs(turn.evaluate(TOP)) < 2
        answer.finish()
        chat.wait_done()
        assert abs(turn.evaluate(TOP)) < 2
        page.keyboard.press("Control+,")
        page.get_by_label("Follow answers").check()
        page.keyboard.press("Escape")
        chat.start("Three?")
        answer = next_answer()
        answer.finish("word " * 2000)
        chat.wait_done()
    assert page.locator("#scroller").evaluate("n => n.scrollHeight - n.scrollTop - n.clientHeight") < 2


def test_enter_during_an_answer_queues_the_message(wired, stage) -> None:
    """Changed, it waits for Enter again."""
    chat, line = wired()
    chat.open()
    expect(chat.question).to_be_focused()
    note = chat.page.get_by_text("Queued until this answer")
    with stage.by_hand() as next_answer:
        chat.start("One?")
        chat.send("Two?")
        expect(note).to_be_visible()
        chat.question.press_sequentially("?")
        expect(note).to_be_hidden()
        chat.question.press("Enter")
        expect(note).to_be_visible()
        next_answer().finish("First.")
        expect(chat.turns).to_have_count(2)
        expect(chat.question).to_have_value("")
        next_answer().finish("Second.")
    chat.wait_done()
    assert [frame["content"] for frame in line.messages] == ["One?", "Two??"]


def test_a_queued_message_goes_also_while_another_conversation_is_open(visit, stage) -> None:
    """It waits where one comes back before; what is written elsewhere meanwhile stays there."""
    chat = visit()
    page = chat.page
    note = page.get_by_text("Queued until this answer")
    new = page.get_by_role("button", name="New chat", exact=True)
    with stage.by_hand() as next_answer:
        chat.start("One?")
        first = next_answer()
        session = page.locator(f".session[href='#/s/{chat.session_id}']")
        chat.send("Two?")
        expect(note).to_be_visible()
        new.click()
        expect(note).to_be_hidden()
        session.click()
        expect(chat.question).to_have_value("Two?")
        expect(note).to_be_visible()
        new.click()
        chat.question.fill("A draft of a new chat")
        first.finish("First.")
        next_answer().finish("Second.")
        expect(chat.question).to_have_value("A draft of a new chat")
        session.click()
        expect(chat.answers).to_have_text(["First.", "Second."])
        expect(chat.question).to_have_value("")
    expect(page.locator(".bubble")).to_have_text(["One?", "Two?"])


def test_an_unfinished_edit_is_there_when_one_comes_back(chat) -> None:
    chat.ask("One?")
    first = chat.session_id
    chat.turns.first.hover()
    chat.turns.first.get_by_role("button", name="Edit message").click()
    field = chat.page.get_by_role("textbox", name="Edit message")
    field.fill("One and a half")
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    expect(field).to_have_count(0)
    chat.page.goto(f"{chat.url}/#/s/{first}")
    expect(field).to_have_value("One and a half")
    field.press("Escape")
    chat.page.get_by_role("button", name="New chat", exact=True).click()
    chat.page.go_back()
    expect(chat.page.locator(".bubble")).to_have_text("One?")


def test_the_list_stays_where_it_is_when_a_conversation_comes_to_its_top(wired, visit) -> None:
    chat = wired(viewport={"width": 1280, "height": 500})[0]
    for number in range(20):
        chat.call("POST", "/api/sessions", data={"title": f"Number {number}"})
    chat.open()
    row = chat.row("Number 5")
    row.scroll_into_view_if_needed()
    before = row.bounding_box()
    assert chat.page.locator(".rail-list").evaluate("list => list.scrollTop") > 100
    visit().ask("From elsewhere.")
    expect(chat.row("From elsewhere.")).to_have_count(1)
    after = row.bounding_box()
    assert abs(after["y"] - before["y"]) < 2, (before, after)


def test_a_menu_stays_beside_its_conversation_when_another_comes_to_the_top(wired, visit) -> None:
    chat = wired()[0].open()
    chat.ask("The old one.")
    chat.begin()
    chat.ask("The new one.")
    row = chat.row("The old one.")
    row.hover()
    before = row.bounding_box()
    row.get_by_role("button").click()
    menu = chat.page.get_by_role("menu", name="Options for The old one.")
    expect(menu).to_be_visible()
    other = visit()
    other.ask("From the side.")
    assert row.bounding_box() == before
    menu.get_by_role("menuitem", name="Rename").press("Escape")
    expect(chat.row("From the side.")).to_have_count(1)
    expect(row.get_by_role("button")).to_be_focused()


def test_escape_in_a_field_of_the_list_stops_no_answer(wired, stage) -> None:
    chat = wired()[0].open()
    with stage.by_hand() as next_answer:
        chat.start("A long one.")
        writer = next_answer()
        writer.say("Well, ")
        chat.page.keyboard.press("Control+k")
        chat.page.keyboard.press("Escape")
        chat.row("A long one.").locator(".session").press("F2")
        chat.page.get_by_role("textbox", name="Title").press("Escape")
        writer.finish("hello.")
    chat.wait_done()
    expect(chat.answers.last).to_have_text("Well, hello.")


def test_the_list_is_one_stop_for_the_keyboard_and_can_be_put_away(wired) -> None:
    chat = wired()[0].open()
    page = chat.page
    for text in ("First of three", "Second of three", "Third of three"):
        page.get_by_role("button", name="New chat", exact=True).click()
        chat.ask(text)
    page.get_by_role("searchbox").focus()
    page.keyboard.press("Tab")
    expect(chat.row("Third of three").get_by_role("link")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(chat.row("Second of three").get_by_role("link")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("button", name="Options for Second of three")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Engine room")).to_be_focused()
    page.keyboard.press("Control+b")
    expect(page.locator("#rail")).to_be_hidden()
    page.reload()
    expect(page.locator("#rail")).to_be_hidden()
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#rail")).to_be_visible()
    expect(page.get_by_role("button", name="Hide the list")).to_be_focused()


def test_lists_and_tables_are_read_from_the_side_of_their_script(wired, stage) -> None:
    chat = wired()[0].open()
    with stage.by_hand() as next_answer:
        chat.start("Hello!")
        next_answer().finish("- שלום\n- עולם\n\n| שם | גיל |\n|---|---|\n| דנה | 3 |\n\n1. one")
    chat.wait_done()
    answer, direction = chat.answers.last, "node => getComputedStyle(node).direction"
    found = [answer.locator(tag).evaluate(direction) for tag in ("ul", ".table", "table", "ol")]
    assert found == ["rtl", "rtl", "rtl", "ltr"]


def test_paper_has_the_whole_conversation_and_nothing_else(wired, stage) -> None:
    chat = wired()[0].open()
    page = chat.page
    with stage.by_hand() as next_answer:
        chat.start("Hello!")
        next_answer().finish("\n\n".join(f"Paragraph {number}" for number in range(80)))
    chat.wait_done()
    page.emulate_media(media="print")
    for part in ("#rail", "#composer", ".foot"):
        expect(page.locator(part).first).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollHeight") > 2000


def test_conversations_are_listed_while_the_engine_starts(wired) -> None:
    chat, wire = wired()
    chat.open()
    chat.ask("Is it listed?")
    starting = {"type": "error", "code": "starting", "message": "The engine is starting.", "retryable": True}
    wire.on_frame = lambda frame: starting if frame["type"] == "ready" else frame
    state = {"status": "starting", "stage": "loading_weights", "elapsed_s": 4.2}
    chat.page.route("**/readyz", lambda route: route.fulfill(status=200, json=state))
    chat.page.goto(chat.url + "/?again")
    expect(chat.banner).to_contain_text("The engine is starting")
    expect(chat.row("Is it listed?")).to_be_visible()


def test_the_page_can_be_installed(wired) -> None:
    page = wired()[0].open().page
    found = page.evaluate(
        "fetch(document.querySelector('link[rel=manifest]').href).then((reply) => reply.json())"
    )
    assert (found["name"], found["start_url"], found["display"]) == ("Overture", "./", "standalone")
    icons = [page.request.get(f"{page.url.split('#')[0]}{icon['src']}").status for icon in found["icons"]]
    assert icons == [200]


def test_conversations_lie_in_folders(wired, visit) -> None:
    chat = wired()[0].open()
    page = chat.page
    chat.ask("Of the sea")

    def move(act) -> None:
        chat.row("Of the sea").hover()
        chat.row("Of the sea").get_by_role("button", name="Options").click()
        page.get_by_role("menuitem", name="Move to a folder").click()
        act(page.get_by_role("dialog", name="Move to a folder"))

    def into_travel(dialog) -> None:
        dialog.get_by_label("Folder").fill("Travel")
        dialog.get_by_role("button", name="Move", exact=True).click()

    move(into_travel)
    folder = page.locator("details.folder")
    expect(folder.get_by_role("heading")).to_have_text("Travel")
    expect(folder.locator(".session-row")).to_have_count(1)
    other = visit().page.locator("details.folder")
    expect(other.locator(".session-title")).to_have_text("Of the sea")
    folder.locator("summary").click()
    expect(chat.row("Of the sea")).to_be_hidden()
    folder.locator("summary").click()
    move(lambda dialog: dialog.get_by_role("button", name="Take out").click())
    expect(folder).to_have_count(0)
    expect(chat.row("Of the sea")).to_be_visible()
