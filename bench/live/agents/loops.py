"""Loops with tools over unmodified SDKs, as their guides have them: the client keeps the conversation and sends all of it with each call.

None names a session: what tells the calls of one loop from those of another is in their messages alone. The arm `named` sends a header with each.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import openai

from bench.live.agents.judging import ToldCall
from bench.live.agents.programs import LiveProgram, ToolStep

FOUND_SESSION_HEADER, MODEL = "X-Overture-Session", "overture-demo"
TOOL = "read_file"
ABOUT = "Reads a file of the program."
# Short, so that the demo model writes no long names.
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
MAX_TOKENS = 64


class ToolLoop(ABC):
    """One conversation of one SDK.

    Args:
        told: takes the observations of each call.
        is_named: whether calls name their session by a header.
    """

    def __init__(
        self,
        url: str,
        program: LiveProgram,
        told: list[ToldCall],
        *,
        is_named: bool,
        thread: str = "",
        after: str = "",
    ) -> None:
        self.url, self.program, self.told, self.is_named = url, program, told, is_named
        self.thread, self.after = thread or program.name, after
        self.history: list[Any] = []
        self._number, self._session = 0, ""
        self._client = self._connected({"X-Session-Id": self.thread} if is_named else {})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.close()

    def beside(self, name: str, after: str = "") -> Self:
        """Return another conversation of the same program, without this one's history."""
        thread = f"{self.thread}/{name}"
        return type(self)(
            self.url, self.program, self.told, is_named=self.is_named, thread=thread, after=after
        )

    def _connected(self, headers: Mapping[str, str]) -> Any:
        """Return the SDK's client, which lets the heads of its replies be looked at. As it stands: OpenAI's."""
        http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [self._note_session]})
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            default_headers=headers,
            http_client=http,
        )

    def tell(self, text: str) -> None:
        """Add a message of the user."""
        self.history.append({"role": "user", "content": text})

    @abstractmethod
    def answer(self, call_ids: list[str], result: str) -> None:
        """Add what the tools brought."""

    @abstractmethod
    async def _ask(self, began_s: float, *, must_call: bool) -> tuple[list[str], float, int, int]:
        """Ask and add the answer. Returns the ids of its calls of tools, the TTFT, and the prompt's tokens, all and cached."""

    async def ask(self, *, must_call: bool = True) -> list[str]:
        """Ask, note what came, and return the ids of the answer's calls of tools."""
        began_s = time.perf_counter()
        call_ids, ttft_s, num_prompt, num_cached = await self._ask(began_s, must_call=must_call)
        self.told.append(
            ToldCall(
                thread=self.thread,
                after=self.after,
                number=self._number,
                began_s=began_s,
                session=self._session,
                ttft_s=ttft_s,
                num_prompt=num_prompt,
                num_cached=num_cached,
            )
        )
        self._number += 1
        return call_ids

    async def _note_session(self, response: Any) -> None:
        self._session = response.headers.get(FOUND_SESSION_HEADER, "")


class ChatLoop(ToolLoop):
    """OpenAI's SDK over chat completions."""

    def answer(self, call_ids: list[str], result: str) -> None:
        """Add what the tools brought."""
        self.history += [{"role": "tool", "tool_call_id": each, "content": result} for each in call_ids]

    async def _ask(self, began_s: float, *, must_call: bool) -> tuple[list[str], float, int, int]:
        tool: Any = {
            "type": "function",
            "function": {"name": TOOL, "description": ABOUT, "parameters": SCHEMA},
        }
        ttft_s = 0.0
        async with self._client.chat.completions.stream(
            model=MODEL,
            messages=[{"role": "system", "content": self.program.system}, *self.history],
            tools=[tool],
            tool_choice="required" if must_call else "auto",
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream_options={"include_usage": True},
        ) as stream:
            async for event in stream:
                if event.type == "chunk" and event.chunk.choices:
                    delta = event.chunk.choices[0].delta
                    if delta.content or delta.tool_calls:
                        ttft_s = ttft_s or time.perf_counter() - began_s
            done = (
                stream.current_completion_snapshot
            )  # the final one would refuse an answer that its length has ended
        message = done.choices[0].message
        self.history.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        details = done.usage.prompt_tokens_details
        num_cached = (details.cached_tokens or 0) if details else 0
        return [each.id for each in message.tool_calls or ()], ttft_s, done.usage.prompt_tokens, num_cached


class ResponsesLoop(ToolLoop):
    """OpenAI's SDK over responses, whose client keeps the items."""

    def answer(self, call_ids: list[str], result: str) -> None:
        """Add what the tools brought."""
        self.history += [
            {"type": "function_call_output", "call_id": each, "output": result} for each in call_ids
        ]

    async def _ask(self, began_s: float, *, must_call: bool) -> tuple[list[str], float, int, int]:
        tool: Any = {"type": "function", "name": TOOL, "description": ABOUT, "parameters": SCHEMA}
        ttft_s = 0.0
        async with self._client.responses.stream(
            model=MODEL,
            instructions=self.program.system,
            input=self.history,
            tools=[tool],
            tool_choice="required" if must_call else "auto",
            temperature=0,
            max_output_tokens=MAX_TOKENS,
        ) as stream:
            async for event in stream:
                if event.type.endswith(".delta"):
                    ttft_s = ttft_s or time.perf_counter() - began_s
                if event.type in ("response.completed", "response.incomplete"):
                    done = event.response
        self.history += [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in done.output
        ]
        call_ids = [item.call_id for item in done.output if item.type == "function_call"]
        return call_ids, ttft_s, done.usage.input_tokens, done.usage.input_tokens_details.cached_tokens


class MessagesLoop(ToolLoop):
    """Anthropic's SDK."""

    def _connected(self, headers: Mapping[str, str]) -> Any:
        import anthropic  # which is slow to import

        http = anthropic.DefaultAsyncHttpxClient(event_hooks={"response": [self._note_session]})
        return anthropic.AsyncAnthropic(
            base_url=self.url, api_key="none", max_retries=0, default_headers=headers, http_client=http
        )

    def answer(self, call_ids: list[str], result: str) -> None:
        """Add what the tools brought."""
        results = [{"type": "tool_result", "tool_use_id": each, "content": result} for each in call_ids]
        self.history.append({"role": "user", "content": results})

    async def _ask(self, began_s: float, *, must_call: bool) -> tuple[list[str], float, int, int]:
        ttft_s = 0.0
        async with self._client.messages.stream(
            model=MODEL,
            system=self.program.system,
            messages=self.history,
            tools=[{"name": TOOL, "description": ABOUT, "input_schema": SCHEMA}],
            tool_choice={"type": "any" if must_call else "auto"},
            max_tokens=MAX_TOKENS,
            extra_body={"temperature": 0},  # the SDK has no parameter of this name any more
        ) as stream:
            async for event in stream:
                if event.type == "content_block_delta":
                    ttft_s = ttft_s or time.perf_counter() - began_s
            done = await stream.get_final_message()
        content = [part.model_dump(exclude_none=True) for part in done.content]
        self.history.append({"role": "assistant", "content": content})
        usage = done.usage
        num_cached = usage.cache_read_input_tokens or 0
        num_prompt = usage.input_tokens + num_cached + (usage.cache_creation_input_tokens or 0)
        return [part.id for part in done.content if part.type == "tool_use"], ttft_s, num_prompt, num_cached


LOOPS: dict[str, type[ToolLoop]] = {"chat": ChatLoop, "responses": ResponsesLoop, "messages": MessagesLoop}


async def play(loop: ToolLoop) -> None:
    """Play a program to its end."""
    program = loop.program
    async with loop:
        loop.tell(program.first)
        for number, step in enumerate(program.steps):
            call_ids = await loop.ask()
            is_middle = number == program.middle
            if is_middle and program.event == "helper":
                await _help(loop, program.aside[0])
            else:
                await asyncio.sleep(step.pause_s)
            loop.answer(call_ids, step.result)
            if is_middle and program.event == "branches":
                branches = (_branch(loop, str(place), text) for place, text in enumerate(program.aside))
                await asyncio.gather(*branches)
                return
            if is_middle and program.event == "compacts":
                loop.thread, loop.after, loop._number = f"{loop.thread}/compacted", loop.thread, 0
                loop.history.clear()
                loop.tell(f"So far: {program.aside[0]}")
        await loop.ask(must_call=False)


async def _help(loop: ToolLoop, task: str) -> None:
    """Have a helper work under the same system prompt."""
    async with loop.beside("helper") as helper:
        await _work(helper, task, loop.program.steps[:2])


async def _branch(loop: ToolLoop, name: str, task: str) -> None:
    """Go on from a conversation with another task."""
    async with loop.beside(name, after=loop.thread) as branch:
        branch.history = [*loop.history]
        await _work(branch, task, loop.program.steps[loop.program.middle + 1 :])


async def _work(loop: ToolLoop, task: str, steps: Sequence[ToolStep]) -> None:
    loop.tell(task)
    for step in steps:
        call_ids = await loop.ask()
        await asyncio.sleep(step.pause_s)
        loop.answer(call_ids, step.result)
    await loop.ask(must_call=False)
