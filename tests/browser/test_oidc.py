"""Signing in at an OIDC provider in a real browser, which the provider, another site, sends back: the cookie that it gets counts there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.stage import Stage
from tests.served import served
from tests.unit.gateway.test_oidc import CLIENT, NAME, SECRET, Provider

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """With ada, and one who signs in at the provider. To a browser `localhost` and `127.0.0.1` are two sites."""
    (tmp_path / "secret").write_text(SECRET)
    with served(Provider().app) as url:
        stage = Stage(tmp_path, "ada", NAME)
        stage.settings = {
            "oidc_issuer": url.replace("127.0.0.1", "localhost"),
            "oidc_client_id": CLIENT,
            "oidc_client_secret_file": tmp_path / "secret",
        }
        with stage:
            yield stage


def test_a_person_signs_in_without_a_key_and_out_again(browser: Any, stage: Stage) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(stage.url)
    page.get_by_role("link", name="Sign in without a key").click()
    page.wait_for_url(f"{stage.url}/")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_text(f"Signed in as {NAME}")).to_be_visible()
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_text(f"Signed in as {NAME}")).to_be_visible()
    (cookie,) = [each for each in context.cookies() if each["name"] == "overture_session"]
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    context.close()
