"""What each key may ask for: requests a second and at once, and wrong keys from one address. `rates.py` decides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gateway.access.addresses import address_of
from gateway.access.auth import MIN_KEY_CHARS, KeyRing, Principal
from gateway.access.person_limits import SERVERS, PersonLimits, in_force
from gateway.access.rates import Concurrency, Rate, Rates
from gateway.errors import CloseCode, GatewayError
from gateway.metrics.metrics import Metrics
from gateway.settings.config import Config

# Of one key. Chosen: a team of fifty that all click at once stays far below; a loop that floods is at thousands.
REQUESTS_PER_S = 100.0
# Seconds' worth of requests that may come at once. Chosen: a page that opens a hundred conversations, an agent that fans out.
BURST_S = 5.0
# Concurrent requests of one key, in multiples of --max-num-seqs: one part runs and three wait. A small server still takes MIN_CONCURRENT. Chosen.
CONCURRENT_PER_SEQ, MIN_CONCURRENT = 4, 64
# Without keys all users of the machine are one owner, so that owner gets as much as this number of keys. Chosen.
KEYLESS_SHARE = 10
MINUTE_S = 60.0
NO_LIMIT = 1 << 40  # of places at once: more than can be there
# Wrong keys of one address: the burst, and the rate after it. Chosen: people mistype less, and 2 000 guesses an hour find nothing.
WRONG_KEYS, WRONG_KEYS_PER_S = 20, 0.5
TOO_MANY = "Too many wrong API keys came from this address."


class Admitted:
    """A request's place among those of its owner, until `leave` or the end of its `with` block."""

    def __init__(self, budgets: RequestBudgets, owner: str) -> None:
        self._budgets: RequestBudgets | None = budgets
        self._owner = owner
        self._since_s = budgets.clock()

    def leave(self) -> None:
        """Give the place back; a second time changes nothing."""
        if self._budgets is not None:
            self._budgets.left(self._owner, self._budgets.clock() - self._since_s)
            self._budgets = None

    def __enter__(self) -> Admitted:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.leave()


class RequestBudgets:
    """Requests of each owner, by rate and by number.

    Args:
        per_s, per_min, max_concurrent: of one owner; per_min 0: no limit.
        limits_of: what an operator has set for one owner, which goes before these.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        per_s: float = REQUESTS_PER_S,
        per_min: int = 0,
        max_concurrent: int = MIN_CONCURRENT,
        limits_of: Callable[[str], PersonLimits] = lambda owner: SERVERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._rates = Rates(per_s, max(per_s * BURST_S, 1))
        self._per_min = per_min
        self._by_minute = Rates(1 / MINUTE_S, 1)
        self._concurrency = Concurrency(max_concurrent)
        self._limits_of = limits_of
        self.clock = clock

    @staticmethod
    def of(config: Config, metrics: Metrics, num_seqs: int, keys: KeyRing) -> RequestBudgets:
        """Make the budgets of the settings, with defaults for unset ones.

        num_seqs: how many requests a batch may hold. keys: know people's own limits.
        """
        share = 1 if config.has_api_keys else KEYLESS_SHARE
        most = max(CONCURRENT_PER_SEQ * num_seqs, MIN_CONCURRENT) * share
        return RequestBudgets(
            metrics,
            per_s=config.max_requests_per_s or REQUESTS_PER_S * share,
            per_min=config.max_requests_per_min,
            max_concurrent=config.max_concurrent_requests or most,
            limits_of=keys.limits_of,
        )

    @property
    def max_concurrent(self) -> int:
        """Requests under way that each owner may have for whom nothing else is set."""
        return self._concurrency.limit

    def count(self, owner: str) -> None:
        """Count a request. Raises GatewayError `rate_limited`; then it is not counted."""
        wait_s = self._rates.take(owner, self.clock())
        if wait_s:
            self._metrics.refused.labels("rate").inc()
            raise GatewayError(
                "rate_limited",
                f"More than {self._rates.rate.per_s:g} requests a second with this key: send them more slowly "
                "(the operator's limit is --max-requests-per-s).",
                retry_after_s=wait_s,
            )

    def ask(self, owner: str) -> None:
        """Count a request that the model is to answer, within the owner's minute. Raises GatewayError `rate_limited`; then it is not counted."""
        own = self._limits_of(owner).requests_per_min
        limit = in_force(own, self._per_min)
        if not limit:
            return
        wait_s = self._by_minute.take(owner, self.clock(), Rate(limit / MINUTE_S, limit))
        if wait_s:
            self._metrics.refused.labels("rate").inc()
            raise GatewayError(
                "rate_limited",
                f"You may ask {limit:,} times a minute, and have done so: wait {wait_s:.0f} s before the next request "
                f"({_who_set(own, '--max-requests-per-min')}).",
                retry_after_s=wait_s,
            )

    def enter(self, owner: str) -> Admitted:
        """Take a place for a request; leave it when the request is over. Raises GatewayError `rate_limited`."""
        own = self._limits_of(owner).concurrent_requests
        limit = self._concurrency.limit if own is None else own or NO_LIMIT
        wait_s = self._concurrency.enter(owner, limit)
        if wait_s:
            self._metrics.refused.labels("concurrency").inc()
            raise GatewayError(
                "rate_limited",
                f"{limit} requests with this key are under way already: wait for one to end "
                f"({_who_set(own, '--max-concurrent-requests')}).",
                retry_after_s=wait_s,
            )
        return Admitted(self, owner)

    def left(self, owner: str, lasted_s: float) -> None:
        """Give back the place of a request; `Admitted.leave` calls this once."""
        self._concurrency.leave(owner, lasted_s)


class Gatekeeper:
    """Checks keys, and makes guessing them slow.

    Above WRONG_KEYS an address gets `rate_limited` for a wrong key, and keys short enough to be guessed are not even compared. A key of proper
    length is let in however many wrong ones come from the same address, so its holder cannot be locked out. The address is the peer's, so behind
    a reverse proxy, and on this machine, all users of short keys wait for each other's wrong ones; without that, guessing there would be free.

    Args:
        keys: that are accepted.
        metrics: count refusals.
        clock: monotonic seconds.
        on_refused: told of each refused key, with the peer's address and why.
    """

    def __init__(
        self,
        keys: KeyRing,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[str, str], None] = lambda address, why: None,
    ) -> None:
        self._keys = keys
        self._metrics = metrics
        self._clock = clock
        self._on_refused = on_refused
        self._wrong = Rates(WRONG_KEYS_PER_S, WRONG_KEYS)

    def authenticate(self, presented: str | None, remote: str | None) -> Principal:
        """Return the holder of this key. remote: the peer's address. Raises GatewayError `unauthorized`, `rate_limited`."""
        if self._keys.is_open or not presented:
            return self._keys.authenticate(presented)
        network = address_of(remote or "")
        wait_s = self._wrong.wait_s(network, self._clock())
        if wait_s and len(presented) < MIN_KEY_CHARS:
            self._on_refused(remote or "", TOO_MANY)
            raise self._slow_down(wait_s)
        try:
            return self._keys.authenticate(presented, may_take_long=not wait_s)
        except GatewayError as error:
            self._on_refused(remote or "", TOO_MANY if wait_s else error.message)
            if wait_s:
                raise self._slow_down(wait_s) from error
            self._wrong.take(network, self._clock())
            raise

    def _slow_down(self, wait_s: float) -> GatewayError:
        self._metrics.refused.labels("wrong_keys").inc()
        return GatewayError(
            "rate_limited",
            "Too many wrong API keys came from this address: check the key, and wait before you try again.",
            retry_after_s=wait_s,
            close_code=CloseCode.UNAUTHORIZED,
        )


def _who_set(own: int | None, flag: str) -> str:
    return f"the operator's limit is {flag}" if own is None else "an operator set this limit for you"


def retry_after(wait_s: float) -> int:
    """Return the `Retry-After` of a wait: whole seconds, rounded up (RFC 9110 §10.2.3)."""
    return max(math.ceil(wait_s), 1)
