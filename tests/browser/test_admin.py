"""The operators' page in a real browser: people added, keys made, replaced and withdrawn, disabled, exported and erased."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key_file import owner_of
from gateway.access.person_limits import PersonLimits
from gateway.people import erasures
from gateway.people.ledger import Spent
from gateway.people.sign_ins import SESSION_LASTS_S
from tests.browser.stage import Site, Stage

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """With ada, an operator, and bob."""
    stage = Stage(tmp_path, "ada", "bob")
    stage.operators = {"ada"}
    with stage:
        yield stage


@pytest.fixture
def site(stage: Stage) -> Site:
    return Site(stage.url, stage.keys["ada"])


@pytest.fixture
def module_watch() -> Any:
    from tests.browser.conftest import Watch

    return Watch()


class Page:
    """The page as an operator sees it."""

    def __init__(self, page: Any, site: Site) -> None:
        self.page = page
        self.url = f"{site.url}/admin"
        page.goto(self.url)

    def sign_in(self, key: str) -> None:
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Continue").click()

    def row(self, name: str) -> Any:
        return self.page.locator("#people tr").filter(has=self.page.get_by_role("rowheader", name=name))

    def choose(self, name: str, entry: str) -> None:
        self.page.get_by_role("button", name=f"Manage {name}").click()
        self.page.get_by_role("menuitem", name=entry).click()

    def press(self, label: str) -> None:
        self.page.get_by_role("dialog").get_by_role("button", name=label, exact=True).click()

    def new_key(self) -> str:
        field = self.page.get_by_role("dialog").get_by_label("API key")
        expect(field).to_be_visible()
        key = field.input_value()
        self.press("Done")
        return str(key)


@pytest.fixture
def admin(open_page: Any, site: Site) -> Page:
    admin = Page(open_page(accept_downloads=True), site)
    admin.sign_in(site.key or "")
    expect(admin.page.get_by_text("Signed in as ada")).to_be_visible()
    return admin


def status_of(admin: Page, stage: Stage, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return int(admin.page.request.get(f"{stage.url}/api/sessions", headers=headers).status)


def test_an_operator_makes_replaces_and_withdraws_keys(admin: Page, stage: Stage, page_watch: Any) -> None:
    page_watch.forgive()  # the first look at the page is without a key
    admin.page.get_by_role("button", name="Add a person").click()
    admin.page.get_by_label("Name").fill("two words")
    admin.press("Add")
    expect(admin.page.get_by_role("dialog")).to_be_visible()
    admin.page.get_by_label("Name").fill("eve")
    admin.page.get_by_label("Role").select_option("operator")
    admin.press("Add")
    first = admin.new_key()
    expect(admin.row("eve")).to_contain_text("operator")
    assert status_of(admin, stage, first) == 200
    admin.choose("eve", f"Replace {first[:11]}")
    admin.press("Replace")
    second = admin.new_key()
    assert (status_of(admin, stage, first), status_of(admin, stage, second)) == (401, 200)
    admin.choose("eve", "New key")
    third = admin.new_key()
    admin.choose("eve", f"Withdraw {second[:11]}")
    admin.press("Withdraw")
    expect(admin.row("eve").locator("code")).to_have_text([third[:11]])
    assert (status_of(admin, stage, second), status_of(admin, stage, third)) == (401, 200)
    admin.choose("eve", "Disable")
    expect(admin.row("eve")).to_contain_text("disabled")
    assert status_of(admin, stage, third) == 401
    admin.choose("eve", "Enable")
    expect(admin.row("eve").locator(".mark.good")).to_be_visible()
    admin.page.get_by_role("button", name="Manage ada").click()
    expect(admin.page.get_by_role("menuitem", name="Erase")).to_have_count(0)


def test_an_operator_sets_limits(admin: Page, stage: Stage, page_watch: Any) -> None:
    page_watch.forgive()
    bob = owner_of(stage.keys["bob"])
    admin.choose("bob", "Limits")
    admin.page.get_by_label("Tokens a day").fill("5000")
    admin.page.get_by_label("Requests at once").fill("0")
    admin.press("Save")
    expect(admin.page.get_by_text("The limits of bob are saved.")).to_be_visible()
    expected = PersonLimits(tokens_per_day=5000, concurrent_requests=0)
    assert stage.do(lambda: stage.gateway.server.services.keys.limits_of(bob)) == expected
    admin.choose("bob", "Limits")
    expect(admin.page.get_by_label("Tokens a day")).to_have_value("5000")
    expect(admin.page.get_by_label("Requests a minute")).to_have_value("")
    admin.page.get_by_label("Tokens a day").fill("")
    admin.press("Save")
    expect(admin.page.get_by_role("dialog")).to_have_count(0)
    expect(admin.page.get_by_label("Tokens a day")).to_have_count(0)


def test_what_people_use_is_shown_exported_and_erased(
    admin: Page, stage: Stage, page_watch: Any, tmp_path: Path
) -> None:
    page_watch.forgive()
    bob = owner_of(stage.keys["bob"])
    stage.do(lambda: stage.gateway.usage.add(bob, Spent(3, 1200, 34)))
    headers = {"Authorization": f"Bearer {stage.keys['bob']}"}
    admin.page.request.post(f"{stage.url}/api/sessions", headers=headers, data={"title": "Hens"})
    admin.page.reload()
    expect(admin.row("bob")).to_contain_text("1,234")
    admin.page.get_by_label("Of").select_option(label="bob")
    expect(admin.page.locator("#usage tbody td")).to_have_text(["3", "1,200", "34", "1,234"])
    admin.page.get_by_label("Of").select_option(label="ada")
    expect(admin.page.locator("#usage")).to_contain_text("Nothing was used")
    with admin.page.expect_download() as download:
        admin.choose("bob", "Export")
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    with zipfile.ZipFile(path) as archive:
        assert path.name == "bob.zip" and json.loads(archive.read("person.json"))["owner"] == bob
        assert "conversations/00001-Hens.json" in archive.namelist()
    admin.choose("bob", "Erase")
    admin.press("Erase")
    expect(admin.page.get_by_role("dialog")).to_be_visible()
    admin.page.get_by_label("Write bob to confirm").fill("bob")
    admin.press("Erase")
    expect(admin.page.locator(".toast")).to_contain_text("bob is erased. Conversations: 1.")
    expect(admin.row("bob")).to_have_count(0)
    assert status_of(admin, stage, stage.keys["bob"]) == 401


def test_a_long_erasure_is_shown_until_it_is_done(
    admin: Page, stage: Stage, page_watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_watch.forgive()
    headers = {"Authorization": f"Bearer {stage.keys['bob']}"}
    admin.page.request.get(f"{stage.url}/api/sessions", headers=headers)
    admin.page.reload()
    monkeypatch.setattr(erasures, "WAIT_S", 0.0)
    stage.do(stage.gateway.node.may_erase.clear)
    admin.choose("bob", "Erase")
    admin.page.get_by_label("Write bob to confirm").fill("bob")
    admin.press("Erase")
    expect(admin.page.locator("#erasing")).to_have_text("Erasing bob. Conversations: 0.")
    expect(admin.row("bob")).to_contain_text("disabled")
    stage.do(stage.gateway.node.may_erase.set)
    expect(admin.page.locator(".toast")).to_contain_text("bob is erased.")
    expect(admin.page.locator("#erasing")).to_be_empty()
    expect(admin.row("bob")).to_have_count(0)


def test_a_link_signs_a_browser_in_until_it_signs_out(
    admin: Page, open_page: Any, site: Site, page_watch: Any
) -> None:
    page_watch.forgive()
    admin.choose("bob", "Sign-in link")
    field = admin.page.get_by_role("dialog").get_by_label("Link")
    expect(field).to_be_visible()
    link = field.input_value()
    admin.press("Done")
    assert link.startswith(f"{site.url}/sign-in#")
    page = open_page()
    page.goto(link)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("Your conversations will be kept here.")).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    sheet = page.get_by_role("dialog")
    expect(sheet).to_contain_text("Signed in as bob")
    assert page.evaluate("document.cookie") == "", "no script sees the cookie"
    page.get_by_role("textbox", name="Message", exact=True).fill("Hello!")
    page.keyboard.press("Enter")
    expect(page.locator("article.turn").last).to_have_attribute("data-status", "done")
    sheet.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    page.goto(link)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("status")).to_contain_text("used already")
    expect(page.get_by_role("button", name="Sign in")).to_be_hidden()


def test_all_windows_of_a_browser_follow_when_one_signs_out_or_in(
    open_page: Any, site: Site, stage: Stage, page_watch: Any
) -> None:
    """What one person has on the screen and writes there never stands beside another's."""
    page_watch.forgive()
    first = open_page()
    second = first.context.new_page()
    for page in (first, second):
        page.goto(site.url)
    asked = [page.get_by_label("API key") for page in (first, second)]
    question = second.get_by_role("textbox", name="Message", exact=True)
    expect(asked[1]).to_be_visible()
    asked[0].fill(stage.keys["bob"])
    first.keyboard.press("Enter")
    expect(asked[1]).to_be_hidden()
    question.fill("Words of bob")
    second.keyboard.press("Enter")
    expect(second.locator("article.turn").last).to_have_attribute("data-status", "done")
    question.fill("A thought of bob")
    first.get_by_role("button", name="Settings").click()
    first.get_by_role("button", name="Sign out").click()
    expect(asked[1]).to_be_visible()
    expect(second.locator(".bubble")).to_have_count(0)
    asked[1].fill(stage.keys["ada"])
    second.keyboard.press("Enter")
    for page in (first, second):
        expect(page.get_by_text("Your conversations will be kept here.")).to_be_visible()
    expect(question).to_have_value("")
    people, room = (first.context.new_page() for _ in range(2))
    people.goto(f"{site.url}/admin")
    room.goto(f"{site.url}/engine")
    expect(people.get_by_role("rowheader", name="bob")).to_be_visible()
    expect(room.get_by_text("live", exact=True)).to_be_visible()
    first.get_by_role("button", name="Settings").click()
    first.get_by_role("button", name="Sign out").click()
    for page in (second, people, room):
        expect(page.get_by_label("API key")).to_be_visible()
    expect(people.get_by_role("rowheader", name="bob")).to_have_count(0)


def test_a_page_says_when_its_sign_in_has_lasted_its_time_and_loses_nothing(
    admin: Page, open_page: Any, stage: Stage, page_watch: Any
) -> None:
    page_watch.forgive()
    page = open_page()

    def sign_in(page: Any) -> None:
        admin.choose("bob", "Sign-in link")
        field = admin.page.get_by_role("dialog").get_by_label("Link")
        expect(field).to_be_visible()
        page.goto(field.input_value())
        admin.press("Done")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("searchbox")).to_be_visible()

    sign_in(page)
    question = page.get_by_role("textbox", name="Message", exact=True)
    expect(page.get_by_text("Your conversations will be kept here.")).to_be_visible()
    question.fill("Hello!")
    page.keyboard.press("Enter")
    expect(page.locator("article.turn").last).to_have_attribute("data-status", "done")
    conversation = page.url
    question.fill("And what I was about to ask")
    stage.gateway.clock_ahead_s = SESSION_LASTS_S + 1
    ended = page.get_by_role("dialog", name="You are signed out")
    expect(ended).to_contain_text("What you have written is kept.")
    expect(page.locator("textarea")).to_have_value("And what I was about to ask")
    sign_in(page.context.new_page())
    page.evaluate(
        "document.dispatchEvent(new Event('visibilitychange'))"
    )  # as when one comes back to the window
    expect(ended).to_be_hidden()
    expect(page).to_have_url(conversation)
    expect(question).to_have_value("And what I was about to ask")
    expect(page.locator("article.turn .answer")).to_have_text("Well, hello.")


def test_a_member_is_told_that_the_page_is_for_operators(
    open_page: Any, site: Site, stage: Stage, page_watch: Any
) -> None:
    page_watch.forgive()
    admin = Page(open_page(), site)
    admin.sign_in(stage.keys["bob"])
    expect(admin.page.get_by_text("for an operator's key only")).to_be_visible()
    expect(admin.page.locator("section:visible, #who:visible")).to_have_count(1)
    expect(admin.page.get_by_role("button", name="Add a person")).to_be_hidden()
    admin.page.get_by_role("button", name="Use another key").click()
    admin.sign_in(stage.keys["ada"])
    expect(admin.row("bob")).to_be_visible()


def test_axe_finds_nothing_serious(admin: Page, audit: Any, page_watch: Any) -> None:
    """In a wide light window and in a narrow dark one."""
    page_watch.forgive()
    page = admin.page
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.goto(admin.url)
        expect(admin.row("bob")).to_be_visible()
        findings = audit(page)
        page.get_by_role("button", name="Manage bob").click()
        findings += audit(page, ".menu")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Add a person").click()
        findings += audit(page, "dialog")
        page.goto(f"{admin.url.removesuffix('admin')}sign-in#x")
        findings += audit(page)
        assert findings == []
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_what_an_operator_is_asked_and_shown_fits_a_small_screen(admin: Page, page_watch: Any) -> None:
    """The table is wider than the screen there, and scrolls inside itself."""
    page_watch.forgive()
    page = admin.page
    button, dialog = page.get_by_role("button", name="Manage bob"), page.get_by_role("dialog")
    page.set_viewport_size({"width": 390, "height": 844})
    box = button.bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    button.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(button).to_be_focused()
    for width, height in ((320, 640), (844, 390)):
        page.set_viewport_size({"width": width, "height": height})
        button.click()
        expect(page.get_by_role("menuitem").first).to_be_in_viewport(ratio=1)
        page.get_by_role("menuitem", name="Erase").scroll_into_view_if_needed()
        expect(page.get_by_role("menuitem", name="Erase")).to_be_in_viewport(ratio=1)
        page.get_by_role("menuitem", name="Sign-in link").click()
        for name in ("Copy", "Done"):
            expect(dialog.get_by_role("button", name=name)).to_be_in_viewport(ratio=1)
        assert dialog.evaluate("dialog => dialog.scrollWidth - dialog.clientWidth") == 0
        admin.press("Done")
