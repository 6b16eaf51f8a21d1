"""The Python client and `overture chat` choose among the versions of a message, from the gateway itself."""

import asyncio

import pytest

from overture_client import terminal
from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError

from .front import Gateway


async def edited(gateway: Gateway) -> str:
    """The id of a conversation of two messages, whose first was edited: the second followed what it was before."""
    turn = await gateway.answered("a", "Well.", content="Where is Dalvek?", owner="local")
    for name, content, after in (("b", "And Fezin?", "a"), ("c", "Where is Quorin?", None)):
        fields = {"owner": "local", "session_id": turn.session_id, "after": after}
        await gateway.answered(name, "Well.", content=content, **fields)
    return turn.session_id


async def test_what_cannot_be_chosen_is_said(gateway: Gateway) -> None:
    async with ChatClient(gateway.server.url) as client:
        session_id = await edited(gateway)
        with pytest.raises(ChatError, match="turn") as missing:
            await client.choose_version(session_id, "never asked")
        assert missing.value.code == "not_found" and not missing.value.retryable
        await gateway.ask("d", owner="local", session_id=session_id)
        with pytest.raises(ChatError) as busy:
            await client.choose_version(session_id, "a")
        assert busy.value.code == "busy"


async def test_the_terminal_lists_versions_and_shows_another(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ChatClient(gateway.server.url) as client:
        session_id = await edited(gateway)
        gateway.node.script = ["Well."]
        lines = iter(["/version", "/version 1 1", "/version 2 1", "/version 1 3", "And then?"])

        def typed(prompt: str) -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", typed)
        options = terminal.Options(gateway.server.url, session_id=session_id)
        assert await asyncio.to_thread(terminal.Terminal(options).run) == 0
        shown = [turn.content for turn in (await client.open_session(session_id)).turns]
        assert shown == ["Where is Dalvek?", "And Fezin?", "And then?"]
    output = capsys.readouterr().out
    assert "2 of 2" in output and "Where is Quorin?" in output, "the message that has versions"
    assert output.count("no such version") == 1, "the second message of what is shown then has one version"
