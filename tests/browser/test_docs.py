"""The page of the API in a real browser."""

from __future__ import annotations

import pytest

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def docs(open_page, gateway_url):
    page = open_page()
    page.goto(f"{gateway_url}/docs")
    expect(page.locator("#chat")).to_be_visible()
    return page


def test_every_operation_of_the_document_is_on_the_page_once(docs, gateway_url) -> None:
    document = docs.request.get(f"{gateway_url}/openapi.json").json()
    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    shown = docs.locator("details.operation").evaluate_all("cards => cards.map(card => card.id)")
    assert sorted(shown) == sorted(names)
    # The paths are in the document by their first operation; the page has groups in an order of their own.
    assert docs.locator(".contents li").count() == len(names)


def test_every_operation_opens_with_an_example(docs) -> None:
    cards = docs.locator("details.operation")
    cards.evaluate_all("cards => cards.forEach((card) => { card.open = true; })")
    expect(cards.last.locator("pre")).to_contain_text("curl ")
    assert docs.locator("details.operation > .inside > .code").count() == cards.count()
    # Unfolding all that is on the first screens finds schemas of every kind that there is.
    for _ in range(2):
        docs.locator("#responses details, #advise details, #engine_state details").evaluate_all(
            "parts => parts.forEach((part) => { part.open = true; })"
        )
    expect(docs.locator("#advise .nested .fields").first).to_contain_text("expected_arrival_s")
    assert docs.locator("text=undefined").count() == docs.locator("text=[object").count() == 0


def test_the_example_of_a_chat_can_be_sent_as_it_is(docs, gateway_url) -> None:
    docs.goto(f"{gateway_url}/docs#chat")
    command = docs.locator("#chat > .inside > .code pre").inner_text()
    assert command.startswith(f"curl {gateway_url}/v1/chat/completions")
    body = command.split("-d '")[1].removesuffix("'")
    reply = docs.request.post(
        f"{gateway_url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    )
    assert reply.ok and reply.json()["choices"]


def test_a_link_opens_its_operation_and_takes_the_keyboard_there(docs) -> None:
    docs.get_by_role("link", name="POST /v1/advisories", exact=True).click()
    expect(docs.locator("#advise > summary")).to_be_focused()
    expect(docs.locator("#advise")).to_have_attribute("open", "")
    docs.keyboard.press("Enter")
    expect(docs.locator("#advise")).not_to_have_attribute("open", "")


def test_the_page_fits_a_phone(open_page, gateway_url) -> None:
    page = open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.goto(f"{gateway_url}/docs#chat")
    expect(page.locator("#chat[open] .replies")).to_be_visible()
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
    expect(page.locator("#chat")).to_be_visible()
