"""Sessions of calls that name none: which conversation a call continues, and when tools let it come back."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from gateway.advisories.advisories import BURST, AdvisoryRequest
from gateway.recognition.callers import (
    MAX_CHARS,
    MAX_HANDED,
    MAX_KEPT,
    MAX_OPENING_CHARS,
    Callers,
    handed_lines,
)
from gateway.recognition.conversations import MAX_OF_ONE, Conversation, Conversations
from gateway.recognition.fingerprints import MAX_IDS, PIECE_BYTES, ends_with_results, fingerprint, marks
from gateway.recognition.recognition import Recognition, SessionCall
from gateway.recognition.session_names import UNNAMED, SessionName, session_name
from gateway.recognition.tool_pauses import PUBLISHED, ToolPauses
from gateway.turns.replies import AnswerReader

from .parts import Parts, settled

SYSTEM = {"role": "system", "content": "You mend programs."}


LONG = (
    "The lock of the door has to be mended before the evening comes, and the window, too, and then the roof."
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(call_id: str, tool: str = "bash") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(call_id: str, text: str = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


class Client:
    """Calls of one key, each answered at once unless it is told otherwise."""

    def __init__(self, known: Conversations, tenant: str = "ada", name: SessionName = UNNAMED) -> None:
        self.known, self.tenant, self.name = known, tenant, name

    def begin(self, messages: list[Any], **body: Any) -> tuple[Conversation, str]:
        found = fingerprint("chat", {"model": "m", "messages": messages, **body})
        assert found is not None
        conversation, how = self.known.began(self.tenant, self.name, found)
        return conversation, how

    def ask(self, messages: list[Any], answer: dict[str, Any], **body: Any) -> tuple[Conversation, str]:
        conversation, how = self.begin(messages, **body)
        ids = {call["id"] for call in answer.get("tool_calls", ())}
        self.known.ended(conversation, marks(ids, answer.get("content") or ""), calls_tools=bool(ids))
        return conversation, how


@pytest.mark.parametrize(
    "sent_back",
    [
        {"role": "assistant", "content": " It is done.\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is done."}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "It is done."}],
        },
        {"role": "assistant", "content": "The client has shortened this."},
    ],
)
def test_an_answer_may_come_back_in_another_form(sent_back: dict[str, Any]) -> None:
    client = Client(Conversations())
    first, _ = client.ask([SYSTEM, user("mend it")], said("It is done."))
    second, how = client.ask([SYSTEM, user("mend it"), sent_back, user("thanks")], said("Welcome."))
    assert second is first and how == "continued"


@pytest.mark.parametrize(
    "at_first", [{"name": "helper"}, {"reasoning_content": "hm"}, {"reasoning": "hm", "content": ""}]
)
def test_what_is_put_to_an_answer_or_left_out_once_its_turn_is_over_makes_no_difference(
    at_first: dict[str, Any],
) -> None:
    client = Client(Conversations())
    first, _ = client.ask([SYSTEM, user("mend it")], called("a"))
    loop = [SYSTEM, user("mend it"), called("a") | at_first, result("a")]
    assert client.ask(loop, said("Mended."))[0] is first
    later = [SYSTEM, user("mend it"), called("a"), result("a"), said("Mended."), user("thanks")]
    assert client.ask(later, said("Welcome."))[0] is first
    other = [SYSTEM, user("mend it"), called("a", "rm"), result("a"), said("Mended."), user("thanks")]
    assert client.ask(other, said("Welcome."))[0] is not first, "the name of a tool is no signature"


def clock(now: int) -> dict[str, Any]:
    return {"role": "system", "content": f"You mend programs. It is 2026-11-30T11:{now:02}:00Z, turn {now}."}


def cut_short(history: list[Any]) -> list[Any]:
    return [
        each | {"content": "[cut]"} if each["role"] == "tool" else each for each in history[:-1]
    ] + history[-1:]


def middle_edited(history: list[Any]) -> list[Any]:
    return [history[0], user(f"mend it, please ({len(history)})"), *history[2:]]


def latest_only(history: list[Any]) -> list[Any]:
    return [history[0], *history[1:][-4:]]


def timed(history: list[Any]) -> list[Any]:
    return [clock(len(history)), *history[1:]]


def results_alone(history: list[Any]) -> list[Any]:
    return [each for each in history if each["role"] != "assistant" or each is history[-2]]


TRANSFORMED = [list, cut_short, middle_edited, latest_only, timed, results_alone]


@pytest.mark.parametrize(
    ("change", "call_id", "text"),
    [
        *((change, "call-{}-f3a9", "line {}") for change in TRANSFORMED),
        (
            latest_only,
            "functions.bash:{}",
            LONG + " {}",
        ),  # of a model that counts its ids, it is known by its questions
    ],
)
def test_a_loop_with_tools_is_one_session_whatever_its_client_does_to_its_history(
    change: Any, call_id: str, text: str
) -> None:
    client, history, found = Client(Conversations()), [SYSTEM, user("mend it")], []
    for turn in range(8):
        call = called(call_id.format(turn))
        found.append(client.ask(change(list(history)), call))
        history += [call, result(call_id.format(turn), text.format(turn))]
    assert len({conversation.session_id for conversation, _ in found}) == 1
    assert change is not list or [how for _, how in found] == ["new", *["continued"] * 7]


def latest_and_the_time(history: list[Any]) -> list[Any]:
    return [clock(len(history)), *history[1:][-3:]]


def summed_up(history: list[Any]) -> list[Any]:
    """As LlamaIndex's `ChatSummaryMemoryBuffer` sends it: a summary stands behind the instructions."""
    summary = {"role": "system", "content": f"So far {'one ' * len(history)}was mended."}
    return [SYSTEM, summary, *history[-3:]] if len(history) > 4 else history


@pytest.mark.parametrize(
    ("change", "question", "answer"),
    [(latest_and_the_time, LONG + " Part {}?", "Yes."), (summed_up, "Part {}?", LONG + " {}")],
)
def test_a_talk_of_which_its_client_sends_the_latest_messages_alone_is_one_session(
    change: Any, question: str, answer: str
) -> None:
    client, history, sessions = Client(Conversations()), [SYSTEM], set()
    for turn in range(8):
        history.append(user(question.format(turn)))
        sessions.add(client.ask(change(list(history)), said(answer.format(turn)))[0].session_id)
        history.append(said(answer.format(turn)))
    assert len(sessions) == 1


def test_a_talk_with_tools_whose_results_are_cut_later_is_one_session() -> None:
    client, history, sessions = Client(Conversations()), [SYSTEM], set()
    for turn in range(4):
        call = called(f"call-{turn}-f3a9")
        for asked, answer in (
            (user(f"part {turn}"), call),
            (result(f"call-{turn}-f3a9", "line"), said("Done.")),
        ):
            history.append(asked)
            sessions.add(client.ask(cut_short(history), answer)[0].session_id)
            history.append(answer)
    assert len(sessions) == 1


def test_a_question_from_which_the_client_has_taken_passing_context_is_answered_by_the_same_long_text() -> (
    None
):
    client, answer = Client(Conversations()), said("It is mended. " * 20)
    first, _ = client.ask([SYSTEM, user("<open files> mend it")], answer)
    second, how = client.ask([SYSTEM, user("mend it"), answer, user("<open files> thanks")], said("Welcome."))
    assert second is first and how == "rewritten"


def test_a_talk_whose_client_leaves_out_what_its_tools_did_is_one_session() -> None:
    """As Griptape does: of each turn it keeps the question and the last answer."""
    client, kept, sessions = Client(Conversations()), [SYSTEM], set()
    for turn in range(4):
        kept.append(user(f"part {turn}"))
        loop = list(kept)
        for step in range(2):
            call = called(f"call-{turn}{step}-f3a9")
            sessions.add(client.ask(list(loop), call)[0].session_id)
            loop += [call, result(f"call-{turn}{step}-f3a9")]
        sessions.add(client.ask(loop, said("Done."))[0].session_id)
        kept.append(said("Done."))
    assert len(sessions) == 1
    other = [SYSTEM, user("part 0"), said("Done."), user("paint it"), said("Done."), user("part 3")]
    assert client.ask(other, said("Done."))[1] == "new"


def written(call_id: str) -> dict[str, Any]:
    return said(f"Calling tools:\n[{{'id': '{call_id}', 'function': {{'name': 'bash'}}}}]")


def test_a_loop_whose_client_writes_calls_and_results_as_text_is_one_session() -> None:
    """As smolagents does, which also puts a plan of another call behind them."""
    client, history, sessions = Client(Conversations()), [SYSTEM, user("mend it")], set()
    for turn in range(6):
        call_id = f"chatcmpl-tool-{turn:016x}"
        sessions.add(client.ask(list(history), called(call_id))[0].session_id)
        history += [written(call_id), user("Observation: done")]
        assert ends_with_results({"messages": history})
        if turn % 2:
            history += [said(f"Plan {turn}"), user("Now carry it out.")]
            assert not ends_with_results({"messages": history})
    assert len(sessions) == 1


ONE_MESSAGE = [
    "## question\n{question}\n\n## trajectory\n{told}\n\nRespond with the fields `thought` and `tool`, each behind its heading.",
    "Answer as well as you can.\n\nQuestion: {question}\nThought: {told}",
    "This is a friendly talk.\n\nHuman: {question}\nAI: {told}\nAI:",
]


@pytest.mark.parametrize("form", ONE_MESSAGE)
def test_a_loop_that_is_told_in_one_message_is_one_session(form: str) -> None:
    """As DSPy's, Qwen-Agent's and LangChain's ReAct are, and conversations that are filled into a prompt's template."""
    client = Client(Conversations())
    told: dict[str, list[str]] = {"Is it shut?": [], "Is it open?": []}
    sessions: dict[str, set[str]] = {question: set() for question in told}
    for turn in range(5):
        for question, lines in told.items():
            shown = form.format(question=question, told="\n".join(lines))
            answer = f"I look whether part {turn} of it fits.\nAction: look"
            sessions[question].add(client.ask([SYSTEM, user(shown)], said(answer))[0].session_id)
            lines += [answer, "Observation: it does"]
    assert [len(each) for each in sessions.values()] == [1, 1]
    assert len(set().union(*sessions.values())) == 2


def test_questions_about_one_text_and_parts_of_one_are_conversations_of_their_own() -> None:
    client = Client(Conversations())
    sessions = {
        client.ask(
            [user(f"Read this.\n{LONG}\n{LONG}\nIs it {word}?")], said(f"No, it is not {word} at all.")
        )[0].session_id
        for word in ("red", "blue", "round")
    }
    assert len(sessions) == 3
    summed_up = user("Read this.\nNo, it is not red at all.\nNo, it is not blue at all.\nWhat is it, then?")
    assert client.ask([summed_up], said("Nothing."))[1] == "new"
    known = [client.ask([user(f"Sum up.\nPart\n{LONG}")], said("It is all mended."))[0] for _ in range(2)]
    merged, how = client.ask([user("Sum up.\nPart\nIt is all mended.\nIt is all mended.")], said("Yes."))
    assert how == "new" and merged not in known


def test_an_answer_of_few_words_joins_nothing_by_itself() -> None:
    client = Client(Conversations())
    first, _ = client.ask([SYSTEM, user("Is it red?")], said("Yes."))
    shown = [SYSTEM, user("Is it blue?"), said("Yes."), user("Is it round?")]
    other, how = client.ask(shown, said("No."))
    assert how == "new" and other is not first


def test_agents_that_hand_a_conversation_on_or_differ_in_a_number_stay_apart() -> None:
    client = Client(Conversations())
    writer, _ = client.ask([SYSTEM, user("mend it")], called("handoff-1", "transfer"))
    handed = [
        {"role": "system", "content": "You test."},
        user("mend it"),
        called("handoff-1"),
        result("handoff-1"),
    ]
    assert client.ask(handed, said("Tested."))[0] is not writer
    workers = [clock(number) for number in range(3)]
    known = [client.ask([each, user("begin")], said("Yes?"))[0] for each in workers]
    later = [
        client.ask([each, user("begin"), said("Yes?"), user("go")], said("Gone."))[0] for each in workers
    ]
    assert later == known and len({each.session_id for each in known}) == 3


def test_a_conversation_that_others_have_left_behind_is_not_joined() -> None:
    client = Client(Conversations())
    begun, _ = client.ask([SYSTEM, user("mend it")], said("Which part?"))
    longer = [SYSTEM, user("mend it"), said("All?"), user("yes"), said("Really?"), user("yes!")]
    other, how = client.ask(longer, said("Mended."))
    assert how == "new" and other is not begun


def test_two_conversations_with_the_same_last_answer_are_not_joined() -> None:
    client = Client(Conversations())
    known = [client.ask([SYSTEM, user(text), user("same?")], said("Yes."))[0] for text in "ab"]
    other, how = client.ask([SYSTEM, user("same?"), said("Yes."), user("more")], said("No."))
    assert how == "new" and other not in known
    counted = [client.ask([SYSTEM, user(text)], called("functions.bash:0"))[0] for text in "cd"]
    other, how = client.ask(
        [SYSTEM, user("e"), called("functions.bash:0"), result("functions.bash:0")], said("f")
    )
    assert how == "new" and other not in counted
    told = [called("functions.bash:0") | {"content": text} for text in ("I look.", "I see.")]
    alike = [client.ask([SYSTEM, user("f")], each)[0] for each in told]
    later = [client.ask([SYSTEM, user("f"), each, result("functions.bash:0")], said("g"))[0] for each in told]
    assert later == alike


def test_agents_whose_calls_of_tools_have_equal_ids_stay_apart() -> None:
    """All of them were asked the same, and only the arguments tell their answers apart."""
    for call_id in ("functions.bash:0", "call_1"):
        client, calls = Client(Conversations()), [called(call_id), called(call_id)]
        calls[1]["tool_calls"][0]["function"]["arguments"] = '{"path": "b"}'
        known = [client.ask([SYSTEM, user("mend it")], each)[0] for each in calls]
        shown = [[SYSTEM, user("mend it"), each, result(call_id)] for each in calls]
        later = [client.ask(each, called("functions.bash:1"))[0] for each in reversed(shown)]
        assert len({each.session_id for each in (*known, *later)}) == 4
        again = [
            client.ask([*each, called("functions.bash:1"), result("functions.bash:1")], said("Mended."))[0]
            for each in reversed(shown)
        ]
        assert again == later


@pytest.mark.parametrize("call_id", ["call_1", "functions.bash:3", "7"])
def test_few_words_after_few_words_or_after_a_counted_call_join_nothing(call_id: str) -> None:
    """As after a start of the gateway anew: the other conversation is unknown here, and this one has answered the same."""
    client = Client(Conversations())
    client.ask([SYSTEM, user("mend it"), called(call_id), result(call_id)], said("Done."))
    client.ask([SYSTEM, user("paint it"), said("Which colour?"), user("Go on.")], said("Done."))
    other = [SYSTEM, user("sell it"), called(call_id), result(call_id), said("Done."), user("Go on.")]
    assert client.ask(other, said("Done."))[1] == "new"
    third = [SYSTEM, user("buy it"), said("Which one?"), user("Go on."), said("Done."), user("Go on.")]
    assert client.ask(third, said("Done."))[1] == "new"
    canned = called(call_id) | {"content": LONG}
    client.ask([SYSTEM, user("lock it")], canned)
    assert client.ask([SYSTEM, user("open it"), canned, result(call_id)], said("Done."))[1] == "new"


def test_little_is_kept_of_a_call_that_is_large() -> None:
    client = Client(Conversations())
    ids = [f"call-{number}-{LONG}" for number in range(1000)]
    many = called("x") | {"tool_calls": [called(each)["tool_calls"][0] for each in ids]}
    kept, _ = client.ask([SYSTEM, user("mend it"), many, result(ids[0])], said("Done."))
    assert 0 < len(kept.anchors) <= MAX_IDS + 2
    assert sum(map(len, kept.before.answer)) <= 16 * MAX_IDS


def test_a_call_that_failed_may_be_tried_again_with_another_history() -> None:
    client = Client(Conversations())
    first, _ = client.ask([SYSTEM, user("mend it")], called("a"))
    history = [user("mend it"), called("a"), result("a", "long")]
    failed, _ = client.begin([SYSTEM, *history])
    client.known.ended(failed, None)
    again, _ = client.ask([SYSTEM, *history[:2], result("a", "cut")], said("Mended."))
    assert again is failed is first


def test_helpers_under_one_name_have_sessions_of_their_own() -> None:
    known = Conversations()
    main = Client(known, name=SessionName("run-7", "header"))
    parent, _ = main.ask([SYSTEM, user("mend it")], called("task-1", "Task"))
    helpers = [main.ask([clock(0), user(f"part {number}")], said("Done."))[0] for number in range(3)]
    assert len({each.session_id for each in (parent, *helpers)}) == 4, (
        "they come one after another while it waits"
    )
    named = [Client(known, name=SessionName("run-7", "header", agent)) for agent in ("h1", "h2")]
    fork = [SYSTEM, user("mend it"), called("task-1", "Task"), result("task-1", "begun")]
    forks = [each.ask([*fork, user("your part")], said("Done."))[0] for each in named]
    assert parent not in forks and forks[0] is not forks[1]
    compacted, how = named[0].ask([SYSTEM, user("So far: done.")], said("What next?"))
    assert compacted is forks[0] and how == "rewritten"
    assert main.ask([*fork[:3], result("task-1")], said("Mended."))[0] is parent
    assert set(known.named("ada", "run-7")) >= {each.session_id for each in (parent, *helpers, *forks)}


@pytest.mark.parametrize(
    ("steps", "brings"),
    [
        ([user("x"), called("a"), result("a"), user("<reminder>")], True),
        ([user("x"), called("a"), result("a"), {"role": "system", "content": "go on"}], True),
        ([user("x"), called("a"), {"role": "function", "name": "bash", "content": "done"}], True),
        ([user("x"), called("a"), result("a"), said("Done."), user("more")], False),
    ],
)
def test_results_of_tools_may_have_more_behind_them(steps: list[Any], brings: bool) -> None:
    assert ends_with_results({"messages": steps}) is brings


def test_two_clients_with_equal_first_messages_are_told_apart_by_their_answers() -> None:
    client = Client(Conversations())
    one, _ = client.ask([user("hi")], called("a"))
    two, how = client.ask([user("hi")], called("b"))
    assert how == "new" and two is not one
    assert client.ask([user("hi"), called("b"), result("b")], said("x"))[0] is two
    assert client.ask([user("hi"), called("a"), result("a")], said("y"))[0] is one


def test_equal_conversations_with_an_answer_of_neither_are_ambiguous() -> None:
    client = Client(Conversations())
    known = {client.ask([user("hi")], said(text))[0].session_id for text in ("a", "b")}
    other, how = client.ask([user("hi"), said("c"), user("more")], said("d"))
    assert how == "new" and other.session_id not in known


def test_branches_and_edits_begin_sessions_of_their_own() -> None:
    client = Client(Conversations())
    start = [SYSTEM, user("mend it"), said("Which part?")]
    first, _ = client.ask(start[:2], start[2])
    assert client.ask([*start, user("the door")], said("Mended."))[0] is first
    branch, how = client.ask([*start, user("the window")], said("Mended, too."))
    assert how == "new" and branch is not first
    edited, how = client.ask([SYSTEM, user("break it")], said("No."))
    assert how == "new" and edited is not first
    further = [*start, user("the door"), said("Mended."), user("and the lock")]
    assert client.ask(further, said("Yes."))[0] is first


def test_a_named_session_may_be_compacted_and_a_shared_cache_key_joins_nothing() -> None:
    client = Client(Conversations(), name=SessionName("run-7", "header"))
    main, _ = client.ask([SYSTEM, user("mend it")], said("Mended."))
    compacted, how = client.ask([SYSTEM, user("So far: it was mended.")], said("What next?"))
    assert compacted is main and how == "rewritten"
    begun, _ = client.begin([SYSTEM, user("So far: nothing.")])
    beside, how = client.begin([SYSTEM, user("So far: all of it.")])
    assert how == "new" and beside is not begun is main, "it is being answered"
    shared = Client(client.known, name=SessionName("our-app", "prompt_cache_key"))
    one, _ = shared.ask([SYSTEM, user("one")], said("1"))
    two, how = shared.ask([SYSTEM, user("two")], said("2"))
    assert how == "new" and one is not two
    assert shared.ask([SYSTEM, user("one"), said("1"), user("more")], said("3"))[0] is one


def test_a_call_that_failed_is_tried_again_in_its_session() -> None:
    client = Client(Conversations())
    first, _ = client.begin([user("hi")])
    beside, how = client.begin([user("hi")])
    assert how == "new" and beside is not first, "the first one is still being answered"
    client.known.ended(first, None)
    again, how = client.ask([user("hi")], said("yes?"))
    assert again is first and how == "retried"
    other, how = client.ask([user("hi")], said("yes?"))  # of another client, or once more: nobody can tell
    assert other is not first and how == "new"


def test_no_key_reaches_a_session_of_another_key() -> None:
    known = Conversations()
    name = SessionName("run-7", "header")
    ada, _ = Client(known, "ada", name).ask([user("hi")], said("yes?"))
    eve, how = Client(known, "eve", name).ask([user("hi"), said("yes?"), user("more")], said("no"))
    assert eve is not ada and how == "named"


def test_an_owner_with_many_conversations_pushes_out_its_own_alone() -> None:
    known = Conversations()
    mine, _ = Client(known, "ada").ask([user("hi")], said("yes?"))
    first, _ = Client(known, "eve").ask([user("0")], said("yes?"))
    Client(known, "eve", SessionName(first.session_id, "header")).ask([user("c")], said("d"))
    for number in range(1, MAX_OF_ONE + 10):
        Client(known, "eve").ask([user(f"{number}")], said("yes?"))
    assert len(known) == MAX_OF_ONE + 1
    assert Client(known, "ada").ask([user("hi"), said("yes?"), user("more")], said("x"))[0] is mine
    assert Client(known, "eve").ask([user("0"), said("yes?"), user("more")], said("x"))[1] == "new"


def test_plain_prompts_continue_by_their_text() -> None:
    known = Conversations()

    def ask(prompt: Any) -> tuple[Conversation, str]:
        found = fingerprint("completions", {"model": "m", "prompt": prompt})
        assert found is not None
        conversation, how = known.began("ada", UNNAMED, found)
        known.ended(conversation, marks(set(), "x"))
        return conversation, how

    text = "Observation: " * (PIECE_BYTES // 10)
    first, _ = ask(text)
    assert ask(text + " Thought: go on.") == (first, "continued")
    assert ask(text + " Thought: go back.")[1] == "new"
    ids = list(range(PIECE_BYTES // 4))
    second, how = ask(ids)
    assert how == "new" and ask([*ids, 7, 8]) == (second, "continued")


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", {}),
        ("chat", {"messages": []}),
        ("chat", {"messages": "hi"}),
        ("completions", {"prompt": "short"}),
        ("completions", {"prompt": ["two", "prompts"]}),
        ("completions", {"prompt": [2**80] * 1000}),
        ("chat", []),
    ],
)
def test_a_call_whose_conversation_cannot_be_told_has_no_fingerprint(api: Any, body: Any) -> None:
    assert fingerprint(api, body) is None


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, 1, True])
def test_a_part_of_no_kind_at_all_is_a_part_like_others(kind: Any) -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": kind, "text": "hi"}]
    assert fingerprint("chat", {"messages": [{"role": "user", "content": parts}]}) is not None


def test_what_passes_between_calls_makes_no_difference() -> None:
    plain = {"model": "m", "system": "Be brief.", "messages": [user("hi")]}
    marked = {
        "model": "m",
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
            }
        ],
    }
    one, two = fingerprint("messages", plain), fingerprint("messages", marked)
    assert one is not None and two is not None and one.prefixes == two.prefixes
    other = fingerprint("messages", plain | {"system": "Be long."})
    assert other is not None and other.prefixes != one.prefixes
    part = {"type": "input_text", "text": "hi"}
    short = fingerprint("responses", {"model": "m", "input": "hi"})
    typed = fingerprint("responses", {"model": "m", "input": [{"type": "message"} | user([part])]})
    assert short is not None and typed is not None and short.prefixes == typed.prefixes


def test_items_of_responses_are_a_conversation() -> None:
    known = Conversations()

    def ask(items: Any, call_id: str) -> Conversation:
        found = fingerprint("responses", {"model": "m", "input": items})
        assert found is not None
        conversation = known.began("ada", UNNAMED, found).conversation
        known.ended(conversation, marks({call_id}, ""), calls_tools=True)
        return conversation

    first = ask("mend it", "c1")
    items = [
        user("mend it"),
        {"type": "reasoning", "encrypted_content": "…"},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    assert ask(items, "c2") is first
    assert ends_with_results({"input": items}) and not ends_with_results({"input": "mend it"})


@pytest.mark.parametrize(
    ("headers", "body", "name"),
    [
        ({"X-Claude-Code-Session-Id": "s-1"}, {"prompt_cache_key": "k"}, SessionName("s-1", "header")),
        ({"session_id": "s-2"}, {}, SessionName("s-2", "header")),
        (
            {"X-Claude-Code-Session-Id": "s-1", "X-Claude-Code-Agent-Id": "a-1"},
            {},
            SessionName("s-1", "header", "a-1"),
        ),
        ({"session-id": "s-1", "thread-id": "s-1"}, {}, SessionName("s-1", "header")),
        ({"session-id": "s-1", "thread-id": "t-2"}, {}, SessionName("s-1", "header", "t-2")),
        ({"x-litellm-session-id": "c-1"}, {}, SessionName("c-1", "header")),
        (
            {},
            {"metadata": {"user_id": "user_0a_account__session_11112222-3333"}},
            SessionName("11112222-3333", "metadata"),
        ),
        (
            {},
            {"metadata": {"user_id": orjson.dumps({"session_id": "s-3"}).decode()}},
            SessionName("s-3", "metadata"),
        ),
        ({}, {"metadata": {"user_id": "ada"}}, UNNAMED),
        ({}, {"metadata": {"user_id": "{broken"}}, UNNAMED),
        ({}, {"agent_hint": {"session_id": "s-4"}}, SessionName("s-4", "agent_hint")),
        ({}, {"nvext": {"agent_context": {"session_id": "s-5"}}}, SessionName("s-5", "agent_hint")),
        ({}, {"prompt_cache_key": "k"}, SessionName("k", "prompt_cache_key")),
        ({}, {"prompt_cache_key": 7, "nvext": [], "metadata": "x"}, UNNAMED),
        ({"Session-Id": "x" * 500}, {}, UNNAMED),
        ({"Session-Id": "a\nb"}, {}, UNNAMED),
    ],
)
def test_names_of_sessions_stand_in_many_fields(headers: Any, body: Any, name: SessionName) -> None:
    from multidict import CIMultiDict

    assert session_name(CIMultiDict(headers), body) == name


def test_pauses_begin_with_the_published_figures_and_learn() -> None:
    pauses = ToolPauses()
    at_first = pauses.expected("ada", ["bash"])
    assert at_first.earliest_s < PUBLISHED[0][0] < at_first.latest_s <= 1.5 * PUBLISHED[1][0]
    for _ in range(100):
        pauses.note("ada", ["build"], 40.0)
        pauses.note("ada", ["read"], 0.1)
    slow, quick = pauses.expected("ada", ["build"]), pauses.expected("ada", ["read"])
    assert 20.0 <= slow.earliest_s <= 40.0 <= slow.latest_s <= 65.0
    assert quick.latest_s < 1.0
    assert pauses.expected("eve", ["build"]) == at_first


def test_who_has_been_away_for_long_is_expected_to_stay_away_longer() -> None:
    pauses = ToolPauses()
    waits = [pauses.expected("ada", ["bash"], waited_s).latest_s for waited_s in (0.0, 2.0, 20.0, 200.0, 1e6)]
    assert waits == sorted(waits) and waits[-1] >= 1e6


def test_a_client_that_names_its_session_as_another_was_called_leaks_none() -> None:
    """The names `auto-…` are shown in the list of advisories."""
    known = Conversations()
    auto, _ = Client(known).ask([user("a")], said("b"))
    named, _ = Client(known, name=SessionName(auto.session_id, "header")).ask([user("c")], said("d"))
    assert named.session_id != auto.session_id, "two conversations are one session"


def calling(**tools: str) -> AnswerReader:
    """What was read of an answer that calls these tools, by the ids of the calls."""
    reader = AnswerReader("chat")
    reader.is_complete, reader.tools = True, tools
    return reader


async def test_a_tool_pause_does_not_replace_what_the_client_said_itself(parts: Parts) -> None:
    own = parts.advisories.submit(
        "ann", AdvisoryRequest(session_id="s", expected_arrival_s=300.0, ttl_s=600.0), "rest"
    )
    await parts.node.told(0)
    tools = Recognition(parts.advisories, parts.metrics)
    tools.ended(SessionCall("ann", "s", None), calling(c1="run_tests"))
    await settled()
    assert not own.is_over and own.retracted is None


async def test_tool_pauses_take_no_places_of_a_keys_own_advisories(parts: Parts) -> None:
    tools = Recognition(parts.advisories, parts.metrics)
    for number in range(2 * BURST):
        tools.ended(SessionCall("ann", f"auto-{number}", None), calling(c1="run_tests"))
    parts.advisories.submit("ann", AdvisoryRequest(session_id="mine"), "rest")


async def test_a_session_that_is_back_before_the_node_was_told_is_not_announced_any_more(
    parts: Parts,
) -> None:
    """Or the announcement would wait for a request after that one, and count as one that did not come true."""
    tools = Recognition(parts.advisories, parts.metrics)
    question, body = {"messages": [user("go")]}, {"messages": [user("go"), called("c1"), result("c1")]}
    for is_told in (False, True):
        asked = await tools.began("ann", "chat", {}, question, None, "s", is_named=True)
        tools.ended(asked, calling(c1="bash"))
        if is_told:
            await parts.node.told(1)
        back = await tools.began("ann", "chat", {}, body, None, "s", is_named=True)
        await parts.node.told(is_told)
        await settled()
        (trail, *_) = parts.advisories.trails.of("ann")
        assert [passed.state for passed in trail.states] == ([] if is_told else ["cancelled"])
        tools.ended(back, AnswerReader("chat"))


async def test_a_session_that_stays_away_longer_is_announced_again_a_few_times(parts: Parts) -> None:
    tools = Recognition(parts.advisories, parts.metrics)
    for _ in range(500):
        tools.pauses.note("ann", {"bash"}, 0.01)
    for name, comes_back in (("s", False), ("t", True)):
        asked = await tools.began("ann", "chat", {}, {"messages": [user("go")]}, None, name, is_named=True)
        tools.ended(asked, calling(c1="bash"))
        if comes_back:
            body = {"messages": [user("go"), called("c1"), result("c1")]}
            await tools.began("ann", "chat", {}, body, None, name, is_named=True)

    def announced(session_id: str) -> int:
        return sum(trail.session_id == session_id for trail in parts.advisories.trails.of("ann"))

    async with asyncio.timeout(10):
        while announced("s") < 2:
            await asyncio.sleep(0.01)
    assert announced("t") == 1
    parts.advisories.submit("ann", AdvisoryRequest(session_id="s", ttl_s=600.0), "rest")
    before = announced("s")
    await asyncio.sleep(0.5)
    assert announced("s") == before, "the client has said more"


TASK = "Look through the log of last night.\nFind the first error, and say in which file it was."


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", {"messages": [SYSTEM, user(TASK)]}),
        ("chat", {"messages": [user(f"Task:\n{TASK}\n\nAnswer in one line.")]}),
        (
            "messages",
            {"messages": [user([{"type": "text", "text": "<note/>"}, {"type": "text", "text": TASK}])]},
        ),  # type: ignore[arg-type]
        ("responses", {"input": TASK}),
        ("responses", {"input": [{"role": "developer", "content": "Be brief."}, user(TASK)]}),
        ("chat", {"messages": [user("Current Task: Find the first error, and say in which file it was.")]}),
    ],
)
def test_a_helper_is_known_by_the_task_that_its_caller_handed_over(api: Any, body: dict[str, Any]) -> None:
    callers = Callers()
    handed = handed_lines(['{"description": "Read it", "prompt": ' + orjson.dumps(TASK).decode() + "}", "{"])
    callers.went_away("ada", "s-1", handed)
    assert callers.caller_of("ada", body) == "s-1" and not callers.caller_of("bob", body)
    answered = {"messages": [user("Hello."), said("Yes?"), user(TASK)]}
    assert not callers.caller_of("ada", answered), "its task stands at its beginning"
    callers.went_away("ada", "s-2", handed)
    callers.came_back("ada", "s-1")
    assert callers.caller_of("ada", body) == "s-2"
    callers.came_back("ada", "s-2")
    assert not callers.caller_of("ada", body)


@pytest.mark.parametrize(
    "arguments", ["", "[" * 900 + "]" * 900, '"short"', "17", '{"a": {"b": ["x", null, 1.5]}}', "{" * 100_000]
)
def test_arguments_without_a_line_of_their_own_hand_nothing_over(arguments: str) -> None:
    assert handed_lines([arguments]) == []


@pytest.mark.parametrize(("num_before", "is_found"), [(2, True), (MAX_OPENING_CHARS // MAX_CHARS, False)])
def test_of_a_long_beginning_only_the_first_lines_are_looked_through(num_before: int, is_found: bool) -> None:
    """However short they are: a body of empty lines would hold up all others for a second."""
    callers = Callers()
    callers.went_away("ada", "s-1", handed_lines([orjson.dumps(TASK).decode()]))
    parts = [{"type": "text", "text": text} for text in (*["\n" * MAX_CHARS] * num_before, TASK)]
    found = callers.caller_of("ada", {"messages": [{"role": "user", "content": parts}]})
    assert found == ("s-1" if is_found else "")


def test_of_very_many_sessions_that_wait_the_oldest_are_forgotten() -> None:
    callers = Callers()
    for number in range(MAX_KEPT // MAX_HANDED + 2):
        texts = [f"Look through the log of day {number}, part {part}." for part in range(MAX_HANDED)]
        callers.went_away("ada", f"s-{number}", handed_lines([orjson.dumps(texts).decode()]))
    found = [
        callers.caller_of("ada", {"messages": [user(f"Look through the log of day {number}, part 3.")]})
        for number in (0, 1, 2, number)
    ]
    assert found == ["", "", "s-2", f"s-{number}"]


def test_little_is_kept_of_arguments_that_are_large() -> None:
    texts = [f"{'a line that is long enough, number'} {number}" for number in range(10_000)]
    assert len(handed_lines([orjson.dumps({"all": texts}).decode()] * 3)) == MAX_HANDED


@pytest.mark.parametrize(("num_chars", "is_read_inline"), [(10, True), (100_000, False)])
async def test_a_long_history_is_read_on_a_thread_though_its_call_was_short(
    parts: Parts, num_chars: int, is_read_inline: bool
) -> None:
    """It came packed, or as a document, or was stored."""
    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    recognition = Recognition(parts.advisories, parts.metrics)
    asked = {"messages": [user("x" * num_chars)]}
    await recognition.began("ada", "chat", {"Content-Length": "50"}, asked, None, "", is_named=False)
    assert (not threads._threads) == is_read_inline


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"X-Parent-Session-Id": "main"}, {}),
        ({"X-Opencode-Parent-Session-Id": "main", "X-Opencode-Session-Id": "x"}, {}),
        ({"X-Codex-Parent-Thread-Id": "main", "Thread-Id": "x"}, {}),
        ({"X-Dynamo-Parent-Session-Id": "main"}, {}),
        ({}, {"agent_hint": {"session_id": "x", "parent_session_id": "main"}}),
        ({"X-Claude-Code-Session-Id": "main", "X-Claude-Code-Agent-Id": "helper"}, {}),
        ({"Session-Id": "main"}, {}),
    ],
)
async def test_a_helper_is_known_by_what_its_client_says_of_its_caller(
    parts: Parts, headers: Any, body: Any
) -> None:
    recognition = Recognition(parts.advisories, parts.metrics)
    tools = [{"type": "function", "function": {"name": "task", "parameters": {}}}]

    async def ask(messages: list[Any], headers: Any, **more: Any) -> SessionCall:
        asked = {"messages": messages, "tools": tools, **more}
        call = await recognition.began("ada", "chat", headers, asked, None, "", is_named=False)
        assert call is not None
        return call

    title = await ask([user("Think of a title: mend it")], {"Session-Id": "main"})
    recognition.ended(title, AnswerReader("chat"))
    main = await ask([SYSTEM, user("mend it")], {"Session-Id": "main"})
    reader = AnswerReader("chat")
    reader.feed_json(orjson.dumps({"choices": [{"message": called("c-7f"), "finish_reason": "tool_calls"}]}))
    recognition.ended(main, reader)
    helper = await ask([user("Say what is wrong with it.")], headers, **body)
    assert helper.caller == main.session_id != helper.session_id
    stranger = await ask([user("Say what is wrong with it, too.")], {"Session-Id": "other"})
    assert not stranger.caller
    shared = await ask([user("And with that.")], {}, prompt_cache_key="main")
    assert not shared.caller, "many clients may share such a key"


def test_an_answer_whose_line_stands_in_the_prompt_itself_joins_no_others() -> None:
    label = "technical support request"
    sort = f"Sort the mail into one of:\n- {label}\n{label}\nbilling and refund request\nother kind of request\n\nMail: "
    conversations = Conversations()
    for mail in ("It is slow.", "It is broken.", "It is gone."):
        found = fingerprint("chat", {"model": "m", "messages": [{"role": "user", "content": sort + mail}]})
        assert found is not None
        began = conversations.began("ann", UNNAMED, found, mail)
        assert began.how == "new"
        conversations.ended(began.conversation, marks(set(), label))


def test_the_name_of_a_function_is_no_id_of_a_call() -> None:
    said = "Rename it to call_initializationhandler."
    assert not marks(set(), said).tool_ids and marks(set(), "call_a1b2c3d4e5f6a7b8c9d0").tool_ids
    talk = [{"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
    assert not ends_with_results({"messages": talk})
