"""What the chat page costs a browser: bytes and time until it is usable, and the main thread's time beside long conversations.

    python -m bench.live.page [--quick]

A server with the demo model and headless Chromium (playwright's headless shell). The last line is JSON.

  first_load_kb, requests       what the first visit takes over the wire, and by how many requests
  usable_ms_fast3g              from the address to a text field that can send, with DevTools' "Fast 3G" (1.6 Mbit/s, 150 ms)
  key_ms_200_turns              the main thread's time for one key in a conversation of 200 turns
  paste_500kb_key_ms            the same, behind a paste of 500 kB
  stream_core_share_30k_words   the main thread's share of a core while an answer comes in a conversation of 30,000 words
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
import urllib.request
from typing import Any

from playwright.sync_api import Browser, Page, WebSocketRoute, sync_playwright

from bench.live.shared.report import Progress, figures, options, report
from bench.live.shared.serving import demo_server

AIMS = {
    "first_load_kb": "aim ≤ 150",
    "requests": "aim ≤ 20",
    "usable_ms_fast3g": "aim ≤ 2,000",
    "key_ms_200_turns": "aim ≤ 6",
    "paste_500kb_key_ms": "aim ≤ 100",
    "stream_core_share_30k_words": "aim ≤ 0.6",
}
CHROMIUM_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
FAST_3G = {"offline": False, "latency": 150, "downloadThroughput": 200_000, "uploadThroughput": 93_750}
NUM_TURNS, NUM_KEYS, PASTE_BYTES, NUM_WORDS = 200, 40, 500_000, 30_000
PASTE = """text => {
    const clipboardData = new DataTransfer();
    clipboardData.setData('text/plain', text);
    const event = new ClipboardEvent('paste', { clipboardData, bubbles: true, cancelable: true });
    if (document.getElementById('question').dispatchEvent(event)) document.execCommand('insertText', false, text);
}"""
PARAGRAPH = "The harbour is **quiet** at night, and `boats` lie at the quay until the tide turns.\n\n"


def conversation(url: str, num_turns: int, words_per_turn: int) -> str:
    """Store a conversation by import; return its id."""
    answer = PARAGRAPH * max(words_per_turn // len(PARAGRAPH.split()), 1)
    messages = [
        {"role": role, "content": f"Question {number}?" if role == "user" else answer}
        for number in range(num_turns)
        for role in ("user", "assistant")
    ]
    body = json.dumps({"title": "Long", "messages": messages}).encode()
    request = urllib.request.Request(f"{url}/api/sessions/import", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: str = json.load(reply)["id"]
        return found


def stretch(socket: WebSocketRoute) -> None:
    """Tell the page of a model that reads a million tokens, and have answers go on to 2,000: the demo model alone would end too soon."""
    server = socket.connect_to_server()

    def to_page(text: str | bytes) -> None:
        """Pass a frame on; `ready` says how much the model reads."""
        frame = json.loads(text)
        if frame["type"] == "ready":
            frame["server"]["max_model_len"] = 1_000_000
        socket.send(json.dumps(frame))

    def to_server(text: str | bytes) -> None:
        """Pass a frame on; a question asks for a long answer."""
        frame = json.loads(text)
        if frame["type"] == "message":
            frame["sampling"] = {"max_tokens": 2000, "ignore_eos": True}
        server.send(json.dumps(frame))

    server.on_message(to_page)
    socket.on_message(to_server)


class Watched:
    """A page with Chromium's own figures of it."""

    def __init__(self, browser: Browser) -> None:
        self.page: Page = browser.new_page(viewport={"width": 1200, "height": 800})
        self.devtools = self.page.context.new_cdp_session(self.page)
        self.devtools.send("Performance.enable")

    def busy_s(self) -> float:
        """Return the seconds that the main thread has worked so far."""
        found = self.devtools.send("Performance.getMetrics")["metrics"]
        return next(float(each["value"]) for each in found if each["name"] == "TaskDuration")

    def open(self, url: str) -> None:
        """Open a page and wait until its text field can send."""
        self.page.goto(url)
        self.page.wait_for_function(
            "() => document.querySelector('.picker') && !document.querySelector('.picker').disabled"
        )

    def key_ms(self) -> float:
        """Return the main thread's time for one key, the median of several bursts."""
        self.page.locator("#question").focus()
        times = []
        for _ in range(5):
            before = self.busy_s()
            for _ in range(NUM_KEYS // 5):
                self.page.keyboard.press("x")
            self.page.wait_for_timeout(50)
            times.append((self.busy_s() - before) * 1000 / (NUM_KEYS // 5))
        return statistics.median(times)


def first_load(browser: Browser, url: str) -> dict[str, float]:
    """Measure the first visit: bytes and requests, then its time on a slow network."""
    watched, sizes = Watched(browser), dict[str, float]()
    watched.devtools.send("Network.enable")
    watched.devtools.on(
        "Network.loadingFinished", lambda e: sizes.__setitem__(e["requestId"], e["encodedDataLength"])
    )
    watched.open(url)
    watched.page.wait_for_load_state("networkidle")
    watched.page.context.close()
    slow = Watched(browser)
    slow.devtools.send("Network.enable")
    slow.devtools.send("Network.emulateNetworkConditions", FAST_3G)
    began = time.perf_counter()
    slow.open(url)
    usable_ms = (time.perf_counter() - began) * 1000
    slow.page.context.close()
    return {
        "first_load_kb": sum(sizes.values()) / 1000,
        "requests": len(sizes),
        "usable_ms_fast3g": usable_ms,
    }


def long_ones(browser: Browser, url: str, seconds: float) -> dict[str, float]:
    """Measure keys and streaming beside long conversations."""
    turns = Watched(browser)
    turns.page.route_web_socket("**/ws", stretch)
    turns.open(f"{url}/#/s/{conversation(url, NUM_TURNS, 60)}")
    turns.page.locator(".turn").nth(NUM_TURNS - 1).wait_for()
    turns.page.wait_for_timeout(1000)
    key_ms = turns.key_ms()
    pasted = "A line of some words that somebody has copied.\n" * (PASTE_BYTES // 48)
    turns.page.evaluate(PASTE, pasted)
    turns.page.locator(".file", has_text="Pasted text").wait_for()
    paste_key_ms = turns.key_ms()
    turns.page.context.close()
    words = Watched(browser)
    words.page.route_web_socket("**/ws", stretch)
    words.open(f"{url}/#/s/{conversation(url, 20, NUM_WORDS // 20)}")
    words.page.locator(".turn").nth(19).wait_for()
    words.page.wait_for_timeout(1000)
    words.page.locator("#question").fill("Tell me a long story.")
    words.page.keyboard.press("Enter")
    words.page.locator('.turn[data-status="running"]').wait_for()
    before, began = words.busy_s(), time.perf_counter()
    words.page.wait_for_timeout(seconds * 1000)
    share = (words.busy_s() - before) / (time.perf_counter() - began)
    if words.page.locator('.turn[data-status="running"]').count() != 1:
        raise RuntimeError("the answer ended before it was measured")
    words.page.context.close()
    return {
        "key_ms_200_turns": key_ms,
        "paste_500kb_key_ms": paste_key_ms,
        "stream_core_share_30k_words": share,
    }


def bench(seconds: float) -> None:
    """Start the server and the browser, measure and report."""
    progress = Progress()
    greedy = 'override_generation_config={"temperature": 0}'
    flags = ("--engine-arg", greedy, "--context-overflow", "drop-oldest")
    with demo_server(*flags) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None), args=["--no-sandbox"]
        )
        progress.say("the first visit")
        found = first_load(browser, server.url)
        progress.say("long conversations")
        found |= long_ones(browser, server.url, seconds)
        browser.close()
    result: dict[str, Any] = {name: round(value, 2) for name, value in found.items()}
    report("page", figures(result, AIMS), result)


def main() -> None:
    """Run the bench from the command line."""
    args = options(__doc__, quick="an answer is watched for 3 s").parse_args()
    bench(3.0 if args.quick else 8.0)


if __name__ == "__main__":
    main()
