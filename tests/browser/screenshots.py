"""Pictures of the page in its main states: `python -m tests.browser.screenshots FOLDER [--url URL]`.

Without --url a gateway with the demo model is started for the occasion. The pictures are for looking at; nothing is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.browser.conftest import Chat, Line, visiting

WIDE = {"width": 1280, "height": 800}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
    "device_scale_factor": 2,
}
LOOKS = {"wide": {}, "phone": PHONE, "dark": {"color_scheme": "dark"}}
"""Options of a page, by the name that its pictures end in."""
NARROW = {"narrow": {"viewport": {"width": 320, "height": 568}}}
TOPICS = (
    "Secret word",
    "A walk along the river on Sunday",
    "Table of planets",
    "Why the lighthouse keeper never slept, and what he did instead",
    "Sums",
    "Recipe for soup",
)
ADAPTERS = (None, "shout", None, "pirate", "json", None, "poet", "robot")
TOUR = """Here is what an answer can hold: **strong** words, `code`, and a [link](https://example.org/).

## Steps

1. Open the window.
2. Wait for the first bird, which may take longer than the kettle, so bring a coat and something to read.
   - It is usually a robin.
3. Write it down.

| Tier | Kept in | Blocks | First word |
|---|---|--:|--:|
| device | GPU memory | 4,096 | 84 ms |
| host | pinned memory | 65,536 | 96 ms |
| disk | one file | 1,048,576 | 140 ms |

```python
def greet(name: str) -> str:
    \"\"\"A greeting, said twice.\"\"\"
    return f"Hello, {name}! " * 2  # once is not enough
```

> Begin before the curtain rises.
"""


def long_text(num_words: int) -> str:
    """Markdown of so many words with a heading now and then."""
    words = itertools.cycle(
        "the keeper counted every wave that came in from the quiet dark sea until it was morning".split()
    )
    parts = []
    for number in range(num_words // 75):
        paragraph = " ".join(itertools.islice(words, 75)).capitalize() + "."
        parts.append(f"## Night {number // 5 + 1}\n\n{paragraph}" if number % 5 == 0 else paragraph)
    return "\n\n".join(parts)


def session_list(num_sessions: int) -> dict:
    """A page of `GET /api/sessions` that reaches back some months."""
    now = time.time()
    sessions = [
        {
            "id": f"s{number}",
            "title": TOPICS[number % len(TOPICS)],
            "adapter": ADAPTERS[number % len(ADAPTERS)],
            "created_at": now,
            "updated_at": now - number**1.6 * 1800,
            "num_turns": 3,
            "is_pinned": number in (3, 8),
        }
        for number in range(num_sessions)
    ]
    return {"sessions": sessions, "next": None}


def search_results() -> dict:
    """A page of `GET /api/sessions?q=` with the words around what was found."""
    page = session_list(6)
    for number, session in enumerate(page["sessions"]):
        if number % 3 != 2:
            session["excerpt"] = {
                "before": "…and then the old ",
                "match": "harbour",
                "after": " of Lisbon, where the ferries leave every half an hour…",
            }
    return page


class Camera:
    """Opens pages in one browser and keeps pictures of them."""

    def __init__(self, browser: Browser, url: str, folder: Path) -> None:
        self.browser = browser
        self.url = url
        self.folder = folder

    @contextlib.contextmanager
    def chat(self, answer: str | None = None, **options: object) -> Iterator[tuple[Chat, Line]]:
        """A page; `answer` stands in for what the model says."""
        context = self.browser.new_context(**({"viewport": WIDE, "reduced_motion": "reduce"} | options))
        page = context.new_page()
        line = Line(page)
        if answer is not None:
            line.say(answer)
        yield Chat(page, self.url).open(), line
        context.close()

    def take(self, chat: Chat, name: str) -> None:
        chat.page.screenshot(path=self.folder / f"{name}.png")
        print(self.folder / f"{name}.png")


def first_screens(camera: Camera) -> None:
    for name, options in LOOKS.items():
        with camera.chat(**options) as (chat, _):
            camera.take(chat, f"first-{name}")


def conversations(camera: Camera) -> None:
    for name, options in (LOOKS | NARROW).items():
        with camera.chat(TOUR, **options) as (chat, _):
            chat.ask("Hello! What can an answer hold?")
            camera.take(chat, f"answer-{name}")
            chat.page.locator("#scroller").evaluate("node => { node.scrollTop = 0; }")
            camera.take(chat, f"answer-{name}-top")


def details(camera: Camera) -> None:
    with camera.chat() as (chat, _):
        chat.pick("pirate")
        chat.ask("Who are you?")
        chat.page.locator(".timings summary").click()
        camera.take(chat, "timings")
        chat.question.press("ArrowUp")
        camera.take(chat, "editing")
        chat.page.keyboard.press("Escape")
        chat.page.locator(".session[aria-current]").press("Delete")
        expect(chat.page.get_by_role("button", name="Undo")).to_be_visible()
        camera.take(chat, "undo")
        chat.page.get_by_role("button", name="Keyboard shortcuts").click()
        camera.take(chat, "shortcuts")


def versions(camera: Camera) -> None:
    """Another answer, an edited question, one that was stopped and one that failed, each with the arrows that lead back."""
    for name, options in (LOOKS | NARROW).items():
        with camera.chat(**options) as (chat, line):
            chat.ask("My name is Ada and I live in Lisbon.")
            chat.ask("Where do I live?")
            chat.turns.first.get_by_role("button", name="Answer again").click()
            expect(chat.turns).to_have_count(1)
            chat.wait_done()
            camera.take(chat, f"versions-{name}")
            line.sampling = {"max_tokens": 3000, "ignore_eos": True}
            chat.turns.first.get_by_role("button", name="Answer again").click()
            chat.page.get_by_role("button", name="Stop").click()
            expect(chat.turns.first).to_have_attribute("data-status", "stopped")
            chat.turns.first.get_by_role("button", name="Previous version").focus()
            camera.take(chat, f"versions-stopped-{name}")
            line.on_send = lambda frame: refuse(line, frame) if frame["type"] == "message" else frame
            chat.turns.first.get_by_role("button", name="Answer again").click()
            expect(chat.page.get_by_role("alert")).to_be_visible()
            camera.take(chat, f"versions-failed-{name}")


FORMULAS = r"""The sum of the first \(n\) numbers is $\frac{n(n+1)}{2}$, which costs $5 and not $6.

$$
\sum_{k=1}^{n} k^2 = \frac{n(n+1)(2n+1)}{6}, \qquad \int_0^\infty e^{-x^2}\,dx = \frac{\sqrt{\pi}}{2}
$$

A matrix, and what is wider than a phone:

\[ A = \begin{pmatrix} a_{11} & a_{12} \\ a_{21} & a_{22} \end{pmatrix}, \quad
\nabla \times \mathbf{E} = -\frac{\partial \mathbf{B}}{\partial t}, \quad x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \]
"""


def formulas(camera: Camera) -> None:
    for name, options in LOOKS.items():
        with camera.chat(FORMULAS, **options) as (chat, _):
            chat.ask("Show me some mathematics.")
            expect(chat.page.locator("math")).to_have_count(4)
            camera.take(chat, f"formulas-{name}")


def settings(camera: Camera) -> None:
    """The side sheet beside an answer, or over it."""
    middle = {"middle": {"viewport": {"width": 900, "height": 700}}}
    for name, options in (LOOKS | NARROW | middle).items():
        with camera.chat(TOUR, **options) as (chat, line):
            answer = line.on_frame
            line.on_frame = lambda frame, answer=answer: (
                frame | {"server": frame["server"] | {"drafts": True}}
                if frame["type"] == "ready"
                else answer(frame)
            )
            chat.page.reload()
            chat.ask("Hello! What can an answer hold?")
            chat.page.get_by_role("button", name="Settings").click()
            chat.page.get_by_label("System prompt").fill("You are a patient teacher.")
            expect(chat.page.get_by_text("Saved", exact=True)).to_be_visible()
            camera.take(chat, f"settings-{name}")


def adapter_list(num_adapters: int) -> list[dict]:
    """As many adapters as a busy server has, most of them on disk."""
    tones = ("support", "legal", "poet", "support-german-formal-with-a-long-name", "sql", "summary")
    places = ("slot", "disk", "host", "disk", "disk", "cached", "disk")
    return [
        {
            "name": f"{tones[number % len(tones)]}-{number:03}",
            "rank": (8, 16, 32, 64, 128)[number % 5],
            "place": places[number % len(places)],
            "is_pinned": number % 9 == 2,
        }
        for number in range(num_adapters)
    ]


def pickers(camera: Camera) -> None:
    for name, options in (LOOKS | NARROW).items():
        with camera.chat(**options) as (chat, _):
            chat.pick("pirate")
            chat.ask("Who are you?")
            chat.picker.click()
            expect(chat.model("pirate")).to_contain_text("ready")
            camera.take(chat, f"models-{name}")
        with camera.chat(**options) as (chat, _):
            chat.offer(adapter_list(240))
            chat.picker.click()
            expect(chat.models).to_have_count(241)
            camera.take(chat, f"models-many-{name}")
            chat.filter.press_sequentially("poet 2")
            camera.take(chat, f"models-filtered-{name}")
            chat.filter.fill("nobody")
            camera.take(chat, f"models-none-{name}")


WIDE_ANSWER = """A short line before it.

| Tier | Kept in | Blocks | First word after a pause | How it comes back to the device | What it costs | Who may use it |
|---|---|--:|--:|---|---|---|
| device | GPU memory | 4,096 | 84 ms | it is there already | nothing | the conversations that run |
| host | pinned memory | 65,536 | 96 ms | copied over PCI Express, layer by layer | a copy | all that were used today |

```python
def first_word_ms(tokens: int, tokens_per_s: float, copied_bytes: int, bytes_per_s: float) -> float:  # whichever takes longer
    return 1000 * max(tokens / tokens_per_s, copied_bytes / bytes_per_s)
```

And a short line after it.
"""


def wide_answers(camera: Camera) -> None:
    wider = {"wider": {"viewport": {"width": 1680, "height": 900}}}
    for name, options in (LOOKS | wider).items():
        with camera.chat(WIDE_ANSWER, **options) as (chat, _):
            chat.ask("Compare the tiers.")
            camera.take(chat, f"wide-answer-{name}")


def long_answer(camera: Camera) -> None:
    with camera.chat(long_text(3000)) as (chat, _):
        chat.ask("Tell me a long story.")
        camera.take(chat, "long-answer")


def many_sessions(camera: Camera) -> None:
    for name, options in LOOKS.items():
        with camera.chat(**options) as (chat, _):
            chat.page.route("**/api/sessions?*", lambda route: route.fulfill(json=session_list(200)))
            chat.page.route("**/api/sessions?*q=*", lambda route: route.fulfill(json=search_results()))
            chat.page.reload()
            expect(chat.page.locator(".session-row")).to_have_count(200)
            if name == "phone":
                chat.page.get_by_role("button", name="Conversations").click()
                expect(chat.page.get_by_role("searchbox")).to_be_visible()
            camera.take(chat, f"sessions-{name}")
            chat.page.get_by_role("searchbox").fill("harbour")
            expect(chat.page.locator(".day").first).to_have_text("Results")
            camera.take(chat, f"found-{name}")


def in_trouble(camera: Camera) -> None:
    for name, options in LOOKS.items():
        with camera.chat(**options) as (chat, line):
            chat.ask("Hello!")
            line.refuse = True
            line.drop()
            expect(chat.banner).to_contain_text("Next try in")
            camera.take(chat, f"lost-server-{name}")
    with camera.chat() as (chat, line):
        line.on_send = lambda frame: refuse(line, frame) if frame["type"] == "message" else frame
        chat.send("Hello!")
        expect(chat.page.get_by_role("alert")).to_be_visible()
        camera.take(chat, "failed-turn")


def engine_room(camera: Camera) -> None:
    """After some chats, beside an answer that is under way."""
    for name, options in LOOKS.items():
        with camera.chat(**options) as (chat, line):
            chat.ask("Hello!")
            chat.question.press_sequentially("And then?")
            line.sampling = {"max_tokens": 3000, "ignore_eos": True}
            chat.question.press("Enter")
            room = chat.page.context.new_page()
            room.goto(f"{camera.url}/engine")
            expect(room.locator("#advisories table")).to_be_visible()
            room.wait_for_timeout(5000)  # for something to see in the lines
            camera.take(Chat(room, camera.url), f"engine-{name}")


def refuse(line: Line, frame: dict) -> None:
    text = "The server has more to do than it can take. Try again in a moment."
    line.fail("overloaded", text, turn=frame["id"])


SCENES = (
    *(first_screens, conversations, details, settings, formulas, versions, pickers),
    *(long_answer, wide_answers, many_sessions, in_trouble, engine_room),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", help="a gateway that runs already")
    parser.add_argument("--only", help="the name of one scene")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with visiting(arguments.url) as (browser, url):
        camera = Camera(browser, url, arguments.folder)
        for scene in SCENES:
            if arguments.only in (None, scene.__name__):
                scene(camera)


if __name__ == "__main__":
    main()
