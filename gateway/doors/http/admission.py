"""Which connections stay and which are closed: pure decisions about addresses, numbers and times.

`gateway.doors.http.connections` acts on them.

All times are seconds of one monotonic clock.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Chosen: files that everything else may need at once: SQLite, the KV store's segments, adapters being read, the page's files, and
# connections that the system hands over before we have looked at the first of them.
FILES_KEPT_BACK = 512
# Those connections: the listen backlog. With aiohttp's 128 a burst of 200 made others wait a second, until their system tried again.
MOST_AT_ONCE = FILES_KEPT_BACK // 2
# Chosen: the most connections by default are twice the most chat sockets, so that each may have a request beside it.
CONNECTIONS_PER_SOCKET = 2
# Chosen: of all connections these are for health checks, metrics and those who present a key.
MAX_RESERVED, RESERVED_SHARE = 64, 10
# Chosen: half of all at most, so that one address never takes everything.
MAX_PER_ADDRESS = 1024
# Chosen: a body may take BODY_GRACE_S, and a second more for each of these bytes; 4 KiB/s is a poor mobile connection.
BODY_GRACE_S, MIN_BODY_BYTES_PER_S = 60.0, 4096
# Chosen: after five minutes only a fast body continues; otherwise 16 MiB might hold a place of its owner's for over an hour.
LONG_BODY_S, GOOD_BODY_BYTES_PER_S = 300.0, 64 << 10
# Chosen: warn at four fifths, and again only after it has been below seven tenths.
HIGH_SHARE, LOW_SHARE = 0.8, 0.7
# Between two lines of the log about the same cause. Chosen: what a person who looks at a log can follow.
LINE_EVERY_S = 10.0

Reason = Literal["head_timeout", "body_timeout", "body_too_slow", "scarce", "address_limit", "limit"]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of connections that are allowed.

    num_total: all. num_general: open to everybody; the rest is reserved. num_per_address: of one address without a key.
    num_greeting_per_address: chat sockets of one address that have not said hello.
    """

    num_total: int
    num_general: int
    num_per_address: int
    num_greeting: int
    num_greeting_per_address: int


def limits_for(max_files: int, max_sockets: int, total: int | None, per_address: int | None) -> Limits:
    """Return the limits in force. max_files: open files that the process may have. total, per_address: the operator's settings, if any."""
    room = max(max_files - FILES_KEPT_BACK, max_files // 2)
    num_total = min(total or max_sockets * CONNECTIONS_PER_SOCKET, room)
    num_general = max(num_total - min(MAX_RESERVED, num_total // RESERVED_SHARE), 1)
    num_per_address = min(per_address or min(MAX_PER_ADDRESS, max(num_total // 2, 1)), num_total)
    return Limits(
        num_total, num_general, num_per_address, max(num_total // 8, 1), max(num_per_address // 4, 1)
    )


@dataclass(frozen=True, slots=True)
class NewConnection:
    """The facts when a connection arrives. The numbers count the connections already there.

    num_of_address: of its address without a key; None for an address that many people share. has_unfinished_of_address, has_unfinished: a
    connection that has not completed a request (or said hello) could be closed, of this address or of any. has_idle: a connection between two
    requests could be closed. are_files_scarce: the process is near its limit of open files of any kind.
    """

    num_all: int
    num_of_address: int | None
    has_unfinished_of_address: bool
    has_unfinished: bool
    has_idle: bool
    are_files_scarce: bool = False


Victim = Literal["oldest_of_address", "oldest_unfinished", "oldest_idle"]


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a connection is let in, which connection is closed for it, and whether it takes a reserved place."""

    is_let_in: bool
    victim: Victim | None = None
    is_reserved: bool = False
    reason: Reason | None = None


def admit(arrival: NewConnection, limits: Limits) -> Admission:
    """Decide about a connection that has just arrived.

    A connection held without being used is closed before a used connection: first the oldest that never completed a request, then the one idle for
    longest. Reserved places are used when no connection can be closed. They stay reserved: who replaces a connection takes no general place
    where all of these are taken by others.
    """
    is_reserved = arrival.num_all > limits.num_general
    if arrival.num_of_address is not None and arrival.num_of_address >= limits.num_per_address:
        if arrival.has_unfinished_of_address:
            return Admission(True, "oldest_of_address", is_reserved)
        return Admission(False, reason="address_limit")
    if arrival.num_all < limits.num_general and not arrival.are_files_scarce:
        return Admission(True)
    if arrival.has_unfinished:
        return Admission(True, "oldest_unfinished", is_reserved)
    if arrival.has_idle:
        return Admission(True, "oldest_idle", is_reserved)
    if arrival.num_all < limits.num_total:
        return Admission(True, is_reserved=True)
    return Admission(False, reason="limit")


@dataclass(frozen=True, slots=True)
class BodyFacts:
    """A request's body that has not arrived in full. heard_at_s: when its last bytes came."""

    started_at_s: float
    heard_at_s: float
    num_bytes: int


def body_overdue(body: BodyFacts, now_s: float, timeout_s: float) -> Reason | None:
    """Return why a body is no longer waited for; None while it is. timeout_s: the longest silence."""
    if now_s - body.heard_at_s >= timeout_s:
        return "body_timeout"
    allowed_s = BODY_GRACE_S + body.num_bytes / MIN_BODY_BYTES_PER_S
    allowed_s = min(allowed_s, max(LONG_BODY_S, body.num_bytes / GOOD_BODY_BYTES_PER_S))
    if now_s - body.started_at_s >= allowed_s:
        return "body_too_slow"
    return None


class Watermark:
    """Detects once that something has become scarce, and once that it no longer is."""

    is_high = False

    def crossed(self, used: int, most: int) -> bool:
        """Return whether `used` of `most` has just risen above the high mark, or fallen below the low one; `is_high` says which."""
        was_high = self.is_high
        self.is_high = used >= (LOW_SHARE if was_high else HIGH_SHARE) * most
        return self.is_high != was_high


class RareLine:
    """Decides when to log a line whose cause may come thousands of times, and counts the causes that one line reports."""

    def __init__(self) -> None:
        self._next_s = float("-inf")
        self.num_waiting = 0

    def add(self, num: int = 1) -> None:
        """Count causes."""
        self.num_waiting += num

    def due(self, now_s: float) -> int:
        """Return how many causes to log one line for now; 0: do not log. The first cause is logged at once."""
        if not self.num_waiting or now_s < self._next_s:
            return 0
        num, self.num_waiting = self.num_waiting, 0
        self._next_s = now_s + LINE_EVERY_S
        return num


def is_shared(address: str, proxies: Sequence[Network]) -> bool:
    """Return whether many people may share an address, so that they must not be counted against each other: this machine and reverse proxies."""
    if not address:
        return True
    parsed = ipaddress.ip_address(address)
    return parsed.is_loopback or any(_overlaps(parsed, proxy) for proxy in proxies)


def _overlaps(address: ipaddress.IPv4Address | ipaddress.IPv6Address, network: Network) -> bool:
    if address.version != network.version:
        return False
    if address.version == 6:  # an IPv6 address counts as its /64 network
        return ipaddress.ip_network((int(address), 64)).overlaps(network)
    return address in network
