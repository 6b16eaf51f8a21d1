"""How the page looks and reads: on small and large windows, in both themes, to a screen reader, and while an answer comes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from gateway.doors.pages.joining import join

expect = pytest.importorskip("playwright.sync_api").expect

STATIC = Path(__file__).resolve().parents[2] / "static"
# As they are sent: joined, and packed by gzip.
FIRST_BYTES_MAX = 55 * 1000
LATER_BYTES_MAX = {"each": 30 * 1000, "all": 120 * 1000}
NUM_REQUESTS_MAX = 20
MARKDOWN = "# Title\n\n- one\n- **two**\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint('hi')\n```\n"


@pytest.fixture
def scripted(wired, stage):
    """A function that makes a page with a question under way: (chat, the writer of its answer). Takes context options."""
    with stage.by_hand() as next_answer:

        def make(**options: object):
            chat = wired(**options)[0].open()
            chat.start("Hello!")
            return chat, next_answer()

        yield make


def test_model_output_becomes_lists_tables_and_code_that_can_be_copied_and_never_html(chat) -> None:
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
    chat.line.say("\n\n".join(payloads))
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

    chat.line.say(MARKDOWN)
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


@pytest.mark.parametrize("width", [390, 1280])
def test_what_the_page_says_does_not_lie_on_what_is_written(visit, page_watch, width: int) -> None:
    page_watch.forgive()  # the browser notes the refusal
    chat = visit(viewport={"width": width, "height": 800}).open()
    files = [
        {"name": f"text {number}.txt", "mimeType": "text/plain", "buffer": b"Low tide."}
        for number in range(4)
    ]
    empty = {"name": "empty.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-"}
    chat.page.locator("#file").set_input_files([*files, empty])
    toast = chat.page.locator(".toast")
    expect(toast).to_contain_text("empty.pdf")
    expect(chat.page.locator(".composer-box")).to_contain_text("text 3.txt")
    said, box = toast.bounding_box(), chat.page.locator(".composer-box").bounding_box()
    assert box["y"] - 40 < said["y"] + said["height"] <= box["y"]


@pytest.mark.parametrize("step_px", [200, 5])
def test_the_reader_is_not_pulled_along(scripted, step_px: int) -> None:
    """Neither by one turn of a wheel nor in a trackpad's small steps, each of which ends close to the end."""
    chat, answer = scripted(viewport={"width": 800, "height": 420})
    answer.say("Paragraph 1. " + "word " * 400)
    expect(chat.answers.first).to_contain_text("Paragraph 1.")
    scroller = chat.page.locator("#scroller")
    at_end = "node => node.scrollHeight - node.scrollTop - node.clientHeight < 2"
    chat.page.get_by_role("button", name="New text").click()
    assert scroller.evaluate(at_end), "the text is followed while the reader is at its end"
    scroller.hover()
    for _ in range(200 // step_px):
        chat.page.mouse.wheel(0, -step_px)
        answer.say("word ")
    # The browser scrolls some frames after the wheel has turned, so the reader has stopped once two looks find the same place.
    chat.page.wait_for_function(
        f"""() => {{
            const node = document.getElementById('scroller'), before = window.placeBefore;
            window.placeBefore = node.scrollTop;
            return !({at_end.replace("< 2", "< 150")})(node) && node.scrollTop === before;
        }}""",
        polling=200,
    )
    top = scroller.evaluate("node => node.scrollTop")
    answer.say("\n\nParagraph 2. " + "word " * 400)
    pill = chat.page.get_by_role("button", name="New text")
    expect(pill).to_be_visible()
    assert scroller.evaluate("node => node.scrollTop") == top
    pill.click()
    expect(pill).to_be_hidden()
    assert scroller.evaluate(at_end)


def test_an_answer_that_was_cut_goes_on_and_a_full_context_is_said(scripted, stage) -> None:
    chat, answer = scripted()
    node = stage.gateway.node
    answer.say("One ")
    answer.finish(reason="length")
    chat.wait_done()
    page = chat.page
    expect(page.get_by_text("The answer reached the length limit.")).to_be_visible()
    expect(page.locator(".fullness")).to_be_hidden()
    page.reload()
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(".answer").first).to_have_text("One")
    with stage.by_hand() as next_answer:
        page.get_by_role("button", name="Continue").click()
        expect(chat.answers.first).to_have_text("One")
        more = next_answer()
        more.finish("and two.")
    chat.wait_done()
    expect(other.locator(".answer").first).to_have_text("One and two.")
    expect(chat.answers.first).to_have_text("One and two.")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    expect(page.locator(".turn")).to_have_count(1)
    node.max_model_len, usual = 5, node.max_model_len
    try:
        page.reload()
        expect(page.locator(".fullness")).to_have_text("100% full")
        large = {"name": "big.txt", "mimeType": "text/plain", "buffer": b"word " * 40}
        page.locator("#file").set_input_files([large])
        expect(page.locator(".toast")).to_contain_text("big.txt has about 50 tokens, the model reads 5.")
        page.locator("#file").set_input_files([large | {"name": "rather.txt", "buffer": b"word " * 6}])
        expect(page.locator(".file")).to_contain_text("about 8 tokens, the model reads 5")
    finally:
        node.max_model_len = usual


def test_who_opens_the_reasoning_stays_at_its_beginning(scripted) -> None:
    chat, answer = scripted(viewport={"width": 800, "height": 420})
    answer.think("Let me see. " * 600)
    answer.finish("It is so.")
    chat.wait_done()
    expect(chat.page.locator(".timings summary")).to_contain_text("first thought")
    summary = chat.page.locator(".reasoning summary")
    before = summary.bounding_box()["y"]
    summary.click()
    expect(chat.page.locator(".reasoning")).to_contain_text("Let me see.")
    # Two frames later the page has followed, if it does.
    chat.page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
    )
    assert abs(summary.bounding_box()["y"] - before) < 50


def test_the_theme_is_the_browsers_choice_and_stays(wired) -> None:
    page = wired(color_scheme="light")[0].open().page
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


def test_on_a_phone_the_list_is_a_drawer_and_what_one_touches_is_large_enough(visit) -> None:
    chat = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = chat.page
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


def test_nothing_is_wider_than_a_small_window(chat) -> None:
    table = "| " + " | ".join("column" * 3 for _ in range(9)) + " |\n" + "|---" * 9 + "|"
    chat.line.say(f"{'x' * 300}\n\n{table}\n\n```\n{'y' * 300}\n```")
    chat.ask("Hello " + "z" * 200)
    boxes = chat.page.locator("html, #scroller, #composer, .top")
    for width in (320, 640):
        chat.page.set_viewport_size({"width": width, "height": 600})
        excess = boxes.evaluate_all("nodes => nodes.map((node) => node.scrollWidth - node.clientWidth)")
        assert max(excess) <= 0
        expect(chat.page.get_by_role("button", name="Send", exact=True)).to_be_in_viewport()
    chat.page.set_viewport_size({"width": 1280, "height": 800})


def test_axe_finds_nothing_serious(wired, audit) -> None:
    """In a wide light window and in a narrow dark one."""
    chat, wire = wired(reduced_motion="reduce")
    page = chat.page
    wire.say(MARKDOWN)
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        chat.open()
        findings = audit(page)
        chat.ask("Show me some Markdown.")
        chat.page.locator(".timings summary").click()
        findings += audit(page, "main")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("System prompt")).to_be_visible()
        findings += audit(page, ".sheet")
        page.keyboard.press("Escape")
        if width < 720:
            page.get_by_role("button", name="Conversations").click()
            expect(page.get_by_role("searchbox")).to_be_visible()
        page.locator(".session").first.press("Delete")
        findings += audit(page)
        assert findings == []


def test_a_screen_reader_hears_sentences_and_a_long_answer_keeps_its_finished_blocks(scripted) -> None:
    chat, writer = scripted()
    region, answer = chat.page.locator("#announcer"), chat.answers.first
    writer.say("This is **half a")
    expect(answer).to_contain_text("half a")
    expect(region).to_be_empty()
    writer.say(" sentence**. And")
    expect(region).to_have_text("This is half a sentence.")
    writer.say(*(f"\n\nParagraph {number} " + "word " * 75 for number in range(3, 43)))
    expect(answer).to_contain_text("Paragraph 42")
    answer.locator(".block").first.evaluate("node => { node.dataset.kept = 'yes'; }")
    writer.say("\n\nParagraph 43")
    expect(answer).to_contain_text("Paragraph 43")
    expect(answer.locator(".block").first).to_have_attribute("data-kept", "yes")
    assert answer.locator("p").count() == 42


def test_formulas_are_set_and_their_code_is_loaded_with_the_first_one(scripted) -> None:
    """Markdown leaves them alone, code and prices are none, and what is unfinished or not understood stays as it was written."""
    chat, writer = scripted()
    scripts: list[str] = []
    chat.page.on("request", lambda request: scripts.append(request.url))
    answer = chat.answers.first
    writer.say(r"It costs $5 and $6, or \$7. `$x$` is code. So *much*.")
    expect(answer.locator("em")).to_have_text("much")
    assert not [url for url in scripts if "katex" in url]
    writer.say(
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
    writer.say("y_1\n$$")
    expect(answer.locator("math[display=block]")).to_have_count(2)


def test_scripts_and_styles_within_a_page_are_highlighted(scripted) -> None:
    chat, answer = scripted()
    page = "<style>a { color: red; }</style>\n<script>const one = 1;</script>"
    answer.finish(f"```html\n{page}\n```")
    code = chat.answers.first.locator("code")
    expect(code.locator(".language-css .hljs-attribute")).to_have_text("color")
    expect(code.locator(".language-javascript .hljs-keyword")).to_have_text("const")


def test_a_first_visit_takes_few_requests_and_a_second_one_asks_for_no_file_again(wired) -> None:
    chat, requests = wired()[0], list[str]()
    chat.page.on("request", lambda request: requests.append(request.url))
    chat.open()
    chat.page.wait_for_load_state("networkidle")
    assert len(requests) <= NUM_REQUESTS_MAX, requests
    kept = chat.page.evaluate(
        """async () => {
            const files = performance.getEntriesByType('resource').map(({ name }) => name).filter((name) => name.includes('/static/'));
            const replies = await Promise.all(files.map((name) => fetch(name)));
            return replies.map((reply) => [reply.url, reply.headers.get('Cache-Control')]);
        }"""
    )
    assert kept and all("immutable" in how for _, how in kept), kept


def test_own_script_and_style_stay_small() -> None:
    own = {
        path.relative_to(STATIC).as_posix(): path.read_text()
        for path in STATIC.rglob("*")
        if path.suffix in {".js", ".css", ".html"} and "vendor" not in path.parts
    }
    joined = join(own, "0")
    sizes = {name: len(gzip.compress(text.encode(), 9)) for name, text in (own | joined.files).items()}
    first = ("index.html", "js/theme.js", "js/main.js", "css/page-index.css")
    assert sum(sizes[name] for name in first) <= FIRST_BYTES_MAX
    later = [size for name, size in sizes.items() if name in joined.files and name not in first]
    assert max(later) <= LATER_BYTES_MAX["each"] and sum(later) <= LATER_BYTES_MAX["all"]
