"""One question under way, apart from the socket: which of the frames that come for it are new."""

from __future__ import annotations

import asyncio

import msgspec

from overture_client.chat_frames import Accepted, ChatError, Delta, Done, Event, Message, Restarted


class Question:
    """Tells new frames from repetitions.

    Normally `seq` tells: a frame that is not beyond the last one is a repetition. After the server lost track of the turn the question is sent
    again, and the answer comes from its beginning (`begin_replay`): then the text tells.
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
        """Note that the server has stored the message. Return the events for the caller: none if it was told before."""
        self.is_resuming = False
        if self.is_accepted:
            return []
        self.is_accepted = True
        # A message that is sent once more belongs to the session that it was stored in.
        self.message = msgspec.structs.replace(self.message, session_id=frame.session_id)
        return [frame]

    def on_delta(self, frame: Delta) -> list[Event]:
        """Take a piece of the answer. Return the events for the caller: none for a piece that was seen before a reconnection."""
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
        """Take the answer's end. Return the events for the caller."""
        return [*(self._compare(is_over=True) if self._replay is not None else []), frame]

    def _compare(self, *, is_over: bool) -> list[Event]:
        """Return the new part of the replay, once that is clear."""
        seen, replay = "".join(self._seen), "".join(self._replay or ())
        if seen.startswith(replay) and (seen == replay or not is_over):
            return []
        self._seen, self._replay = [replay], None
        if replay.startswith(seen):
            return [Delta(self.message.id, self.seq, replay[len(seen) :])]
        return [Restarted(self.message.id), Delta(self.message.id, self.seq, replay)]
