"""The page's protocol state machine alone: frames in, frames and events out. No gateway, no socket, no clock."""

from __future__ import annotations

import json

import pytest

# Said once on each connection, as soon as it is ready.
WATCH_LIST = {"type": "watch_list"}
PRELUDE = """
const { ChatCore, backoffMs } = await import('/js/protocol.js');
const ready = (session = null) => ({ type: 'ready', protocol: 1, session, models: [], server: {} });
const stored = (id, status, answer = '') => ({ id, content: `ask ${id}`, answer, status, adapter: null });
const session = (...turns) => ({ id: 's', title: 'T', adapter: null, updated_at: 1, turns });
const core = new ChatCore();
const sent = () => core.drain().frames;
const shown = () => core.sessions.get('s').turns.map((turn) => [turn.id, turn.status, turn.answer]);
const ask = (id, more = {}) => core.ask({ id, sessionId: 's', content: `ask ${id}`, adapter: null, ...more });
const accepted = (id) => core.receive({ type: 'accepted', id, session_id: 's', title: 'T' });
const delta = (id, seq, text, more = {}) => core.receive({ type: 'delta', id, seq, text, ...more });
const done = (id, seq, finish_reason = 'stop') => core.receive({
  type: 'done', id, session_id: 's', seq, finish_reason, usage: null, timings: null, title: 'T' });
const error = (code, id, retryable = true) => core.receive({ type: 'error', code, id, message: code, retryable });
const greet = (...turns) => {
  core.connecting(); core.opened();
  const hello = sent();
  core.receive(ready(session(...turns)));
  return hello;
};
const begin = (...turns) => { core.open('s'); greet(...turns); core.drain(); };
const again = (...turns) => { core.closed(1006, 0); return greet(...turns); };
const lost = () => { core.closed(1006, 0); core.connecting(); };
const frame = (id, more = {}) => ({ type: 'message', id, session_id: 's', content: `ask ${id}`, adapter: null, ...more });
"""


@pytest.fixture(scope="module")
def core(bare_page):
    """A function that runs JavaScript with PRELUDE's names in scope and returns its value."""
    return lambda script: bare_page.evaluate(f"async () => {{ {PRELUDE} {script} }}")


CASES = {
    "repeated and late pieces change nothing": (
        """begin(); ask('a'); accepted('a'); delta('a', 2, 'one '); delta('a', 2, 'one '); delta('a', 1, 'x');
        delta('a', 3, 'two'); done('a', 3); delta('a', 4, 'late'); done('a', 3, 'stopped'); return shown();""",
        [["a", "done", "one two"]],
    ),
    "reasoning grows beside the answer and is forgotten when it is asked again": (
        """begin(); ask('a'); accepted('a'); delta('a', 1, '', { reasoning: 'Let me ' });
        delta('a', 3, 'Four.', { reasoning: 'see.' }); const turn = core.turns.get('a'); const before = [turn.reasoning, turn.answer];
        error('internal', 'a'); core.retry('a', null); return [before, turn.reasoning];""",
        [["Let me see.", "Four."], ""],
    ),
    "frames of unknown turns are ignored": (
        "begin(); accepted('x'); delta('x', 1, 'x'); done('x', 1); error('internal', 'x'); return shown();",
        [],
    ),
    "unknown frame types are ignored": (
        "begin(); core.receive({ type: 'pong' }); core.receive({ type: 'future' }); return core.phase;",
        "ready",
    ),
    "a turn that ended while the socket was down is not doubled": (
        """begin(); ask('a'); accepted('a'); delta('a', 1, 'one '); again(stored('a', 'done', 'one two'));
        delta('a', 2, 'two'); done('a', 2); return shown();""",
        [["a", "done", "one two"]],
    ),
    "a message that kills every socket is given up": (
        "begin(); ask('a'); for (let i = 0; i < 9; i += 1) again(); return shown();",
        [["a", "failed", ""]],
    ),
    "a refused edit brings the old turns back": (
        """begin(stored('a', 'done', 'A'), stored('b', 'done', 'B')); ask('d', { after: 'a' }); error('overloaded', 'd');
        const refused = shown(); core.discard('d'); return [refused, shown()];""",
        [
            [["a", "done", "A"], ["b", "done", "B"], ["d", "failed", ""]],
            [["a", "done", "A"], ["b", "done", "B"]],
        ],
    ),
    "an answer that cannot go on is what the server has of it, refused or broken off": (
        """begin({ ...stored('a', 'done', 'one'), finish_reason: 'length' }); const seen = [];
        for (const fail of [() => {}, () => { accepted('a'); delta('a', 5, 'one two'); }]) {
          core.goOn('a'); fail(); core.drain(); error('overloaded', 'a');
          const { events, frames } = core.drain(); seen.push(events.map(({ type }) => type), frames);
          core.reread('s'); core.receive(ready(session({ ...stored('a', 'done', 'one'), finish_reason: 'length' })));
          seen.push(shown(), core.canGoOn(core.turns.get('a')));
        }
        return seen;""",
        [["unsent", "problem", "stale"], [], [["a", "done", "one"]], True] * 2,
    ),
    "a stop while the socket is down is sent later": (
        """begin(); ask('a'); accepted('a'); core.closed(1006, 0); core.drain(); core.stop('a'); core.connecting(); core.opened();
        core.receive(ready(session(stored('a', 'running')))); return sent().filter((frame) => frame.type === 'stop');""",
        [{"type": "stop", "id": "a"}],
    ),
    "a wrong key locks and does not reconnect": (
        "core.connecting(); core.opened(); error('unauthorized', undefined, false); core.closed(4401, 0); return core.phase;",
        "locked",
    ),
    "the session chosen while connecting is the one opened": (
        """core.open('other'); core.connecting(); core.opened(); core.open('s'); core.drain();
        core.receive(ready({ ...session(), id: 'other' })); return sent();""",
        [WATCH_LIST, {"type": "hello", "session_id": "s"}],
    ),
    "a turn that was refused is no place to go back to": (
        """begin(stored('a', 'done', 'A')); ask('b'); error('overloaded', 'b'); ask('c'); accepted('c'); done('c', 0);
        return core.turnBefore(core.turns.get('c')).id;""",
        "a",
    ),
    "advisories that are off end the typing frames": (
        """begin(); core.typing('s', null); const first = sent(); core.receive({ type: 'advisory', session_id: 's', state: 'off' });
        core.typing('s', null); return [first.length, sent().length];""",
        [1, 0],
    ),
    "days are named": (
        """const { dayLabel } = await import('/js/format.js'); const now = new Date(2026, 2, 10, 0, 30).getTime(); const day = 86400000;
        return [0, 40 * 60000, day, 5 * day, 20 * day, 60 * day].map((age) => dayLabel(now - age, now));""",
        ["Today", "Yesterday", "Yesterday", "This week", "This month", "January 2026"],
    ),
    "sentences are spoken whole": (
        """const { sentenceEnd, speakable } = await import('/js/announcer.js'); const text = 'It costs 3.50 now. Is it? Yes';
        return [text.slice(0, sentenceEnd(text, 0)), sentenceEnd('No end', 0), speakable('- **a** [b](http://c)\\n|x|y|')];""",
        ["It costs 3.50 now. Is it?", 0, "a b x y"],
    ),
    "marks are left out where they are marks": (
        """const { speakable } = await import('/js/announcer.js');
        return ['**Set** `max_tokens`, _not_ ~~top_k~~.', '5*3 is 3 * 5, ~15', '(*forte* \u2013 __Ma\u00df__)'].map(speakable);""",
        ["Set max_tokens, not top_k.", "5*3 is 3 * 5, ~15", "(forte \u2013 Ma\u00df)"],
    ),
    "a session is warm until its advisory ends": (
        """begin(); const seen = [];
        for (const state of ['staging', 'warm', 'hit']) {
          core.receive({ type: 'advisory', session_id: 's', state });
          seen.push(core.warm.has('s'));
        }
        return [seen, core.advisoriesOff];""",
        [[False, True, False], False],
    ),
    "a drop resumes after the last piece": (
        """begin(); ask('a'); accepted('a'); delta('a', 4, 'one '); core.drain();
        const hello = again(stored('a', 'running')); delta('a', 6, 'two'); done('a', 6); return [hello, sent(), shown()];""",
        [
            [{"type": "hello", "session_id": "s", "resume": [{"id": "a", "seq": 4}]}],
            [WATCH_LIST],
            [["a", "done", "one two"]],
        ],
    ),
    "a message over the hard limit is not sent again": (
        """begin(); ask('a'); core.drain(); core.closed(1009, 0); core.connecting(); core.opened();
        core.receive(ready(session())); return [sent().filter((frame) => frame.type === 'message'), shown()];""",
        [[], [["a", "failed", ""]]],
    ),
    "a turn that cannot be resumed is read from history": (
        """begin(); ask('a'); accepted('a'); delta('a', 1, 'one '); again(stored('a', 'running')); core.drain();
        error('not_found', 'a'); const { events } = core.drain(); core.load(session(stored('a', 'done', 'one two')));
        return [events.map((event) => event.type), shown()];""",
        [["stale"], [["a", "done", "one two"]]],
    ),
    "a turn that runs elsewhere is followed once": (
        """core.open('s'); core.connecting(); core.opened(); core.drain();
        core.receive(ready(session(stored('a', 'running')))); const first = sent();
        core.receive(ready(session(stored('a', 'running')))); const second = sent();
        delta('a', 5, 'all'); done('a', 5); return [first, second, shown()];""",
        [
            [{"type": "hello", "session_id": "s", "resume": [{"id": "a", "seq": 0}]}, WATCH_LIST],
            [],
            [["a", "done", "all"]],
        ],
    ),
    # Not while an answer is written, nor while a message that was refused waits to be sent again or dismissed.
    "versions are those that the server names and no other is shown meanwhile": (
        """begin({ ...stored('a', 'done', 'A'), versions: ['a', 'b'] });
        const can = () => core.canSwitch('s'); const before = can(); ask('c', { after: null }); const asked = can();
        core.receive({ type: 'accepted', id: 'c', session_id: 's', title: 'T', versions: ['a', 'b', 'c'] });
        const versions = core.turns.get('c').versions; done('c', 1); const over = can(); ask('d'); error('overloaded', 'd');
        const refused = can(); core.discard('d'); return [versions, [before, asked, over, refused, can()]];""",
        [["a", "b", "c"], [True, False, True, False, True]],
    ),
    "a stop before accepted is sent after it": (
        """begin(); ask('a'); core.drain(); core.stop('a'); const early = sent(); accepted('a'); return [early, sent()];""",
        [[], [{"type": "stop", "id": "a"}]],
    ),
    "a session that fell behind is read once there is a connection": (
        """begin(); core.open(null); core.closed(1006, 0); core.reread('s'); const none = sent(); core.connecting(); core.opened();
        core.drain();
        core.receive(ready()); const frames = sent(); core.receive(ready(session(stored('a', 'done', 'A')))); core.opened(); core.drain();
        core.receive(ready()); return [none, frames, sent()];""",
        [[], [WATCH_LIST, {"type": "hello", "session_id": "s"}], [WATCH_LIST]],
    ),
    "an unacknowledged message is sent again and not resumed": (
        """begin(); ask('a'); core.drain(); const [hello] = again();
        return ['resume' in hello, sent().map((frame) => [frame.type, frame.id])];""",
        [False, [["watch_list", None], ["message", "a"]]],
    ),
    "a server that died leaves a failed turn to retry under its id": (
        """begin(); ask('a'); accepted('a'); delta('a', 1, 'one '); again(stored('a', 'failed'));
        const before = shown(); error('not_found', 'a'); core.drain(); core.retry('a', null);
        return [before, sent().map((frame) => [frame.type, frame.id, 'after' in frame])];""",
        [[["a", "failed", ""]], [["message", "a", False]]],
    ),
    "an edit replaces what follows when it is accepted": (
        """begin(stored('a', 'done', 'A'), stored('b', 'done', 'B'), stored('c', 'done', 'C'));
        ask('d', { after: 'a' }); const [{ after }] = sent(); accepted('d'); delta('d', 1, 'D'); done('d', 1); return [after, shown()];""",
        ["a", [["a", "done", "A"], ["d", "done", "D"]]],
    ),
    "an edit of the first message keeps nothing": (
        "begin(stored('a', 'done', 'A')); ask('d', { after: null }); return [sent()[0].after, shown()];",
        [None, [["d", "sending", ""]]],
    ),
    # Only where it is not the one that is shown already, and only a session that this page has.
    "a version that was chosen on another page makes the session be read again": (
        """begin(stored('a', 'done', 'A')); const stale = (session_id, turn_id) => {
        core.receive({ type: 'shown', session_id, turn_id }); return core.drain().events.map((event) => event.type); };
        return [stale('s', 'a'), stale('s', 'b'), stale('other', 'b')];""",
        [[], ["stale"], []],
    ),
    "a starting engine is greeted again with the same resume": (
        """begin(); ask('a'); accepted('a'); delta('a', 3, 'x'); core.closed(1006, 0); core.connecting(); core.opened();
        error('starting'); core.drain(); const { phase } = core; core.opened(); return [phase, sent()[0].resume];""",
        ["starting", [{"id": "a", "seq": 3}]],
    ),
    "a session that is gone is left": (
        """core.open('s'); core.connecting(); core.opened(); core.drain(); error('not_found', undefined, false);
        return [core.current, sent()];""",
        [None, [{"type": "hello"}]],
    ),
    # What the page is told to keep, at each step: a message as it was sent, with the error if it was refused, or that it can forget it.
    "what was not acknowledged is kept until it is": (
        """begin(); const seen = []; const note = () => core.drain().events.filter(({ type }) => type === 'unsent')
          .forEach(({ turn }) => seen.push([turn.id, turn.request && turn.request.content, turn.error && turn.error.code]));
        ask('a'); note(); accepted('a'); note(); delta('a', 1, 'x'); done('a', 1); note(); ask('b'); note(); error('overloaded', 'b');
        note();
        core.retry('b', null); note(); error('busy', 'b'); note(); core.discard('b'); note();
        ask('c'); note(); core.forget('s'); note(); return seen;""",
        [
            ["a", "ask a", None],
            ["a", None, None],
            ["a", None, None],
            ["b", "ask b", None],
            ["b", "ask b", "overloaded"],
            ["b", "ask b", None],
            ["b", "ask b", "busy"],
            ["b", None, "busy"],
            ["c", "ask c", None],
            ["c", None, None],
        ],
    ),
    "an edit that stalls is sent again in its place": (
        """begin(stored('a', 'done', 'A'), stored('b', 'done', 'B')); ask('c', { after: 'a' }); core.drain(); lost(); core.opened(); core.drain();
        core.receive(ready(session(stored('a', 'done', 'A'), stored('b', 'done', 'B')))); const frames = sent(); accepted('c'); done('c', 0);
        return [frames.filter(({ type }) => type === 'message').map(({ id, after }) => [id, after]), shown()];""",
        [[["c", "a"]], [["a", "done", "A"], ["c", "done", ""]]],
    ),
    # While a connection is made, until a hello and a message are answered, and until an answer is over; not while nothing is under way.
    "an answer of the server is waited for at each stage": (
        """const seen = []; const note = () => seen.push(core.isWaiting); core.open('s'); core.connecting(); note(); core.opened(); note();
        core.receive(ready(session())); note(); core.open('t'); note(); core.receive(ready({ ...session(), id: 't' })); note();
        ask('a'); note(); accepted('a'); note(); delta('a', 1, 'x'); note(); core.stop('a'); note(); done('a', 1, 'stopped'); note();
        core.closed(1006, 0); note(); return seen;""",
        [*(True, True, False, True, False), *(True, True, True, True, False), False],
    ),
    "a hello that is refused is told of its own conversation": (
        """begin(); core.open('t'); core.open('u'); core.drain(); error('rate_limited'); error('not_found', undefined, false);
        const { events } = core.drain(); const told = events.filter(({ type }) => type !== 'phase');
        return [told.map(({ type, sessionId }) => [type, sessionId]), core.current];""",
        [[["problem", "t"], ["current", None], ["gone", "u"]], None],
    ),
    "a conversation that is gone is left only where it is shown": (
        "begin(); core.open('t'); core.open('s'); error('not_found', undefined, false); return core.current;",
        "s",
    ),
    "what an earlier visit left elsewhere is sent and found there": (
        """core.keep([frame('a'), frame('b', { error: { code: 'busy', message: 'x', retryable: true } })]); core.connecting(); core.opened();
        core.drain(); core.receive(ready()); const frames = sent(); accepted('a'); core.open('s'); core.drain();
        core.receive(ready(session(stored('0', 'done', 'O'), stored('a', 'running')))); delta('a', 1, 'A'); done('a', 1);
        return [frames.map(({ type, id }) => [type, id ?? null]), shown()];""",
        [
            [["watch_list", None], ["message", "a"]],
            [["0", "done", "O"], ["a", "done", "A"], ["b", "failed", ""]],
        ],
    ),
    "a message without a conversation is given back": (
        """core.keep([frame('a')]); core.connecting(); core.opened(); core.receive(ready()); core.drain();
        error('not_found', 'a', false); return core.drain().events.map(({ type, turn }) => [type, turn.content, turn.request]);""",
        [["unsent", "ask a", None], ["homeless", "ask a", None]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_of_some_steps(core, case: str) -> None:
    script, expected = CASES[case]
    assert core(script) == expected


@pytest.mark.parametrize("code", ["storage_failed", "overloaded", "bad_request"])
def test_a_session_that_cannot_be_read_keeps_nobody_out(core, code: str) -> None:
    """Whoever opens the page at its address can use all else, and try it again."""
    found = core(f"""core.open('s'); core.connecting(); core.opened(); core.drain();
        error('{code}'); const first = sent(); core.receive(ready()); const frames = sent(); const {{ phase }} = core; error('{code}');
        const problems = core.drain().events.filter(({{ type }}) => type === 'problem').map(({{ sessionId }}) => sessionId);
        core.open('s'); return [first, frames, phase, problems, sent()];""")
    opens = {"type": "hello", "session_id": "s"}
    assert found == [[{"type": "hello"}], [WATCH_LIST, opens], "ready", ["s"], [opens]]


def test_waiting_grows_and_a_full_server_is_left_alone_longer(core) -> None:
    waits = core("return [1, 2, 3, 20].map((attempt) => backoffMs(attempt, 1006));")
    assert waits == sorted(waits) and waits[0] < 1000 and waits[-1] <= 60_000
    assert core("return backoffMs(1, 4429);") > waits[0]


@pytest.mark.parametrize(
    ("adapter", "num_prompt_tokens", "timings", "expected"),
    [
        (
            None,
            1984,
            {"ttft_ms": 84.2, "tpot_ms": 24.4, "kv": {"device": 1920}},
            "first word 84 ms · 41 tok/s",
        ),
        (
            "poet",
            64,
            {"ttft_ms": 1234, "tpot_ms": None, "kv": {"host": 16, "disk": 32}},
            "poet · first word 1.2 s",
        ),
        (None, 9, {"ttft_ms": 5.04, "tpot_ms": 250, "kv": {"device": 0}}, "first word 5.0 ms · 4.0 tok/s"),
    ],
)
def test_the_grey_line(
    core, adapter: str | None, num_prompt_tokens: int, timings: dict, expected: str
) -> None:
    done = {"adapter": adapter, "usage": {"prompt_tokens": num_prompt_tokens}, "timings": timings}
    assert core(f"return (await import('/js/format.js')).summary({json.dumps(done)});") == expected


# ---------------------------------------------------------------------------------- a server or a line that stands still


@pytest.mark.parametrize("stage", ["sent", "accepted", "streaming", "written", "stopping"])
@pytest.mark.parametrize("phase", ["offline", "still ready"])
def test_a_new_connection_takes_up_what_was_under_way_whatever_the_page_thought_of_the_old_one(
    core, stage: str, phase: str
) -> None:
    """Also where a socket was replaced without a word of its end."""
    steps = {
        "sent": "",
        "accepted": "accepted('a');",
        "streaming": "accepted('a'); delta('a', 1, 'one ');",
        "written": "accepted('a'); delta('a', 2, 'one two');",
        "stopping": "accepted('a'); delta('a', 1, 'one '); core.stop('a');",
    }
    hello, frames, turns = core(
        f"""begin(); ask('a'); {steps[stage]} core.drain(); {"lost();" if phase == "offline" else ""} core.opened(); const [hello] = sent();
        core.receive(ready(session(stored('a', 'running')))); const frames = sent(); accepted('a'); delta('a', 2, 'two'); done('a', 2, 'stop');
        return [hello, frames, shown()];"""
    )
    seqs = {"accepted": 0, "streaming": 1, "written": 2, "stopping": 1}
    resumed = [{"id": "a", "seq": seqs[stage]}] if stage in seqs else None
    assert hello.get("resume") == resumed
    again = {"sent": [("message", "a")], "stopping": [("stop", "a")]}.get(stage, [])
    assert [(each["type"], each.get("id")) for each in frames if each["type"] != "watch_list"] == again
    texts = {"sent": "two", "accepted": "two", "written": "one two"}
    assert turns == [["a", "done", texts.get(stage, "one two")]]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("", ["a", "sending", ""]),
        ("stored('a', 'running')", ["a", "sending", ""]),
        ("stored('a', 'failed')", ["a", "failed", ""]),
    ],
)
def test_what_an_earlier_visit_left_is_sent_again(core, stored: str, expected: list) -> None:
    """Whether or not the server had it; one that failed there is tried again by hand."""
    frames, turns, after = core(
        f"""core.keep([frame('a')]); core.open('s'); greet({stored}); const frames = sent(); const turns = shown();
        accepted('a'); delta('a', 1, 'A'); done('a', 1); return [frames, turns, shown()];"""
    )
    again = [each["content"] for each in frames if each["type"] == "message"]
    assert again == ([] if "failed" in stored else ["ask a"])
    assert turns == [expected]
    assert after == ([["a", "failed", ""]] if "failed" in stored else [["a", "done", "A"]])


def pulse(core, steps: str) -> list:
    """What a pulse says was due: the times in seconds, and what."""
    return core(f"""const {{ Pulse }} = await import('/js/pulse.js'); const pulse = new Pulse(); const seen = [];
        const facts = {{ isOpen: true, isWaiting: true, attempt: 0 }}; let now = 0;
        const until = (end, more = {{}}) => {{ for (;;) {{ const due = pulse.look(now, {{ ...facts, ...more }});
            if (due.act) {{ seen.push([now / 1000, due.act]); if (due.act === 'ask') {{ pulse.asked(now); continue; }} pulse.left(); return; }}
            if (due.silentSince !== null && seen.at(-1)?.[1] !== 'silent') seen.push([now / 1000, 'silent', due.silentSince / 1000]);
            if (due.lookAt > end) {{ now = end; return; }} now = due.lookAt; }} }};
        {steps} return seen;""")


PULSES = {
    "a server that does not answer is asked after three seconds, said after five and left after thirteen": (
        "pulse.heard(0); until(60000);",
        [[3, "ask"], [5, "silent", 0], [13, "leave"]],
    ),
    # Every three seconds while something is waited for, else every twenty-five.
    "a server that answers is asked now and then and never left": (
        """for (let at = 0; at < 12000; at += 3000) { pulse.heard(at); until(at + 3000); }
        pulse.heard(12000); until(37000, { isWaiting: false });""",
        [[3, "ask"], [6, "ask"], [9, "ask"], [12, "ask"], [37, "ask"]],
    ),
    "silence counts from when something was waited for": (
        "pulse.heard(0); until(20000, { isWaiting: false }); until(26000);",
        [[23, "ask"], [25, "silent", 20]],
    ),
    # Connections that brought nothing are given more and more time: a large frame on a slow line comes late.
    "silence outlasts connections and ends with a word": (
        """pulse.heard(0); until(60000); until(now + 2000, { isOpen: false }); pulse.heard(now); seen.push('a word');
        until(60000, { attempt: 2 });""",
        [
            *([3, "ask"], [5, "silent", 0], [13, "leave"], [13, "silent", 0]),
            *("a word", [18, "ask"], [20, "silent", 15], [58, "leave"]),
        ],
    ),
}


@pytest.mark.parametrize("case", PULSES)
def test_when_a_silent_server_is_asked_spoken_of_and_left(core, case: str) -> None:
    steps, expected = PULSES[case]
    assert pulse(core, steps) == expected


def test_a_page_of_the_list_does_not_undo_what_happened_since_it_was_asked_for(core) -> None:
    """A conversation that is new or renamed stays so, what was deleted stays away, and the page adds what only it knows."""
    shown = core("""const { SessionIndex } = await import('/js/sessions.js'); const index = new SessionIndex();
        const listed = (id, more = {}) => ({ id, title: `old ${id}`, adapter: null, updated_at: 1, num_turns: 1, is_pinned: true, ...more });
        index.addPage({ sessions: [listed('kept'), listed('gone'), listed('named'), listed('left')], next: null }, true, 0);
        const askedAt = index.numChanges; index.remove('gone'); index.upsert({ id: 'named', title: 'new name' });
        index.upsert({ id: 'new', title: 'new', updated_at: 2 });
        const sessions = [listed('kept'), listed('gone'), listed('named'), listed('empty', { title: null, num_turns: 0 })];
        index.addPage({ sessions, next: null }, true, askedAt);
        return index.sorted().map(({ id, title, is_pinned }) => [id, title, Boolean(is_pinned)]);""")
    assert sorted(shown) == [["kept", "old kept", True], ["named", "new name", True], ["new", "new", False]]
