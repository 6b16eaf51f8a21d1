"""The engine room in a real browser: what only a fleet has, by frames that a test makes; test_answers.py has one node, live."""

from __future__ import annotations

import pytest

expect = pytest.importorskip("playwright.sync_api").expect

LANES = {"boundaries": [0.4], "num_waiting": [2, 0], "quota_tokens": [400, 800], "used_tokens": [100, 0]}
LOAD = {
    "policy": "mlq",
    "num_running": 3,
    "num_waiting": 2,
    "num_by_reason": {"lane_quota": 2},
    "lanes": LANES,
    "num_kv_blocks": 61,
    "num_free_kv_blocks": 45,
    "block_size": 32,
    "num_steps": 100,
    "num_answer_tokens": 1000,
}
KV = {
    "host": {"bytes": 1 << 30, "capacity_bytes": 2 << 30, "num_hits": 12},
    "disk": {"bytes": 3 << 30, "capacity_bytes": 8 << 30, "num_hits": 4},
    "peers": {"bytes_fetched": 5 << 20, "num_fetched": 9, "bytes_lent": 0, "num_lent": 0},
    "problem": None,
}


def node(name: str, **changes: object) -> dict:
    resident = [{"name": "pirate", "place": "slot", "is_pinned": True}] if name == "one" else []
    known = {
        "id": name,
        "model": "demo",
        "state": "ready",
        "stage": "ready",
        "elapsed_s": 90,
        "incarnation": "1",
    }
    figures = {"is_draining": False, "num_rebuilds": 0, "load": LOAD, "kv": KV, "left_out": [], "error": None}
    adapters = {"num_by_place": {"slot": len(resident), "disk": 4}, "resident": resident, "failed": {}}
    return known | figures | {"adapters": adapters} | changes


def frame(*nodes: dict, at_s: float = 10.0, **changes: object) -> dict:
    loads = [each["load"] for each in nodes if each["load"]]
    sums = {
        name: sum(load[name] for load in loads)
        for name in LOAD
        if name.startswith("num_") and "by" not in name
    }
    totals = {"num_nodes": len(nodes), "num_open": sum(each["state"] == "ready" for each in nodes), **sums}
    shown = {"type": "engine", "at_s": at_s, "nodes": list(nodes), "totals": totals}
    return shown | {"advisories": [], "runs": [], "advisory_counts": {"live": 0}} | changes


@pytest.fixture
def fleet(wired):
    """A page whose frames the test makes, and the hand on its socket."""
    chat, line = wired()
    line.on_frame = lambda each: None if each["type"] == "engine" else each
    chat.page.goto(f"{chat.url}/engine")
    expect(chat.page.locator("#live")).to_have_text("live")
    return chat.page, line


def test_every_node_has_its_rates_its_row_its_memory_and_its_lanes(fleet) -> None:
    """Rates are what two frames tell, and a new engine begins from nothing; others' memory is for an operator's key."""
    page, line = fleet
    rows = page.get_by_role("table", name="Nodes and what each one does").get_by_role("row")
    later = LOAD | {"num_steps": 150, "num_answer_tokens": 1800}
    line.inject(frame(node("one"), node("two"), at_s=10))
    line.inject(frame(node("one", load=later), node("two", load=later, incarnation="2"), at_s=12))
    expect(rows.nth(1).get_by_role("cell").nth(4)).to_have_text("400")
    expect(rows.nth(2).get_by_role("cell").nth(4)).to_have_text("0.0")
    expect(page.locator(".figure-value").first).to_have_text("400")

    two = node("two", state="starting", stage="loading demo", load=None, kv=None)
    line.inject(frame(node("one"), two, at_s=14))
    expect(rows.nth(2)).to_contain_text("starting")
    expect(rows.nth(2)).to_contain_text("loading demo")
    expect(rows.nth(1)).to_contain_text("480 of 1,920 tokens")
    memory = page.get_by_role("table", name="Memory of one, by tier")
    expect(memory).to_contain_text("1.0 GiB of 2.0 GiB")
    expect(memory).to_contain_text("5.0 MiB fetched")
    lane = page.get_by_role("table", name="Lanes of one").get_by_role("row").nth(1)
    expect(lane).to_contain_text("100 of 400")
    expect(page.locator("#lanes")).to_contain_text("its lane holds all its tokens")
    adapter = page.get_by_role("table", name="Adapters in memory").get_by_role("row").nth(1)
    expect(adapter).to_contain_text("slot")
    expect(page.locator("#figures")).to_contain_text("1 of 2 nodes take requests")

    less = [
        {"mechanism": "adapters", "why": "no LoRA"},
        {"mechanism": "KV tiers", "why": "layers keep a state"},
    ]
    line.inject(frame(node("one", kv=None, left_out=less), at_s=15))
    expect(rows.nth(1)).to_contain_text("without adapters, KV tiers")
    expect(page.locator("#tiers")).to_contain_text("no KV behind the device (layers keep a state)")
    expect(page.locator("#adapters")).to_have_text("The base model answers here, without adapters: no LoRA.")

    line.inject(frame(node("one", kv=None), at_s=16, advisory_counts=None))
    expect(page.locator("#tiers")).to_contain_text("an operator’s key shows them")
    expect(page.locator("#advisories")).not_to_contain_text("everybody")


def test_a_page_in_the_background_is_sent_nothing_and_a_lost_server_is_said(fleet, page_watch, audit) -> None:
    page, line = fleet
    line.inject(frame(node("one")))
    for is_hidden in ("true", "false"):
        page.evaluate(
            f"Object.defineProperty(document, 'hidden', {{ configurable: true, get: () => {is_hidden} }})"
        )
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_function("document.querySelector('#live').textContent === 'live'")
    watched = [each["on"] for each in line.sent if each["type"] == "watch_engine"]
    assert watched == [True, False, True]
    page_watch.forgive()
    line.refuse = True
    line.drop()
    expect(page.locator("#banner")).to_contain_text("Next try in")
    assert audit(page) == []
    line.accept_from_click()
    page.get_by_role("button", name="Retry now").click()
    expect(page.locator("#live")).to_have_text("live")


def run(session_id: str, state: str, **changes: object) -> dict:
    tokens = {"stayed": 12480, "restored": 3840, "recomputed": 96, "new": 2210}
    figures = {"num_turns": 7, "num_pauses": 6, "pause_s": 4.25, "age_s": 31.0, "quiet_s": 1.2}
    return (
        {"session_id": session_id, "caller": "", "model": None, "state": state, "tokens": tokens}
        | figures
        | changes
    )


def test_ones_own_agents_are_shown_with_their_turns_their_tools_and_their_prompts_tokens(fleet) -> None:
    page, line = fleet
    line.inject(frame(node("one")))
    expect(page.locator("#runs")).to_contain_text("None of yours yet")
    long = run("auto-" + "x" * 58 + "…", "rests", num_pauses=0, quiet_s=400)
    line.inject(
        frame(
            node("one"),
            runs=[
                run("ticket-17:mender", "tools", model="pirate"),
                run("b", "asks", caller="ticket-17"),
                long,
            ],
        )
    )
    rows = page.get_by_role("table", name="Your last agents, the newest first").get_by_role("row")
    expect(rows).to_have_count(4)
    first = ["tools at work", "7", "6 4.3 s", "12,480", "3,840", "96", "2,210", "1 s"]
    expect(rows.nth(1).get_by_role("rowheader")).to_contain_text("ticket-17:mender")
    expect(rows.nth(1).get_by_role("cell")).to_have_text(first)
    expect(rows.nth(2)).to_contain_text("is answered")
    expect(rows.nth(2).get_by_role("rowheader")).to_contain_text("for ticket-17")
    expect(rows.nth(3).get_by_role("cell").nth(2)).to_have_text("–")
    expect(page.locator("#runs")).to_contain_text("was computed twice")
    for width in (1280, 390, 320):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            f"it scrolls sideways at {width} px"
        )
