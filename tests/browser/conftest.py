"""Servers for the page, and browsers: most tests have a gateway without an engine, some one with the demo model.

Tests that take `chat` share a page, which each begins with a new chat; the others have pages of their own.

A page is watched: a console error, an uncaught exception or a request to another origin fails the test that caused it, unless
the test says `page_watch.forgive()` because it breaks the connection on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.browser.stage import Site, Stage

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "static"
BARE_ORIGIN = "http://bare.test"
VENDOR = Path(__file__).parent / "vendor"
# The build without a window renders as the whole browser does and takes half of its processor time.
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser"))), None
)
CHROMIUM_ARGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
READY_WITHIN_S = 240  # chosen: only a machine that is busy with something else comes near
ANSWER_MS = 30_000  # chosen: only a machine that is busy with something else comes near

# The page leaves sampling to the server. The tests want short answers and always the same ones, on busy machines too: what `Line`
# adds to each message, and what the server gives to pages whose websocket nobody touches.
CALM = {"temperature": 0.0, "max_tokens": 40}
GREEDY = ('override_generation_config={"temperature": 0}',)

try:
    from playwright.sync_api import (
        APIResponse,
        Browser,
        BrowserContext,
        Locator,
        Page,
        Playwright,
        Route,
        WebSocketRoute,
        expect,
        sync_playwright,
    )
except ImportError:
    sync_playwright = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; skip them, with the command that would help, where there is no browser."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.browser)
    reason = None
    if sync_playwright is None:
        reason = "needs Playwright: pip install playwright"
    elif CHROMIUM is None:
        reason = "needs Chromium: apt-get install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core"
    if reason is None:
        return
    for item in here:
        item.add_marker(pytest.mark.skip(reason=reason))


# ---------------------------------------------------------------------------------------------------------- the gateway


@contextlib.contextmanager
def demo(folder: Path, **settings: object) -> Iterator[str]:
    """The address of a gateway with the demo model, in a thread of its own until the block ends: where vLLM has been imported, it starts in a second.

    settings: of `Config`, beside those that each gateway of the tests has.
    """
    from tests.integration.conftest import demo_config, served

    loop, ending = asyncio.new_event_loop(), contextlib.AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> str:
        server = await ending.enter_async_context(served(demo_config(folder, **settings)))
        await server.services.node.start()
        return server.url

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(READY_WITHIN_S)
    finally:
        asyncio.run_coroutine_threadsafe(ending.aclose(), loop).result(READY_WITHIN_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway with the demo model, which asks for no key; OVERTURE_TEST_URL names one that runs already.

    Of this folder, not of the session: engines of other tests may start in this process only when it has gone.
    """
    if running := os.environ.get("OVERTURE_TEST_URL"):
        yield Site(running.rstrip("/"))
        return
    with demo(tmp_path_factory.mktemp("gateway"), engine_args=GREEDY) as url:
        yield Site(url)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A gateway without an engine, with two keys, and the line to it in the test's hand. It answers SCRIPT, or what the test writes."""
    with Stage(tmp_path_factory.mktemp("stage"), "ann", "bob") as stage:
        yield stage


@pytest.fixture(scope="module")
def site(stage: Stage) -> Site:
    """Where this module's pages are opened. One that needs the demo model takes `engine` in place of it."""
    return Site(stage.url, stage.keys["ann"])


# ---------------------------------------------------------------------------------------------------------- the browser


@pytest.fixture(scope="package")
def playwright() -> Iterator[Playwright]:
    """Of this folder, not of the session: while it is open, its event loop keeps asyncio tests of other folders from running."""
    with sync_playwright() as instance:
        yield instance


@pytest.fixture(scope="package")
def browser(playwright: Playwright) -> Iterator[Browser]:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def bare_page(browser: Browser) -> Iterator[Page]:
    """An empty page that may import the page's own scripts, as `/js/…`; there is no gateway behind it."""
    page = browser.new_page()

    def serve(route: Route) -> None:
        path = STATIC / route.request.url.removeprefix(f"{BARE_ORIGIN}/")
        if path.is_file():
            route.fulfill(path=path)
        else:
            route.fulfill(body="<title>bare</title><div id=toasts></div>", content_type="text/html")

    page.route(f"{BARE_ORIGIN}/**", serve)
    page.goto(f"{BARE_ORIGIN}/")
    yield page
    page.close()


@contextlib.contextmanager
def visiting() -> Iterator[tuple[Browser, str]]:
    """For the script that takes pictures: a browser, and the address of a gateway with the demo model that is started for the occasion."""
    with (
        tempfile.TemporaryDirectory() as folder,
        demo(Path(folder)) as url,
        sync_playwright() as playwright,
    ):
        expect.set_options(timeout=ANSWER_MS)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser, url
        browser.close()


class Watch:
    """What went wrong in the pages of one test."""

    def __init__(self) -> None:
        self.begin("")

    def begin(self, origin: str) -> None:
        self.origin = origin
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.is_forgiving = False

    def attach(self, page: Page) -> None:
        page.on("console", lambda each: self.errors.append(each.text) if each.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._on_request(request.url))

    def forgive(self) -> None:
        """The test breaks the connection itself: errors on the console are expected."""
        self.is_forgiving = True

    def check(self) -> None:
        assert self.foreign == []
        if not self.is_forgiving:
            assert self.errors == []

    def _on_request(self, url: str) -> None:
        if urlsplit(url).scheme not in {"data", "blob"} and not url.startswith(self.origin + "/"):
            self.foreign.append(url)


@pytest.fixture(scope="module")
def module_watch() -> Watch:
    return Watch()


@pytest.fixture
def page_watch(module_watch: Watch, site: Site) -> Watch:
    module_watch.begin(site.url)
    return module_watch


def new_page(browser: Browser, watch: Watch, **options: object) -> Page:
    """A watched page in a context of its own, with Playwright's context options."""
    expect.set_options(timeout=ANSWER_MS)
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
    context.set_default_timeout(ANSWER_MS)
    page = context.new_page()
    watch.attach(page)
    return page


@pytest.fixture
def open_page(browser: Browser, page_watch: Watch) -> Iterator[Callable[..., Page]]:
    """`new_page` for one test."""
    contexts: list[BrowserContext] = []

    def make(**options: object) -> Page:
        page = new_page(browser, page_watch, **options)
        contexts.append(page.context)
        return page

    yield make
    for context in contexts:
        context.close()
    page_watch.check()


class Chat:
    """The page as a person sees it."""

    def __init__(self, page: Page, site: Site) -> None:
        self.page = page
        self.url, self.key = site
        if self.key is not None:
            page.add_init_script(f"localStorage.setItem('overture.key', '{self.key}')")
        self.question: Locator = page.get_by_role("textbox", name="Message", exact=True)
        self.picker: Locator = page.get_by_role("button", name=re.compile("^Adapter"))
        self.models: Locator = page.get_by_role("option")
        self.filter: Locator = page.get_by_role("combobox", name="Filter adapters")
        self.turns: Locator = page.locator("article.turn")
        self.answers: Locator = page.locator("article.turn .answer")
        self.banner: Locator = page.locator("#banner")

    def call(self, method: str, path: str, **body: object) -> APIResponse:
        """What the server answers this page's owner."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return self.page.request.fetch(f"{self.url}{path}", method=method, headers=headers, **body)

    def begin(self) -> None:
        """Open a new chat on a page that another test has used."""
        self.page.get_by_role("button", name="New chat", exact=True).click()
        expect(self.turns).to_have_count(0)
        self.question.fill("")  # what was left of a draft

    @property
    def is_plain(self) -> bool:
        """Whether nothing stands over the page and no adapter is picked, which the next new chat would have, too."""
        return self.page.get_by_role("dialog").count() == 0 and self.picker.inner_text() == self.base

    def edit(self, turn: Locator, text: str) -> None:
        """Ask this question again in other words."""
        turn.hover()
        turn.get_by_role("button", name="Edit message").click()
        field = self.page.get_by_role("textbox", name="Edit message")
        expect(field).to_be_focused()
        field.fill(text)
        field.press("Enter")

    def bring_in(self, whole: object, num_turns: int) -> None:
        """Import a conversation of so many turns, which is then open."""
        file = {"name": "it.json", "mimeType": "application/json", "buffer": json.dumps(whole).encode()}
        self.page.keyboard.press("Control+,")
        self.page.get_by_label("File to import").set_input_files([file])
        expect(self.turns).to_have_count(num_turns)
        self.page.keyboard.press("Escape")

    def open(self, hash_: str = "") -> Chat:
        self.page.goto(f"{self.url}/{hash_}")
        expect(self.picker).to_be_enabled()
        return self

    def model(self, name: str) -> Locator:
        """The row of this adapter in the open picker."""
        return self.page.locator(f'[role=option][data-name="{name}"]')

    def pick(self, name: str) -> None:
        self.picker.click()
        self.model(name).click()

    def offer(self, adapters: list[dict]) -> None:
        """Let `/v1/adapters` name these, whatever the server has."""
        reply = {"adapters": adapters, "stats": {}}
        self.page.route("**/v1/adapters", lambda route: route.fulfill(json=reply))

    def send(self, text: str) -> None:
        self.question.fill(text)
        self.question.press("Enter")

    def start(self, text: str) -> None:
        """Send a message and wait until its answer is under way."""
        self.send(text)
        expect(self.turns.last).to_have_attribute("data-status", "running")

    def ask(self, text: str) -> str:
        """Send a message, wait for the end of its answer and return the answer's text."""
        before = self.turns.count()
        self.send(text)
        turn = self.turns.nth(before)
        self.wait_done(turn)
        return turn.locator(".answer").inner_text()

    def wait_done(self, turn: Locator | None = None) -> None:
        expect(self.turns.last if turn is None else turn).to_have_attribute("data-status", "done")

    @property
    def session_id(self) -> str:
        return self.page.url.split("#/s/")[1]

    def row(self, title: str) -> Locator:
        """The session of this title in the list."""
        return self.page.locator(".session-row").filter(
            has=self.page.locator(".session-title", has_text=title)
        )


class Line:
    """The websocket between page and gateway, with a hand on it. Make it before the page is opened.

    `on_send` and `on_frame` may change a frame to the server or to the page, or return None to swallow it. With `drop_after` set, the
    connection is cut behind the frame that passes next; with `refuse` set, new connections fail. `sampling` is added to each message.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self.rest()
        self._current: WebSocketRoute | None = None
        self._server: WebSocketRoute | None = None
        page.route_web_socket("**/ws", self._on_open)
        page.expose_function("acceptAgain", lambda: setattr(self, "refuse", False))

    def rest(self) -> None:
        """Let everything pass, and forget what did."""
        self.sent: list[dict] = []
        self.on_send: Callable[[dict], dict | None] = lambda frame: frame
        self.on_frame: Callable[[dict], dict | None] = lambda frame: frame
        self.sampling: dict | None = CALM
        self.refuse = False
        self.drop_after = False
        self.num_opened = 0
        self._page.unroute_all()
        # What stands in for the websocket where none gets through: a network that is down lets neither pass.
        self._page.route("**/sse", lambda route: route.abort() if self.refuse else route.continue_())

    def say(self, text: str) -> None:
        """Let the model say this, whatever it says: the first `delta` carries it, the others are empty."""
        answered: set[str] = set()

        def replace(frame: dict) -> dict:
            if frame["type"] != "delta":
                return frame
            is_first = frame["id"] not in answered
            answered.add(frame["id"])
            return frame | {"text": text if is_first else ""}

        self.on_frame = replace

    def accept_from_click(self) -> None:
        """Refuse connections until something is clicked on the page: not those that it tries by itself just before."""
        self._page.evaluate(
            "() => document.addEventListener('click', () => acceptAgain(), { capture: true, once: true })"
        )

    def drop(self) -> None:
        """Cut the connection, as a network would."""
        page_side, self._current = self._current, None
        self._server.close(code=1001)
        page_side.close(code=1012, reason="cut by the test")

    def inject(self, frame: dict) -> None:
        """A frame that the server never sent."""
        self._current.send(json.dumps(frame))

    def fail(self, code: str, message: str, *, turn: str | None = None, retryable: bool = True) -> None:
        """An error that the server never sent, of this turn or of none."""
        error = {"type": "error", "code": code, "message": message, "retryable": retryable}
        self.inject(error if turn is None else error | {"id": turn})

    @property
    def messages(self) -> list[dict]:
        """The messages among what was sent."""
        return [frame for frame in self.sent if frame["type"] == "message"]

    def _on_open(self, route: WebSocketRoute) -> None:
        self.num_opened += 1
        if self.refuse:
            route.close(code=1012, reason="refused by the test")
            return
        self._current = route
        self._server = server = route.connect_to_server()
        route.on_message(lambda text: self._to_server(server, text))
        server.on_message(lambda text: self._to_page(route, text))

    def _to_server(self, server: WebSocketRoute, text: str) -> None:
        frame = json.loads(text)
        if frame["type"] == "message" and self.sampling is not None:
            frame["sampling"] = self.sampling
        frame = self.on_send(frame)
        if frame is not None:
            self.sent.append(frame)
            server.send(json.dumps(frame))

    def _to_page(self, route: WebSocketRoute, text: str) -> None:
        if route is not self._current:
            return
        frame = self.on_frame(json.loads(text))
        if frame is not None:
            route.send(json.dumps(frame))
        if self.drop_after:
            self.drop_after = False
            self.drop()


@pytest.fixture
def wired(open_page: Callable[..., Page], site: Site) -> Callable[..., tuple[Chat, Line]]:
    """A function that makes a page, not opened yet, whose websocket the test holds in its hand. Takes context options."""

    def make(**options: object) -> tuple[Chat, Line]:
        page = open_page(**options)
        line = Line(page)
        return Chat(page, site), line

    return make


@pytest.fixture
def visit(open_page: Callable[..., Page], site: Site) -> Callable[..., Chat]:
    """A function that opens another page, whose websocket nobody touches. Takes the end of the address and context options."""
    return lambda hash_="", **options: Chat(open_page(**options), site).open(hash_)


@pytest.fixture(scope="module")
def shared(browser: Browser, module_watch: Watch) -> Iterator[list[Chat]]:
    """The page that this module's tests share, where there is one now."""
    pages: list[Chat] = []
    yield pages
    for chat in pages:
        chat.page.context.close()


@pytest.fixture
def chat(
    shared: list[Chat], browser: Browser, page_watch: Watch, site: Site, request: pytest.FixtureRequest
) -> Iterator[Chat]:
    """The page, open and ready, in a new chat; `chat.line` is its websocket.

    The next test gets it, too, unless this one fails, forgives or leaves something open.
    """
    if shared:
        chat = shared.pop()
        chat.begin()
    else:
        page = new_page(browser, page_watch)
        line = Line(page)
        chat = Chat(page, site)
        chat.line = line
        chat.base = chat.open().picker.inner_text()
    num_failed = request.session.testsfailed
    yield chat
    if not page_watch.is_forgiving and request.session.testsfailed == num_failed and chat.is_plain:
        chat.line.rest()
        shared.append(chat)
    else:
        chat.page.context.close()
    page_watch.check()


@pytest.fixture
def audit() -> Callable[..., list[str]]:
    """A function that gives the findings of axe-core that are more than minor, on what a page shows now, or on a part of it."""
    source = (VENDOR / "axe.min.js").read_text(encoding="utf-8")

    def findings(page: Page, part: str = "html") -> list[str]:
        if not page.evaluate("'axe' in window"):
            page.evaluate(source)
        result = page.evaluate("part => axe.run(part, { resultTypes: ['violations'] })", part)
        return [
            f"{finding['id']}: {node['html'][:160]}"
            for finding in result["violations"]
            if finding["impact"] in {"moderate", "serious", "critical"}
            for node in finding["nodes"]
        ]

    return findings
