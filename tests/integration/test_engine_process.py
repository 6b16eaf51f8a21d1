"""The engine in a process of its own: when it crashes, conversations go on; when the gateway goes, it goes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest

from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Delta
from tests.integration.test_process import (
    LONG,
    QUESTION,
    SECRET,
    ask,
    kv_is_written,
    output_until,
    serving,
)
from tests.ports import free_port


def engine_of(gateway_pid: int) -> psutil.Process:
    """The child that the engine runs in."""
    children = psutil.Process(gateway_pid).children(recursive=True)
    return next(child for child in children if "gateway.nodes.engine_process" in child.cmdline())


async def until_ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(180):
        while True:
            async with http.get("/readyz") as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_a_crash_in_native_code_costs_a_retry_and_no_conversation(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serving(port, tmp_path, "--engine", "process") as gateway:
        await output_until(gateway, b"ready")
        async with ChatClient(url) as client, aiohttp.ClientSession(url) as http:
            answer, done = await ask(client, SECRET)
            undisturbed, _ = await ask(client, QUESTION, done.session_id)
            _, again = await ask(client, SECRET)
            await kv_is_written(http)
            dead = engine_of(gateway.pid)
            assert os.getsid(dead.pid) == os.getsid(gateway.pid), "processor time is shared by session"
            assert os.getpgid(dead.pid) == dead.pid, "Ctrl-C is the gateway's"
            error = await crash_within_an_answer(client, done.session_id, dead.pid)
            assert (error.code, error.retryable) == ("engine_failed", True)
            with pytest.raises(ChatError) as refused:
                await ask(client, "Are you there?", done.session_id)
            assert refused.value.retryable, "the socket is still open, and says what to do"

            await until_ready(http)
            assert engine_of(gateway.pid).pid != dead.pid
            text, finished = await ask(client, QUESTION, again.session_id)
            assert text == undisturbed
            kv = finished.timings.kv
            assert kv.disk + kv.host + kv.device >= 32, f"KV came back from disk: {kv}"
            async with http.get("/metrics") as reply:
                assert "vllm:generation_tokens_total" in await reply.text(), (
                    "the child's figures are shown, too"
                )
            async with http.get(f"/api/sessions/{done.session_id}") as reply:
                turns = (await reply.json())["turns"]
            assert turns[0]["answer"] == answer, "nothing that was acknowledged is lost"
        orphan = engine_of(gateway.pid)
        gateway.kill()
        await gateway.wait()
        await asyncio.to_thread(psutil.wait_procs, [orphan], timeout=30)
        assert not orphan.is_running(), "nothing outlives a gateway that was killed"


async def crash_within_an_answer(client: ChatClient, session_id: str, pid: int) -> ChatError:
    """What a client hears of an answer when the engine crashes in its middle, and at most a few seconds later."""
    num_accepted = 0
    with pytest.raises(ChatError) as failed:
        async with asyncio.timeout(60):
            async for event in client.ask("Tell me a long story.", session_id=session_id, sampling=LONG):
                num_accepted += isinstance(event, Accepted)
                if isinstance(event, Delta):
                    os.kill(pid, signal.SIGSEGV)
    assert num_accepted == 1
    return failed.value
