"""Tokens that people use by day: counted as answers end, limited, and kept in the data folder."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine_bridge.protocol.node import CallFigures, Delta
from gateway.access.auth import KeyRing
from gateway.access.person_limits import in_force
from gateway.errors import GatewayError
from gateway.metrics.metrics import Metrics
from gateway.people.ledger import NAME, Day, Ledger, Spent
from gateway.sessions.connection import file_error
from gateway.settings.config import Config

log = logging.getLogger(__name__)

_T = TypeVar("_T")

DAY_S = 86_400
SAVE_EVERY_S = 1.0  # Chosen: what a kill -9 may lose of the counts.
CHARS_PER_TOKEN = 4  # Of the prompt of a call that its client left before it was counted. Source: OpenAI's rule of thumb for English.
_TEXTS = ("messages", "input", "prompt", "system", "instructions", "content", "text", "output", "arguments")


class Usage:
    """The tokens and requests that people use. `check` and `add` look at memory alone; `keep_saving` writes to the file, in a thread.

    Args:
        ledger: the file.
        keys: name the people.
        metrics: count refusals, and tokens by person where `by_user` is set.
        max_tokens_per_day: of one person, prompts and answers together; 0: no limit.
        by_user: whether /metrics tells people apart.
        clock: seconds since the epoch. Days are UTC days.
    """

    def __init__(
        self,
        ledger: Ledger,
        keys: KeyRing,
        metrics: Metrics,
        *,
        max_tokens_per_day: int = 0,
        by_user: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ledger, self._keys, self._metrics, self._clock = ledger, keys, metrics, clock
        self.max_tokens_per_day = max_tokens_per_day
        self._by_user = by_user
        # By day and person, today and the day that was counted before.
        self._days: dict[str, dict[str, Spent]] = {}
        # Not yet in the file, by owner and day.
        self._unsaved: dict[tuple[str, str], Spent] = {}
        self._learned: dict[str, tuple[str, str]] = {}
        self._saving = asyncio.Lock()
        self._has_failed = False
        self._saves: set[asyncio.Task[None]] = set()

    @staticmethod
    async def open(config: Config, keys: KeyRing, metrics: Metrics, data_dir: Path) -> Usage:
        """Make the usage of the settings, with what the data folder has of today.

        Raises StartupError for a file that cannot be opened, GatewayError for an unreadable file.
        """
        usage = Usage(
            await asyncio.to_thread(Ledger.open, data_dir / NAME),
            keys,
            metrics,
            max_tokens_per_day=config.max_tokens_per_day,
            by_user=config.metrics_by_user,
        )
        await usage.load()
        return usage

    async def load(self) -> None:
        """Take over what the file has of today. Raises GatewayError `storage_failed`."""
        day = self.day()
        days = await self._of_file(self.ledger.days, day)
        self._days = {day: {each.owner: each.spent for each in days if each.day == day}}
        self._learned = await self._of_file(self.ledger.key_owners)

    def day(self) -> str:
        """Return the present day, as 2026-11-29."""
        return time.strftime("%Y-%m-%d", time.gmtime(self._clock()))

    def since(self, num_days: int) -> str:
        """Return the first of the last `num_days` days, today among them."""
        return time.strftime("%Y-%m-%d", time.gmtime(self._clock() - (num_days - 1) * DAY_S))

    def today(self, owner: str) -> Spent:
        """Return what a person has used today."""
        return self._of_day(self.day()).get(owner, Spent())

    def _of_day(self, day: str) -> dict[str, Spent]:
        if day not in self._days:
            # Beside the day before: a clock that is put forward, and back again, must give nobody the tokens of today once more.
            self._days = dict([*self._days.items()][-1:]) | {day: {}}
        return self._days[day]

    def check(self, owner: str) -> None:
        """Refuse a person who has used all tokens of the day.

        Answers that are under way are not cut, so a person can exceed the limit by these. Raises GatewayError `quota_exceeded`.
        """
        own = self._keys.limits_of(owner).tokens_per_day
        limit = in_force(own, self.max_tokens_per_day)
        used = self.today(owner).num_tokens
        if not limit or used < limit:
            return
        wait_s = DAY_S - self._clock() % DAY_S
        who_set = "--max-tokens-per-day" if own is None else "an operator set this limit for you"
        self._metrics.refused.labels("tokens").inc()
        raise GatewayError(
            "quota_exceeded",
            f"You have used {used:,} tokens today, and {limit:,} a day are yours ({who_set}). "
            f"The next day begins at 00:00 UTC, in {int(wait_s) // 3600} h {int(wait_s) % 3600 // 60} min.",
            retry_after_s=wait_s,
        )

    def add(self, owner: str, spent: Spent) -> None:
        """Count what a request has used, if it has used anything."""
        if not spent.num_tokens:
            return
        day = self.day()
        counted = self._of_day(day)
        counted[owner] = counted.get(owner, Spent()).plus(spent)
        key = owner, day
        self._unsaved[key] = self._unsaved.get(key, Spent()).plus(spent)
        if self._by_user:
            user = self._keys.name_of(owner)
            self._metrics.tokens.labels(user, "prompt").inc(spent.prompt_tokens)
            self._metrics.tokens.labels(user, "answer").inc(spent.answer_tokens)

    def key_owners(self) -> dict[str, str]:
        """Return the owners of keys whose lines do not name theirs, by `KeyLine.mark`, as far as they are known."""
        return {mark: owner for mark, (owner, _) in (self._learned | self._keys.owners_by_line()).items()}

    async def keep_saving(self) -> None:
        """Run until cancelled: write the counts to the file."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Write the counted usage, and the owners of used keys that do not name them. A failed write is repeated the next time.

        A caller that is cancelled does not end this, because a count that is written while it is taken for unwritten would be written twice.
        """
        saving = asyncio.create_task(self._save())
        self._saves.add(saving)
        saving.add_done_callback(self._saves.discard)
        await asyncio.shield(saving)

    async def _save(self) -> None:
        async with self._saving:
            learned = self._keys.owners_by_line()
            learned = {mark: whose for mark, whose in learned.items() if self._learned.get(mark) != whose}
            if not self._unsaved and not learned:
                return
            unsaved, self._unsaved = self._unsaved, {}
            days = [Day(owner, day, spent) for (owner, day), spent in unsaved.items()]
            try:
                await asyncio.to_thread(self.ledger.add, days, learned)
            except sqlite3.Error as error:
                for key, spent in unsaved.items():
                    self._unsaved[key] = self._unsaved.get(key, Spent()).plus(spent)
                if not self._has_failed:
                    log.warning(
                        "what people used could not be stored, and is tried again each second: %s", error
                    )
                self._has_failed = True
            else:
                self._has_failed = False
                self._learned |= learned

    async def days(self, since: str, owner: str | None) -> list[Day]:
        """Return the usage since a day, of one person or (None) of all, the latest day first. Raises GatewayError `storage_failed`."""
        await self.save()
        return await self._of_file(self.ledger.days, since, owner)

    async def forget(self, owner: str) -> None:
        """Remove all that is known of a person. Raises GatewayError `storage_failed`."""
        for counted in self._days.values():
            counted.pop(owner, None)
        async with self._saving:
            self._unsaved = {key: spent for key, spent in self._unsaved.items() if key[0] != owner}
            await self._of_file(self.ledger.forget, owner)

    async def close(self) -> None:
        """Save, and close the file."""
        await self.save()
        await asyncio.to_thread(self.ledger.close)

    async def _of_file(self, work: Callable[..., _T], *args: Any) -> _T:
        try:
            return await asyncio.to_thread(work, *args)
        except sqlite3.Error as error:
            message = "What people used cannot be read now. The server's log says why."
            raise file_error("the record of what people used", error, message) from error


def spent_by_turn(final: Delta | None, question: str, num_generated: int) -> Spent:
    """Return the usage of a chat turn; if it failed before the engine counted, estimate from the question and the generated tokens. Pure."""
    if final is not None and final.usage is not None:
        return Spent(1, final.usage.prompt_tokens, final.usage.completion_tokens)
    return Spent(1, len(question) // CHARS_PER_TOKEN if num_generated else 0, num_generated)


def spent_on(
    usage: Mapping[str, Any] | None,
    figures: CallFigures | None,
    *,
    num_choices: int,
    num_events: int,
    num_prompt_chars: int,
) -> Spent:
    """Return what an API call has used. Pure.

    Args:
        usage: the call's own count, where it ended and its client asked for one.
        figures: the node's count, of the first prompt and the first answer; None for a call whose client left.
        num_choices: answers that were seen; all are taken to be as long as the first where there is no count of all.
        num_events: events with a piece of an answer that the client was sent; where there is no count, each is taken for a token.
        num_prompt_chars: what the prompt is guessed from where there is no count; 0: nothing was computed.
    """
    if usage is None and figures is None:
        return Spent(1, num_prompt_chars // CHARS_PER_TOKEN, num_events)
    prompt, answer = 0, 0
    if figures is not None:
        kv = figures.kv
        prompt = kv.device + kv.host + kv.disk + kv.recomputed + kv.peer
        answer = figures.num_answer_tokens * max(num_choices, 1)
    if usage is not None:
        prompt, answer = max(prompt, usage["prompt_tokens"]), usage["completion_tokens"]
    return Spent(1, prompt, answer)


def num_chars_of(body: Any) -> int:
    """Return the characters of all texts of a call's prompt, each token id of a prompt as CHARS_PER_TOKEN of them."""
    waiting, num_chars = [body], 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, dict):
            waiting += [value[name] for name in _TEXTS if name in value]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int):
            num_chars += CHARS_PER_TOKEN
    return num_chars
