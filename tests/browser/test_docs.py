"""The page of the API in a real browser: Swagger UI with this server's document, on a phone."""

from __future__ import annotations

import pytest

from tests.browser.stage import Site

expect = pytest.importorskip("playwright.sync_api").expect

STARTING = {
    "message": "The engine is starting.",
    "type": "server_error",
    "param": None,
    "code": "starting",
}


@pytest.fixture(scope="module")
def site(engine: Site) -> Site:
    return engine


def test_the_page_waits_for_the_engine_shows_every_operation_fits_a_phone_and_sends_the_example_of_a_chat(
    open_page, site: Site, page_watch
) -> None:
    """Also where a schema holds itself."""
    page_watch.forgive()  # a 503 is an error on the console
    page = open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    document = page.request.get(f"{site.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    schemas["ChatCompletionRequest"]["properties"]["again"] = {
        "$ref": "#/components/schemas/ChatCompletionRequest"
    }
    replies = iter([{"status": 503, "json": {"error": STARTING}}, {"json": document}])
    page.route("**/openapi.json", lambda route: route.fulfill(**next(replies)))
    page.goto(f"{site.url}/docs")
    expect(page.get_by_text("The engine is starting.")).to_be_visible()
    expect(page.locator(".opblock").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    shown = page.locator(".opblock").evaluate_all("blocks => blocks.map(block => block.id)")
    assert len(shown) == len(names), "once each"
    assert all(any(block.endswith(f"-{name}") for block in shown) for name in names)

    block = page.locator(".opblock[id$='-chat']")
    block.locator(".opblock-summary-control").click()
    block.locator(".tablinks", has_text="Schema").first.click()
    # Of a schema that the operation only names.
    expect(block.get_by_text("max_completion_tokens").first).to_be_visible()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_role("button", name="Execute").click()
    response = block.locator(".live-responses-table .response")
    expect(response.locator(".response-col_status")).to_contain_text("200")
    expect(response.locator(".response-col_description")).to_contain_text("choices")
