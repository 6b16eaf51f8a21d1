"""The page of the API in a real browser: Swagger UI with this server's document."""

from __future__ import annotations

import pytest

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def docs(open_page, gateway_url):
    page = open_page()
    page.goto(f"{gateway_url}/docs")
    expect(page.locator(".opblock").first).to_be_visible()
    return page


def test_every_operation_of_the_document_is_on_the_page_once(docs, gateway_url) -> None:
    document = docs.request.get(f"{gateway_url}/openapi.json").json()
    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    shown = docs.locator(".opblock").evaluate_all("blocks => blocks.map(block => block.id)")
    assert len(shown) == len(names)
    assert all(any(block.endswith(f"-{name}") for block in shown) for name in names)


def test_the_example_of_a_chat_can_be_sent_from_the_page(open_page, gateway_url) -> None:
    page = open_page()
    page.goto(f"{gateway_url}/docs")
    block = page.locator(".opblock[id$='-chat']")
    block.locator(".opblock-summary-control").click()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_role("button", name="Execute").click()
    expect(block.locator(".live-responses-table .response .response-col_status")).to_contain_text(
        "200", timeout=60_000
    )
    expect(block.locator(".live-responses-table .response .response-col_description")).to_contain_text(
        "choices"
    )


def test_the_page_fits_a_phone(open_page, gateway_url) -> None:
    page = open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.goto(f"{gateway_url}/docs")
    expect(page.locator(".opblock").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_while_the_engine_starts_the_page_says_so_and_waits(open_page, gateway_url, page_watch) -> None:
    page_watch.forgive()  # a 503 is an error on the console
    page = open_page()
    refusals = iter(range(1))

    def answer(route) -> None:
        if next(refusals, None) is None:
            route.continue_()
        else:
            error = {
                "message": "The engine is starting.",
                "type": "server_error",
                "param": None,
                "code": "starting",
            }
            route.fulfill(status=503, json={"error": error})

    page.route("**/openapi.json", answer)
    page.goto(f"{gateway_url}/docs")
    expect(page.get_by_text("The engine is starting.")).to_be_visible()
    expect(page.locator(".opblock").first).to_be_visible()
