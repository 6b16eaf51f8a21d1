"""One question under way, apart from the socket: what of the frames that come for it is news."""

from __future__ import annotations

import asyncio

import msgspec

from overture_client.chat_frames import Accepted, ChatError, Delta, Done, Event, Message, Restarted


class Question:
    """Tells news from repetitions.

    Normally `seq` tells: a frame that is not beyond the last one is a repetition. After the server lost track of the turn the
    question is sent again, and the answer comes from its beginning (`begin_replay`): then the text tells.
    """

    def __init__(self, message: Message) -> None:
        self.message = message
        self.news: asyncio.Queue[Event | ChatError] = asyncio.Queue()
        self.seq = 0
        self.is_sent = False
        self.is_accepted = False
        self.is_resuming = False
        self.is_stop_wanted = False
        self._seen: list[str] = []
        self._replay: list[str] | None = None

    def begin_replay(self) -> None:
        """Expect the answer from its first piece again."""
        self.is_resuming = False
        self.seq = 0
        self._replay = []

    def on_accepted(self, frame: Accepted) -> list[Event]:
        """The server has stored the message. Returns what the caller is told: nothing when it was told before."""
        self.is_resuming = False
        if self.is_accepted:
            return []
        self.is_accepted = True
        # A message that is sent once more belongs to the session that it was stored in.
        self.message = msgspec.structs.replace(self.message, session_id=frame.session_id)
        return [frame]

    def on_delta(self, frame: Delta) -> list[Event]:
        """A piece of the answer. Returns what the caller is told: nothing for a piece that was seen before a reconnection."""
        self.is_resuming = False
        if frame.seq <= self.seq:
            return []
        self.seq = frame.seq
        if self._replay is None:
            self._seen.append(frame.text)
            return [frame]
        self._replay.append(frame.text)
        return self._compare(is_over=False)

    def on_done(self, frame: Done) -> list[Event]:
        """The answer's end. Returns what the caller is told."""
        return [*(self._compare(is_over=True) if self._replay is not None else []), frame]

    def _compare(self, *, is_over: bool) -> list[Event]:
        """What of the replay is new, once that is clear."""
        seen, replay = "".join(self._seen), "".join(self._replay or ())
        if seen.startswith(replay) and (seen == replay or not is_over):
            return []
        self._seen, self._replay = [replay], None
        if replay.startswith(seen):
            return [Delta(self.message.id, self.seq, replay[len(seen) :])]
        return [Restarted(self.message.id), Delta(self.message.id, self.seq, replay)]
