"""Which client makes room when something kept for clients is full: a client with few things never does so for one with many. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Shares(Generic[Name]):
    """Names of things that are kept for clients: at most `of_one` for each client, `of_all` together.

    A client at its bound gives up its own oldest thing for a new one. Where all places are taken, the client with the most things gives up its
    oldest one; among equals, the client whose oldest thing was not touched for longest.
    """

    def __init__(self, of_one: int, of_all: int) -> None:
        self._of_one, self._of_all = of_one, of_all
        self._ages = count()
        self._client_of: dict[Name, str] = {}
        # By client: when each was last touched, the oldest first.
        self._kept: dict[str, OrderedDict[Name, int]] = {}

    def __len__(self) -> int:
        return len(self._client_of)

    def num_of(self, client: str) -> int:
        """Return how many things are kept for this client."""
        return len(self._kept.get(client, ()))

    def put(self, name: Name, client: str) -> Name | None:
        """Keep something new for a client. Return the thing that lost its place, which the caller must end; None if there was room."""
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
        """Make a thing its client's newest, because it is in use. An unknown name is ignored."""
        if (client := self._client_of.get(name)) is not None:
            self._kept[client][name] = next(self._ages)
            self._kept[client].move_to_end(name)

    def drop(self, name: Name) -> None:
        """Forget a thing that is over. An unknown name is ignored."""
        if (client := self._client_of.pop(name, None)) is not None:
            del self._kept[client][name]
            if not self._kept[client]:
                del self._kept[client]
