"""The page behind a proxy that lets no websocket through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from aiohttp import web

from tests.browser.conftest import Chat
from tests.browser.stage import Site, Stage
from tests.served import served

expect = pytest.importorskip("playwright.sync_api").expect

# What belongs to one connection and is not passed on; `Upgrade` is what this proxy is about. Source: RFC 9110 §7.6.1.
OF_ONE_HOP = {"connection", "upgrade", "transfer-encoding", "keep-alive", "content-length"}


class StrippingProxy:
    """Passes requests on, without the header that asks for a websocket. hangs: lets such a request wait for ever instead."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.hangs, self.num_refused = False, 0

    def app(self) -> web.Application:
        app = web.Application()
        app.cleanup_ctx.append(self._with_client)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    async def _with_client(self, app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(auto_decompress=False) as self._http:
            yield

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_ONE_HOP}
        if "Upgrade" in request.headers:
            self.num_refused += 1
            if self.hangs:
                await asyncio.Event().wait()
        body = await request.read()
        async with self._http.request(
            request.method, self.target + request.path_qs, headers=headers, data=body
        ) as reply:
            kept = {name: value for name, value in reply.headers.items() if name.lower() not in OF_ONE_HOP}
            response = web.StreamResponse(status=reply.status, headers=kept)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            return response


@pytest.fixture
def proxy(site: Site, page_watch) -> Iterator[StrippingProxy]:
    page_watch.forgive()  # the browser says on its console that the websocket was refused
    proxy = StrippingProxy(site.url)
    with served(proxy.app()) as proxy.url:
        page_watch.origin = proxy.url
        yield proxy


def test_the_page_chats_by_events(open_page, site: Site, proxy: StrippingProxy) -> None:
    """Also tells of what is typed, and goes on after a reload."""
    page = open_page()
    told: list[str] = []
    page.on(
        "request", lambda request: told.append(request.post_data or "") if "/sse/" in request.url else None
    )
    chat = Chat(page, Site(proxy.url, site.key)).open()
    chat.ask("My secret word is marzipan.")
    assert proxy.num_refused >= 1
    chat.question.press_sequentially("What is my secret word?")
    chat.question.press("Enter")
    expect(chat.turns).to_have_count(2)
    chat.wait_done()
    expect(chat.answers.last).to_have_text("Well, hello.")
    assert any('"typing"' in each for each in told)
    page.reload()
    expect(chat.turns).to_have_count(2)
    expect(chat.banner).to_be_hidden()
    chat.ask("Hello!")


def test_an_answer_goes_on_after_the_stream_was_cut(
    open_page, site: Site, stage: Stage, proxy: StrippingProxy
) -> None:
    page = open_page()
    chat = Chat(page, Site(proxy.url, site.key)).open()
    page.route(
        "**/sse/*",
        lambda route: route.abort() if '"ping"' in (route.request.post_data or "") else route.continue_(),
    )
    with stage.by_hand() as next_answer:
        chat.start("Tell me a story.")
        writer = next_answer()
    writer.say("Once ")
    expect(chat.answers.last).to_have_text("Once")
    # A page that comes back to the front asks whether its connection lives: here that request fails, so it connects anew.
    with page.expect_request("**/sse"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    writer.finish("upon a time.")
    chat.wait_done()
    expect(chat.answers.last).to_have_text("Once upon a time.")
    expect(chat.turns).to_have_count(1)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_websocket_that_hangs_is_given_up(site: Site, open_page, proxy: StrippingProxy) -> None:
    proxy.hangs = True
    page = open_page()
    chat = Chat(page, Site(proxy.url, site.key))
    page.clock.install()
    page.goto(proxy.url)
    page.wait_for_function("() => document.querySelector('#server') !== null")
    page.clock.run_for(9000)
    expect(chat.picker).to_be_enabled()
    page.clock.resume()
    chat.ask("Hello!")
    # What got through last is tried first, so that no page waits for the websocket again each time.
    page.route("**/sse/*", lambda route: route.abort(), times=1)
    num_refused = proxy.num_refused
    with page.expect_request("**/sse"):
        # The page asks whether its connection lives, which fails.
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    chat.ask("Hello again!")
    assert proxy.num_refused == num_refused
    page.close()
