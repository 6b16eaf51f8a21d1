"""Who makes room when something that is kept for clients is full: never one who has little for one who has much. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Shares(Generic[Name]):
    """Names of things that are kept for clients: `of_one` for each client, `of_all` together.

    A client that has as many as it may gives up its own oldest one for a new one. Where all places are taken, the client that has most
    gives up its oldest one; of clients that have as many, the one whose oldest was not touched for longest.
    Raises ValueError for a bound below 1.
    """

    def __init__(self, of_one: int, of_all: int) -> None:
        if min(of_one, of_all) < 1:
            raise ValueError("a client may keep at least one")
        self._of_one, self._of_all = of_one, of_all
        self._ages = count()
        self._client_of: dict[Name, str] = {}
        # By client: when each was last touched, the oldest first.
        self._kept: dict[str, OrderedDict[Name, int]] = {}

    def __len__(self) -> int:
        return len(self._client_of)

    def num_of(self, client: str) -> int:
        """How many are kept for this client."""
        return len(self._kept.get(client, ()))

    def put(self, name: Name, client: str) -> Name | None:
        """Keep something new for a client. Returns what has lost its place for it, which the caller must end; None where there was room."""
        loser = None
        if self.num_of(client) >= self._of_one:
            loser = next(iter(self._kept[client]))
        elif len(self) >= self._of_all:
            most = max(self._kept.values(), key=lambda own: (len(own), -next(iter(own.values()))))
            loser = next(iter(most))
        if loser is not None:
            self.drop(loser)
        self._client_of[name] = client
        self._kept.setdefault(client, OrderedDict())[name] = next(self._ages)
        return loser

    def touch(self, name: Name) -> None:
        """It is in use: of its client's it is the newest now. A name that is not kept is passed over."""
        if (client := self._client_of.get(name)) is not None:
            self._kept[client][name] = next(self._ages)
            self._kept[client].move_to_end(name)

    def drop(self, name: Name) -> None:
        """It is over. A name that is not kept is passed over."""
        if (client := self._client_of.pop(name, None)) is not None:
            del self._kept[client][name]
            if not self._kept[client]:
                del self._kept[client]
