"""A chat goes on with the ids that the engine saw and made, whatever happens to its turns."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

import pytest

from engine_bridge.calls.continuity import INCOMPLETE
from engine_bridge.protocol.node import pack_token_ids, unpack_token_ids
from gateway.app import Server
from gateway.sessions.token_ids import token_ids_up_to
from gateway.sessions.tree import tip
from overture_client.chat import ChatClient, ChatError
from overture_client.chat_frames import Delta, Done

from .conftest import Seen, SharedNode, told
from .facts import CHAT, MODEL, Http, events

GREEDY = {"temperature": 0, "max_tokens": 20}
# With a seed of its own, so that what other tests sampled before makes no difference.
FREE = {"temperature": 1.0, "max_tokens": 16, "seed": 11}
LONG = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
BLOCK_SIZE = 32


class Conversation:
    """One session of the chat socket, with the server behind it."""

    def __init__(self, chat: ChatClient, server: Server) -> None:
        self._chat = chat
        self._server = server
        self.session_id: str | None = None
        self.turn_ids: list[str] = []

    async def ask(self, content: str, *, stop_early: bool = False, **options: Any) -> Done:
        turn_id = options.pop("turn_id", None) or uuid.uuid4().hex
        self.turn_ids.append(turn_id)
        options.setdefault("sampling", GREEDY)
        async for event in self._chat.ask(content, session_id=self.session_id, turn_id=turn_id, **options):
            if isinstance(event, Delta) and stop_early:
                await self._chat.stop(turn_id)
            elif isinstance(event, Done):
                done = event
        self.session_id = done.session_id
        return done

    async def stored(self) -> list[int]:
        """All ids that the session has on disk."""

        def read(conn: Any) -> bytes:
            row = conn.execute("SELECT row FROM sessions WHERE id = ?", (self.session_id,)).fetchone()[0]
            return token_ids_up_to(conn, tip(conn, row))

        return list(unpack_token_ids(await self._server.services.store._reader.transact(read)))

    async def turns(self) -> Any:
        return (await self._server.services.store.get_session("local", str(self.session_id))).turns

    async def rendered(self, node: SharedNode) -> str:
        """The text of the last turn's prompt, from the stored turns and the model's own template."""
        turns, messages = await self.turns(), []
        for turn in turns:
            messages.append({"role": "user", "content": turn.content})
            if turn.answer and turn is not turns[-1]:
                messages.append({"role": "assistant", "content": turn.answer})
        return without_trailing_spaces(
            tokenizer_of(node).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )

    def count(self, origin: str) -> float:
        """How many prompts were made so, as the metric says."""
        metrics = self._server.services.metrics
        return metrics.registry.get_sample_value("overture_turn_prompts_total", {"origin": origin}) or 0


def without_trailing_spaces(text: str) -> str:
    """The template drops the space at the end of a cut answer; the ids keep it, as the model saw it."""
    return re.sub(r"\s+<\|end\|>", "<|end|>", text)


def tokenizer_of(node: SharedNode) -> Any:
    return node._client.renderer.get_tokenizer()


@pytest.fixture
def conversation(chat: ChatClient, server: Server) -> Conversation:
    return Conversation(chat, server)


async def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(
    conversation: Conversation, seen: Seen, node: SharedNode
) -> None:
    """Cut by its limit, then by its reader: the tokens are those of one answer, nothing before them is computed again, and it is one turn."""
    whole = await conversation.ask("Tell me about the harbour.", sampling=LONG)
    (told_whole,) = await conversation.turns()
    ids = list(seen.generated.values())[-1]
    conversation.session_id = None
    await conversation.ask("Tell me about the harbour.", sampling=LONG | {"max_tokens": 60})
    turn_id = conversation.turn_ids[-1]
    for max_tokens in (50, 40):
        again = {"turn_id": turn_id, "continues": True, "sampling": LONG | {"max_tokens": max_tokens}}
        done = await conversation.ask("Tell me about the harbour.", **again)
    assert done.usage is not None and whole.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (whole.usage.prompt_tokens, 150)
    (turn,) = await conversation.turns()
    assert (turn.answer, turn.status) == (told_whole.answer, "done")
    assert seen.last == seen.prompts[-1] + ids[110:] and seen.prompts[-1][-110:] == ids[:110]
    assert done.usage.cached_tokens >= (len(seen.prompts[-1]) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("ids", [[5] * 20, [10_000_000] * 20])
async def test_an_answer_of_another_model_goes_on_from_its_text(
    conversation: Conversation, seen: Seen, server: Server, node: SharedNode, ids: list[int]
) -> None:
    """Sessions outlive a change of the model: the ids that they have are then other words, or none of the vocabulary."""
    turn_id = conversation.session_id = uuid.uuid4().hex
    end = {"answer": "It is old", "finish_reason": "length", "token_ids": pack_token_ids(ids)}
    record = server.services.store.record_turn
    await record("local", turn_id, turn_id, "And the harbour?", makes_session=True, now=0.0, **end)
    await conversation.ask("And the harbour?", turn_id=turn_id, continues=True)
    text = tokenizer_of(node).decode(seen.prompts[-1])
    assert "And the harbour?" in text and text.endswith("It is old")


async def test_a_chat_is_as_long_as_the_tokens_that_the_model_reads(
    conversation: Conversation, seen: Seen, server: Server, node: SharedNode
) -> None:
    """Half a context of bytes that are no characters: written as U+FFFD, their text takes one and a half contexts in its usual encoding."""
    tokenizer, record = tokenizer_of(node), server.services.store.record_turn
    byte = next(each for each in range(len(tokenizer)) if tokenizer.decode([each]) == INCOMPLETE)
    answer = [byte] * (node.max_model_len // 2)
    asked = tokenizer.encode("<|user|>Hm?<|end|><|assistant|>")
    ids = [*asked, *answer, *tokenizer.encode("<|end|>")]
    turn_id = conversation.session_id = uuid.uuid4().hex
    end = {"answer": tokenizer.decode(answer), "finish_reason": "stop", "token_ids": pack_token_ids(ids)}
    await record("local", turn_id, turn_id, "Hm?", makes_session=True, now=0.0, **end)
    done = await conversation.ask("And now?")
    assert seen.prompts[-1][: len(ids)] == ids and done.usage is not None
    assert done.usage.prompt_tokens == len(seen.prompts[-1]) < node.max_model_len
    with pytest.raises(ChatError, match="longer than the"):
        await conversation.ask("word " * node.max_model_len)


async def test_a_chat_goes_on_with_what_was_seen(
    conversation: Conversation, seen: Seen, node: SharedNode
) -> None:
    """Free sampling, two adapters and a stop: each prompt begins with all ids before it, says what the template says, and hits."""
    steps: list[dict[str, Any]] = [
        {"sampling": FREE},
        {"sampling": FREE},
        {"sampling": FREE, "adapter": "pirate"},
        {"sampling": FREE, "adapter": None},
        {"sampling": LONG, "stop_early": True},
        {"sampling": FREE},
        {"sampling": FREE | {"max_tokens": 3}},
        {"sampling": FREE},
    ]
    before: list[int] = []
    for number, options in enumerate(steps):
        done = await conversation.ask(f"Question {number}: how are you?", **options)
        prompt, stored = seen.prompts[-1], await conversation.stored()
        assert prompt[: len(before)] == before, "the ids of the turn before, all of them"
        asked = tokenizer_of(node).decode(prompt, skip_special_tokens=False)
        assert without_trailing_spaces(asked) == await conversation.rendered(node)
        assert stored == seen.last[: len(stored)] and len(stored) >= len(prompt)
        assert options.get("stop_early") or stored == seen.last
        if before and "adapter" not in options:
            # The last id that was sampled never went through the model.
            assert done.usage.cached_tokens == (len(before) - 1) // BLOCK_SIZE * BLOCK_SIZE
        before = stored
    assert (conversation.count("first"), conversation.count("kept")) == (1, len(steps) - 1)


async def test_another_answer_goes_on_from_the_turn_before(conversation: Conversation, seen: Seen) -> None:
    await conversation.ask("Hello there!")
    first = await conversation.stored()
    await conversation.ask("What can you do?")
    prompt = seen.prompts[-1]
    again = await conversation.ask("What can you do?", sampling=FREE, after=conversation.turn_ids[0])
    assert seen.prompts[-1] == prompt
    assert again.usage.cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert await conversation.stored() == seen.last
    await conversation.ask("Tell me more about it.", after=conversation.turn_ids[0])
    assert seen.prompts[-1][: len(first)] == first
    await conversation.ask("Something else, please.", after=None)
    assert await conversation.stored() == seen.last, "nothing of the conversation that was edited away"
    assert conversation.count("first") == 2


async def test_a_stop_string_is_cut_off_the_ids(
    conversation: Conversation, seen: Seen, node: SharedNode
) -> None:
    """It is in what the engine made and not in the answer: ids are kept up to it, and the metric says so."""
    tokenizer = tokenizer_of(node)
    await conversation.ask("Hello, how are you?")
    text = tokenizer.decode(list(seen.generated.values())[-1], skip_special_tokens=True)
    word = text.split()[2]
    await conversation.ask("Hello, how are you?", after=None, sampling=GREEDY | {"stop": f" {word}"})
    stopped = await conversation.stored()
    assert word in tokenizer.decode(stopped[len(seen.prompts[-1]) :])
    await conversation.ask("Go on, please.")
    prompt = seen.prompts[-1]
    asked = tokenizer.decode(prompt, skip_special_tokens=False)
    assert without_trailing_spaces(asked) == await conversation.rendered(node)
    assert conversation.count("cut") == 1 and prompt[: len(stopped) - 5] == stopped[:-5]


async def test_an_api_turn_does_no_harm(
    conversation: Conversation, server: Server, seen: Seen, node: SharedNode
) -> None:
    """Its text is part of the next prompt, its ids are not known: those before it are kept."""
    await conversation.ask("Hello there!")
    before = await conversation.stored()
    await server.services.store.record_turn(
        "local", str(conversation.session_id), "api", "From the API.", answer="Fine.", now=0
    )
    await conversation.ask("What was that?")
    assert seen.prompts[-1][: len(before)] == before
    text = tokenizer_of(node).decode(seen.prompts[-1], skip_special_tokens=False)
    assert "From the API." in text and text == await conversation.rendered(node)


class ApiConversation:
    """One session of an API, whose client sends the whole conversation each time, or the last response's id."""

    def __init__(self, http: Http, server: Server, api: str, *, stream: bool) -> None:
        self._http, self._server, self._api, self._stream = http, server, api, stream
        self._messages: list[dict[str, str]] = []
        self._previous: str | None = None
        self.session_id = f"{api}-{stream}"

    def _body(self, content: str) -> dict[str, Any]:
        self._messages.append({"role": "user", "content": content})
        # Without the unlikely tokens, because a special token within an answer is not in its text, so that its ids go no further. Messages know no
        # seed: what other tests sampled before would choose their words, which may be none at all.
        temperature = 0.0 if self._api == "messages" else 1.0
        sampling = {"temperature": temperature, "top_p": 0.9, "seed": 11}
        sampling |= {"model": MODEL, "stream": self._stream}
        if self._api == "responses":
            named = {"previous_response_id": self._previous, "metadata": {"session_id": self.session_id}}
            return sampling | named | {"input": content, "max_output_tokens": 16}
        more = {"stream_options": {"include_usage": True}} if self._stream and self._api == "chat" else {}
        return sampling | more | {"messages": self._messages, "max_tokens": 16}

    async def ask(self, content: str) -> int:
        """How many tokens of its prompt were cached."""
        path = {"chat": "chat/completions"}.get(self._api, self._api)
        headers = {"X-Session-Id": self.session_id} if self._api != "responses" else {}
        async with self._http.post(f"/v1/{path}", json=self._body(content), headers=headers) as response:
            assert response.status == 200 and response.headers["X-Session-Id"] == self.session_id
            body = await response.read()
        assert b"token ids" not in body, "what only the gateway is to see"
        turn = (await self._server.services.store.get_session("local", self.session_id)).turns[-1]
        assert turn.answer and turn.usage is not None
        self._messages.append({"role": "assistant", "content": turn.answer})
        if self._api == "responses":
            self._previous = (
                events(body.decode())[0]["response"]["id"] if self._stream else json.loads(body)["id"]
            )
        return int(turn.usage["cached_tokens"])

    async def stored(self) -> list[int]:
        return list(unpack_token_ids(await self._server.services.store.token_ids("local", self.session_id)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_an_api_session_goes_on_with_what_the_engine_saw(
    http: Http, server: Server, node: SharedNode, api: str, stream: bool
) -> None:
    """A follow-up's cached tokens cover the whole conversation before it, with the ids of the answers as they were sampled."""
    conversation = ApiConversation(http, server, api, stream=stream)
    before: list[int] = []
    for number in range(4):
        # In words of its own, so that nothing of it is cached for another conversation.
        num_cached = await conversation.ask(
            f"{api} {stream}, question {number}: how are you, and what did you do all day long?"
        )
        stored = await conversation.stored()
        assert stored[: len(before)] == before
        if before:
            # The last id that was sampled never went through the model.
            assert num_cached == (len(before) - 1) // BLOCK_SIZE * BLOCK_SIZE
        before = stored
    text = tokenizer_of(node).decode(before, skip_special_tokens=False)
    assert all(f"question {number}" in text for number in range(4)) and len(before) > 4 * BLOCK_SIZE


async def test_the_page_goes_on_from_an_api_call(conversation: Conversation, http: Http, seen: Seen) -> None:
    await conversation.ask("Hello there!", sampling=FREE)
    answer = (await conversation.turns())[-1].answer
    said = (("user", "Hello there!"), ("assistant", answer), ("user", "And now over REST?"))
    messages = [{"role": role, "content": content} for role, content in said]
    headers = {"X-Session-Id": str(conversation.session_id)}
    await told(http.post(CHAT, json=FREE | {"model": MODEL, "messages": messages}, headers=headers))
    before = await conversation.stored()
    await conversation.ask("And here again?", sampling=FREE)
    assert seen.prompts[-1][: len(before)] == before
    assert conversation.count("kept") == 1
