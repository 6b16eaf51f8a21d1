"""`overture chat`: a conversation in the terminal, or one question from a script.

The socket lives in an event loop on a thread of its own, so that it stays alive while the main thread waits for the user's
line, and so that Ctrl+C in the main thread is an ordinary KeyboardInterrupt: at the prompt it clears the line, during an
answer it stops the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import UNSET
from rich.console import Console
from rich.markup import escape
from rich.status import Status as Spinner
from rich.table import Table

from overture_client.chat import ChatClient, socket_url
from overture_client.chat_frames import Accepted, ChatError, Delta, Done, Event, Restarted, Session, Turn
from overture_client.chat_http import call_api

T = TypeVar("T")

PATIENCE_S = 5.0  # chosen: a server that was just started answers by then, and a missing one is reported soon
MAX_LISTED_SESSIONS = 20
MAX_SHOWN_TURNS = 3  # of a reopened session's history
EXIT_ERROR = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

# Control characters other than tab and newline: an answer must not move the cursor or change the terminal's state.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

HELP = """\
  /adapter [NAME]   answer with this adapter from now on; "base" for the base model; alone: list them
  /new              start a new session
  /sessions [ID]    list sessions, or open one; "all" lists those of API calls as well
  /version [M V]    show version V of message M; alone: list the messages that have several
  /help             this list
  /quit             leave (or Ctrl+D)
Ctrl+C stops an answer."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `overture chat`. Raises ValueError for an invalid `url`."""

    url: str
    api_key: str | None = None
    adapter: str | None = None
    session_id: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        socket_url(self.url)

    @property
    def sampling(self) -> dict[str, Any] | None:
        """Return the sampling options that were given; None without any."""
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {name: value for name, value in given.items() if value is not None} or None


def ask_once(options: Options, question: str) -> int:
    """Ask, print the answer as it comes, and return the exit code: 0, 1 after an error, 130 after Ctrl+C."""
    console = Console(stderr=True)
    try:
        asyncio.run(_ask_once(options, question, console))
    except ChatError as error:
        console.print(f"overture chat: {error.message}", style="red", markup=False, highlight=False)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it. Python would complain once more when it flushes at exit.
        sys.stderr.close()
        return EXIT_ERROR
    return 0


async def _ask_once(options: Options, question: str, console: Console) -> None:
    with console.status("connecting…") as spinner:
        client = ChatClient(
            options.url, api_key=options.api_key, patience_s=PATIENCE_S, on_status=_spinner_text(spinner)
        )
        async with client:
            answer = client.ask(
                question,
                session_id=options.session_id,
                adapter=options.adapter or UNSET,
                sampling=options.sampling,
            )
            text = ""
            async with contextlib.aclosing(answer) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        spinner.stop()
                        text += event.text
                        _write(event.text)
                    elif isinstance(event, Restarted):
                        _write("\n[the answer begins anew]\n")
            if not text.endswith("\n"):
                _write("\n")


def _spinner_text(spinner: Spinner) -> Callable[[str, str], None]:
    texts = {
        "connecting": "connecting…",
        "reconnecting": "the connection dropped, reconnecting…",
        "connected": "thinking…",
    }

    def show(status: str, detail: str) -> None:
        """Show a change of the connection."""
        spinner.update(texts.get(status) or escape(detail))

    return show


def _write(text: str) -> None:
    sys.stdout.write(_CONTROL.sub("", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class LoopThread:
    """An event loop on its own thread; `call` runs a coroutine there and waits for its result."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat-loop", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. KeyboardInterrupt while waiting cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` without waiting for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop and wait for its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)


class Terminal:
    """The conversation: reads lines, prints answers. `run` returns the exit code."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._console = Console(highlight=False)
        self._loop = LoopThread()
        self._spinner = self._console.status("connecting…")
        self._session_id: str | None = None
        # None: the base model. UNSET: whatever the session had.
        self._adapter: Any = options.adapter or UNSET
        self._client = ChatClient(
            options.url,
            api_key=options.api_key,
            patience_s=PATIENCE_S,
            on_status=_spinner_text(self._spinner),
        )

    def run(self) -> int:
        """Talk until the user leaves, and return the exit code."""
        try:
            with self._spinner:
                self._loop.call(self._client.__aenter__())
            self._welcome()
            if self._options.session_id:
                self._open_session(self._options.session_id)
            self._read_lines()
        except ChatError as error:
            self._complain(error.message)
            return EXIT_ERROR
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            self._loop.call(self._client.close())
            self._loop.close()
        return 0

    def _read_lines(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (importing it gives input() editing and history)
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("\n[dim]Ctrl+D leaves[/dim]")
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self._on_line(line)

    def _on_line(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._on_command(*line[1:].split(maxsplit=1))
            else:
                self._ask(line)
        except ChatError as error:
            self._complain(error.message)

    # Asking.

    def _ask(self, question: str) -> None:
        turn_id = str(uuid.uuid4())
        done: Done | None = None
        column_is_zero = True
        self._spinner.update("thinking…")
        self._spinner.start()
        try:
            for event in self._events(question, turn_id):
                if isinstance(event, Accepted):
                    self._session_id = event.session_id
                elif isinstance(event, Delta) and event.text:
                    self._spinner.stop()
                    _write(event.text)
                    column_is_zero = event.text.endswith("\n")
                elif isinstance(event, Restarted):
                    self._console.print("\n[dim]the answer begins anew[/dim]")
                elif isinstance(event, Done):
                    done = event
        finally:
            self._spinner.stop()
            if not column_is_zero:
                _write("\n")
        if done is not None:
            self._session_id = done.session_id
            self._console.print(f"[dim]{escape(summary(done))}[/dim]")

    def _events(self, question: str, turn_id: str) -> Iterator[Event]:
        """Yield the events of an answer, brought over from the loop's thread. Ctrl+C stops the answer, a second one abandons it."""
        events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        answer = self._client.ask(
            question,
            session_id=self._session_id,
            adapter=self._adapter,
            sampling=self._options.sampling,
            turn_id=turn_id,
        )

        async def pump() -> None:
            """Put the answer's events, or the error that ended it, into the queue."""
            try:
                async for event in answer:
                    events.put(event)
                events.put(None)
            except BaseException as error:
                events.put(error)
                raise

        self._loop.start(pump())
        is_stopping = False
        while True:
            try:
                event = events.get()
            except KeyboardInterrupt:
                if is_stopping:
                    return
                is_stopping = True
                self._loop.start(self._client.stop(turn_id))
                continue
            if event is None:
                return
            if isinstance(event, BaseException):
                raise event
            yield event

    # Commands.

    def _on_command(self, name: str = "", argument: str = "") -> None:
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._console.print(HELP, markup=False),
            "adapter": self._choose_adapter,
            "new": lambda _: self._start_session(),
            "version": self._choose_version,
            "sessions": lambda wanted: (
                self._open_session(wanted)
                if wanted not in ("", "all")
                else self._list_sessions(wanted or "chat")
            ),
        }
        if name in commands:
            commands[name](argument.strip())
        else:
            self._complain(f"no command /{name}; /help lists them")

    def _choose_adapter(self, name: str) -> None:
        models = self._client.ready.models
        adapters = [model.id for model in models if model.adapter]
        if not name:
            self._console.print(
                "base, " + ", ".join(adapters) if adapters else "base (no adapters here)", markup=False
            )
        elif name == "base" or any(model.id == name and not model.adapter for model in models):
            self._adapter = None
        elif name in adapters:
            self._adapter = name
        else:
            self._complain(f"no adapter {name}; there are: {', '.join(adapters) or 'none'}")

    def _start_session(self) -> None:
        self._session_id = None
        self._console.print("[dim]a new session begins with your next line[/dim]")

    def _open_session(self, session_id: str) -> None:
        session = self._loop.call(self._client.open_session(session_id))
        self._session_id = session.id
        self._adapter = UNSET
        self._show_history(session)

    def _show_history(self, session: Session) -> None:
        self._console.print(f"[bold]{escape(_clean(session.title or session.id))}[/bold]")
        num_hidden = len(session.turns) - MAX_SHOWN_TURNS
        if num_hidden > 0:
            self._console.print(f"[dim]{num_hidden} earlier turns[/dim]")
        for turn in session.turns[-MAX_SHOWN_TURNS:]:
            self._console.print(f"> {_clean(turn.content)}\n{_clean(turn.answer)}", markup=False)

    def _choose_version(self, argument: str) -> None:
        if self._session_id is None:
            self._complain("there is no conversation yet; /sessions opens one")
            return
        turns = self._loop.call(self._client.open_session(self._session_id)).turns
        if not argument:
            self._list_versions(turns)
        elif (turn_id := version_of(turns, argument)) is None:
            self._complain("no such version; /version lists them")
        else:
            self._show_history(self._loop.call(self._client.choose_version(self._session_id, turn_id)))

    def _list_versions(self, turns: Sequence[Turn]) -> None:
        table = Table(box=None, header_style="dim")
        for heading in ("message", "version", "text"):
            table.add_column(heading)
        for number, turn in enumerate(turns, start=1):
            if len(turn.versions) > 1:
                shown = f"{turn.versions.index(turn.id) + 1} of {len(turn.versions)}"
                table.add_row(str(number), shown, escape(_clean(turn.content)))
        self._console.print(table if table.row_count else "[dim]no message has another version[/dim]")

    def _list_sessions(self, origin: str) -> None:
        table = Table(box=None, header_style="dim")
        table.add_column("id", no_wrap=True, min_width=32)  # whole, so that it can be copied
        for heading in ("title", "turns", "last used"):
            table.add_column(heading)
        for session in fetch_sessions(self._options, origin):
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(session.get("updated_at", 0)))
            turns = str(session.get("num_turns", ""))
            table.add_row(escape(session["id"]), escape(_clean(session.get("title") or "")), turns, used)
        self._console.print(table if table.row_count else "[dim]no sessions yet[/dim]")

    # Output.

    def _welcome(self) -> None:
        models = self._client.ready.models
        base = next((model.id for model in models if not model.adapter), "the model")
        num_adapters = sum(model.adapter for model in models)
        extra = f" with {num_adapters} adapters (/adapter)" if num_adapters else ""
        self._console.print(
            f"[bold]{escape(base)}[/bold]{extra} [dim]· /help for commands, Ctrl+D leaves[/dim]"
        )

    def _complain(self, message: str) -> None:
        self._console.print(message, style="red", markup=False)


def version_of(turns: Sequence[Turn], argument: str) -> str | None:
    """Return the id of the turn that "M V" names: version V of message M of `turns`, both counted from 1. None if there is no such version."""
    numbers = argument.split()
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        return None
    message, version = (int(number) - 1 for number in numbers)
    versions = turns[message].versions if message < len(turns) else ()
    return versions[version] if version < len(versions) else None


def summary(done: Done) -> str:
    """Return one line about an answer: "12 tokens · first after 80 ms · 45.2 tokens/s · 96 of 120 prompt tokens from cache"."""
    usage, timings = done.usage, done.timings
    parts = [f"{usage.completion_tokens} token{'' if usage.completion_tokens == 1 else 's'}"]
    if timings.ttft_ms is not None:
        parts.append(f"first after {timings.ttft_ms:.0f} ms")
    if timings.tpot_ms:
        parts.append(f"{1000 / timings.tpot_ms:.1f} tokens/s")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from cache")
    if done.finish_reason in ("length", "stopped"):
        parts.append("cut off at the limit" if done.finish_reason == "length" else "stopped")
    return " · ".join(parts)


def fetch_sessions(options: Options, origin: str = "chat") -> list[dict[str, Any]]:
    """Return the newest sessions that people began in a chat, or with origin "all" those of API calls as well, as `GET /api/sessions` does.

    Raises ChatError.
    """
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    path = f"/api/sessions?limit={MAX_LISTED_SESSIONS}&origin={origin}"
    sessions: list[dict[str, Any]] = json.loads(call_api(socket_url(options.url), path, headers))["sessions"]
    return sessions


def _clean(text: str) -> str:
    return _CONTROL.sub("", text)
