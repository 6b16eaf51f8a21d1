"""Advisories: word that a request of a session will come, from the page, from agents and from requests, and their outcomes.

They are advice: a wrong, late, repeated or hostile one changes no answer, and one without effect is dropped. At most one advisory for each
session is under way; a repeated one renews it. Source: SYMPHONY §3.1; docs/protocol.md, "Advisories".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from engine_bridge.protocol.errors import BridgeError, NotSupported
from engine_bridge.protocol.node import ADVISORY_ENDS, Advisory, AdvisoryReport, Node
from gateway.access.auth import tenant_of
from gateway.access.rates import Rates
from gateway.access.shares import Shares
from gateway.advisories.drafts import Drafts
from gateway.advisories.precision import Precision
from gateway.advisories.trails import Trail, Trails
from gateway.errors import GatewayError
from gateway.metrics.metrics import Metrics
from gateway.nodes.adapter_names import known_adapter
from gateway.sessions import NextPrompt, SessionStore
from gateway.settings.priorities import checked_priority

log = logging.getLogger(__name__)

# Chosen: typing sends a word every few seconds; after a minute of silence no question comes.
DEFAULT_TTL_S = 60.0
MAX_TTL_S = 3600.0
# How much later than its lower bound an expected request may come, unless a lifetime is given. Chosen.
GRACE_S = 60.0
# Of one client: advisories under way, of which the oldest makes room, and new ones per second with a burst. Chosen: a team behind one key types
# on far fewer keyboards; a program that sends more knows nothing.
MAX_LIVE, MAX_PER_S, BURST = 256, 50.0, 200
# Of all clients: under way. Chosen: some 30 MB.
MAX_LIVE_OF_ALL = 64 * MAX_LIVE
# Renew an advisory for at most this many lifetimes; after that the next word begins a new one. Chosen.
MAX_LIFETIMES = 3
# Ended advisories that can still be asked for.
MAX_ENDED = 4096
# A repeated advisory whose arrival differs by less renews the old one. Chosen: no tier moves faster.
SAME_ARRIVAL_S = 0.5
HINT_ACTION = "session.advise"

SessionName = Annotated[str, Meta(min_length=1, max_length=128)]
OnChange = Callable[["AdvisoryRecord"], None]


class AdvisoryRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/advisories`, and the payload of a hint.

    ordered: a key's requests of such advisories come in the order in which these are sent, so the first ones' KV is brought first. priority:
    lower first, as of requests. Source: SYMPHONY §3.1.
    """

    session_id: SessionName
    model: str | None = None
    expected_arrival_s: Annotated[float, Meta(ge=0, le=MAX_TTL_S)] | None = None
    ordered: bool = False
    priority: int | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] | None = None
    draft: str | None = None

    @property
    def lifetime_s(self) -> float:
        """Return for how many seconds the advisory waits for its request."""
        if self.ttl_s is not None:
            return self.ttl_s
        return DEFAULT_TTL_S if self.expected_arrival_s is None else self.expected_arrival_s + GRACE_S


class AdvisoryRecord:
    """One advisory and its state.

    Attributes:
        client: whose share it counts for; the owner where the server asks for keys.
        is_pin: as in `Advisory`.
        token_ids: what the request will begin with, packed; None: what the store has of the session.
        probability: that it comes true; None for the share of its owner's past advisories that did.
        report: the node's latest report; None before the first.
        followers: called with each change.
    """

    def __init__(
        self,
        owner: str,
        wanted: AdvisoryRequest,
        adapter: str | None,
        source: str,
        now: float,
        probability: float | None = None,
        *,
        client: str | None = None,
        is_pin: bool = False,
        token_ids: bytes | None = None,
    ) -> None:
        self.id = f"adv-{uuid.uuid4().hex}"
        self.owner = owner
        self.client = client or owner
        self.is_pin = is_pin
        self.token_ids = token_ids
        self.wanted = msgspec.structs.replace(
            wanted, draft=None
        )  # records are kept for long, and a draft must not be kept
        self.adapter = adapter
        self.source = source
        self.issued_s = now
        self.expires_s = now + wanted.lifetime_s
        self.num_merged = 0
        self.probability = probability
        self.report: AdvisoryReport | None = None
        self.is_over = False
        self.is_told = False  # whether the node was, or is being, told
        self.retracted: bool | None = None  # whether as expired; None: not at all
        self.followers: set[OnChange] = set()
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Owner and session, for which one advisory at a time is kept."""
        return self.owner, self.wanted.session_id

    @property
    def trail(self) -> Trail:
        """Return the first entry of its trail."""
        return Trail(
            id=self.id,
            session_id=self.wanted.session_id,
            model=self.adapter,
            source=self.source,
            began_s=self.issued_s,
        )

    def is_like(self, wanted: AdvisoryRequest, adapter: str | None, *, is_pin: bool = False) -> bool:
        """Return whether a new advisory says no more than this one."""
        mine, other = self.wanted.expected_arrival_s, wanted.expected_arrival_s
        is_same_time = mine is other or (
            mine is not None and other is not None and abs(mine - other) < SAME_ARRIVAL_S
        )
        is_same_kind = self.adapter == adapter and self.is_pin == is_pin
        return is_same_time and is_same_kind and self.wanted.priority == wanted.priority

    def describe(self, now: float) -> dict[str, Any]:
        """Return the record as JSON values. Source: docs/protocol.md."""
        body: dict[str, Any] = {
            "id": self.id,
            "object": "advisory",
            "session_id": self.wanted.session_id,
            "model": self.adapter,
            "state": self.report.state if self.report is not None else "accepted",
            "is_merged": self.num_merged > 0,
            "expires_in_s": 0.0 if self.is_over else round(max(self.expires_s - now, 0.0), 3),
        }
        return body | outcome_of(self.report) if self.report is not None else body


def outcome_of(report: AdvisoryReport) -> dict[str, Any]:
    """Return a report's outcome in the form of a `done` frame."""
    num_tokens, device_tokens = report.num_tokens, report.device_tokens
    return {
        "state": report.state,
        "tier": "device" if device_tokens >= num_tokens > 0 else "host" if num_tokens else None,
        "num_tokens": num_tokens,
        "device_tokens": device_tokens,
        "host_bytes": report.host_bytes,
        "disk_bytes": report.disk_bytes,
        "peer_bytes": report.peer_bytes,
        "adapter_bytes": report.adapter_bytes,
        "lead_ms": _ms(report.lead_s),
        "late_ms": _ms(report.late_s),
    }


class Advisories:
    """Takes advisories in, hands them to the node, and keeps the accounts.

    Args:
        may_hurry: clients may go before others (`--client-priority`).
        clock: monotonic seconds, for lifetimes and rates.
    """

    def __init__(
        self,
        node: Node,
        store: SessionStore,
        metrics: Metrics,
        drafts: Drafts,
        *,
        may_hurry: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._store = store
        self._metrics = metrics
        self._drafts = drafts
        self._may_hurry = may_hurry
        self._clock = clock
        self._precision = Precision()
        self._num_ended: Counter[str] = Counter()
        self.trails = Trails()
        """The states that each owner's last ones went through."""
        self._records: dict[str, AdvisoryRecord] = {}
        self._live: dict[tuple[str, str], AdvisoryRecord] = {}
        self._shares: Shares[str] = Shares(MAX_LIVE, MAX_LIVE_OF_ALL)  # ids of advisories under way
        self._ended: deque[str] = deque()  # ids of ended advisories in `_records`, the oldest first
        self._scored: OrderedDict[tuple[str, str], AdvisoryReport] = OrderedDict()
        self._rates = Rates(MAX_PER_S, BURST)
        self._tasks: set[asyncio.Task[None]] = set()

    # -- in ----------------------------------------------------------------------------------------------------------

    def submit(
        self,
        owner: str,
        wanted: AdvisoryRequest,
        source: str,
        follower: OnChange | None = None,
        *,
        client: str | None = None,
        probability: float | None = None,
        is_pin: bool = False,
        token_ids: bytes | None = None,
    ) -> AdvisoryRecord:
        """Act on an advisory, or renew the live advisory that it repeats. Returns at once.

        Args:
            owner: whose session it is.
            wanted: the advisory, as it was sent.
            source: `typing`, `rest`, `hint` or `learned` (`computed` is the gateway's own, after it computed a history).
            follower: called with each change.
            client: whose share it counts for (see `Services.client_of`), if not the owner's.
            probability: that it comes true, where that is known better than from the owner's past.
            is_pin: as in `Advisory`.
            token_ids: as in `AdvisoryRecord`.

        Raises:
            GatewayError: `bad_request` (this client may not set that priority), `rate_limited`, `unknown_model`.
        """
        checked_priority(wanted.priority, may_hurry=self._may_hurry)
        adapter = self._adapter_of(wanted.model)
        now = self._clock()
        live = self._live.get((owner, wanted.session_id))
        if live is not None and live.retracted is None and live.is_like(wanted, adapter, is_pin=is_pin):
            live.num_merged += 1
            self._metrics.advisories_merged.inc()
            latest_s = live.issued_s + MAX_LIFETIMES * live.wanted.lifetime_s
            self._renew(live, min(now + wanted.lifetime_s, latest_s))
            record = live
        else:
            self._check_rate(client or owner, now)
            if live is not None:
                self._retract(live, is_expired=False)
            made = AdvisoryRecord(
                *(owner, wanted, adapter, source, now, probability),
                client=client,
                is_pin=is_pin,
                token_ids=token_ids,
            )
            record = self._begin(made)
        if follower is not None:
            record.followers.add(follower)
            if record.report is not None:
                _tell(follower, record)
        if wanted.draft is not None:
            self._drafts.update(owner, wanted.session_id, adapter, wanted.draft, client=client)
        return record

    def expects(self, owner: str, session_id: str) -> bool:
        """Return whether an advisory for this session is under way."""
        live = self._live.get((owner, session_id))
        return live is not None and live.retracted is None

    def hint(self, owner: str, envelope: Any, *, client: str | None = None) -> list[AdvisoryRecord]:
        """Act on the advisories of an envelope in the shape of vLLM's KV hints. Raises `bad_request`, `rate_limited`, `unknown_model`."""
        try:
            actions = msgspec.convert(envelope, Envelope).actions
            wanted = [
                msgspec.convert(a.payload, AdvisoryRequest) for a in actions if a.action_type == HINT_ACTION
            ]
        except msgspec.ValidationError as error:
            raise GatewayError(
                "bad_request", f"The hints were not understood: {error}", param="kv_hints"
            ) from error
        return [self.submit(owner, item, "hint", client=client) for item in wanted]

    def find(self, owner: str, advisory_id: str) -> AdvisoryRecord:
        """Return an advisory by its id. Raises GatewayError `not_found`, also for another owner's."""
        record = self._records.get(advisory_id)
        if record is None or record.owner != owner:
            raise GatewayError("not_found", "There is no advisory with this id, or not any more.")
        return record

    def cancel(self, owner: str, advisory_id: str) -> None:
        """Cancel an advisory; an ended one stays as it is. Raises GatewayError `not_found`."""
        record = self.find(owner, advisory_id)
        if not record.is_over:
            self._retract(record, is_expired=False)
            self._drafts.stop(*record.key)

    def end_session(self, owner: str, session_id: str) -> None:
        """Cancel the advisory of a session, because its next prompt will begin with other turns."""
        live = self._live.get((owner, session_id))
        if live is not None and live.retracted is None:
            self._retract(live, is_expired=False)
        self._drafts.stop(owner, session_id)

    def came_back(self, owner: str, session_id: str) -> None:
        """Cancel the advisory of a session whose request is here before the node was told: it would wait for another one."""
        live = self._live.get((owner, session_id))
        if live is not None and not live.is_told and live.retracted is None:
            self._retract(live, is_expired=False)

    def take_outcome(self, owner: str, session_id: str) -> dict[str, Any] | None:
        """Return the outcome of the advisory before a session's last request, once; None if there was no advisory."""
        report = self._scored.pop((owner, session_id), None)
        return outcome_of(report) if report is not None else None

    def counts(self) -> dict[str, int]:
        """Return the number of advisories of all owners: under way (`live`), and ended since the start, by outcome."""
        return {"live": len(self._live)} | self._num_ended

    # -- the life of one ---------------------------------------------------------------------------------------------

    def _begin(self, record: AdvisoryRecord) -> AdvisoryRecord:
        if (loser := self._shares.put(record.id, record.client)) is not None:
            self._retract(self._records[loser], is_expired=False)
        self._live[record.key] = self._records[record.id] = record
        self._metrics.advisories.labels(record.source).inc()
        self.trails.begin(record.owner, record.trail)
        self._renew(record, record.expires_s)
        task = asyncio.create_task(self._start(record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return record

    async def _start(self, record: AdvisoryRecord) -> None:
        try:
            outlook = await self._outlook(record)
            if record.is_over:
                return
            record.is_told = True
            await self._node.advise(
                self._advisory(record, outlook), lambda report: self._changed(record, report)
            )
            if record.retracted is not None:  # while it was on its way, when the node did not know it yet
                self._node.retract(record.id, is_expired=record.retracted)
        except NotSupported:
            self._end(record, "unknown")
        except BridgeError as error:
            log.info("an advisory was dropped: %s", type(error).__name__)
            self._end(record, "unknown")
        except Exception:
            log.exception("an advisory failed")
            self._end(record, "unknown")

    async def _outlook(self, record: AdvisoryRecord) -> NextPrompt | None:
        """Return what a session's next prompt begins with; None for a session that is not stored, as an agent's first is."""
        with contextlib.suppress(GatewayError):
            return await self._store.outlook(*record.key)
        return None

    def _advisory(self, record: AdvisoryRecord, outlook: NextPrompt | None) -> Advisory:
        wanted, likely, ids = record.wanted, record.probability, record.token_ids
        if ids is None:
            ids = outlook.token_ids if outlook is not None else b""
        return Advisory(
            advisory_id=record.id,
            session_id=wanted.session_id,
            expected_arrival_s=wanted.expected_arrival_s,
            priority=wanted.priority,
            is_ordered=wanted.ordered,
            adapter=record.adapter,
            probability=self._precision.probability(record.owner, record.source, self._clock())
            if likely is None
            else likely,
            token_ids=ids,
            lifetime_s=wanted.lifetime_s,
            is_pin=record.is_pin,
            tenant=tenant_of(record.owner),
        )

    def _renew(self, record: AdvisoryRecord, expires_s: float) -> None:
        record.expires_s = expires_s
        if record.expiry is not None:
            record.expiry.cancel()
        loop = asyncio.get_running_loop()
        record.expiry = loop.call_later(max(expires_s - self._clock(), 0.0), self._expire, record)

    def _expire(self, record: AdvisoryRecord) -> None:
        self._retract(record, is_expired=True)
        self._drafts.stop(*record.key)

    def _retract(self, record: AdvisoryRecord, *, is_expired: bool) -> None:
        record.retracted = is_expired
        # At once, whenever the node hears of it: it counts no more, and another makes room the next time.
        self._shares.drop(record.id)
        self._node.retract(record.id, is_expired=is_expired)

    def _changed(self, record: AdvisoryRecord, report: AdvisoryReport) -> None:
        record.report = report
        self.trails.passed(record.owner, record.id, report.state, outcome_of(report), self._clock())
        followers = list(record.followers)
        if report.state in ADVISORY_ENDS and not record.is_over:
            self._settle(record, report)
        if record.source != "computed":
            self._complete(record, report, followers)
        for follower in followers:
            _tell(follower, record)
        if record.is_over:
            record.followers.clear()

    def _settle(self, record: AdvisoryRecord, report: AdvisoryReport) -> None:
        record.is_over = True
        if record.expiry is not None:
            record.expiry.cancel()
            record.expiry = (
                None  # an ended record is kept for a while, but not its timer, which holds a whole context
            )
        if self._live.get(record.key) is record:
            del self._live[record.key]
        self._shares.drop(record.id)
        self._ended.append(record.id)
        if len(self._ended) > MAX_ENDED:
            del self._records[self._ended.popleft()]
        self._metrics.advisory_ended(record.source, report)
        self._num_ended[report.state] += 1
        # Those with a probability of their own say nothing of what people who type and agents that announce are worth.
        if report.state in ("hit", "late", "wasted", "expired") and record.probability is None:
            self._precision.note(record.owner, record.source, report.state in ("hit", "late"), self._clock())
        if report.lead_s is not None:
            self._scored[record.key] = report
            if len(self._scored) > MAX_ENDED:
                self._scored.popitem(last=False)

    def _complete(self, record: AdvisoryRecord, report: AdvisoryReport, followers: list[OnChange]) -> None:
        """Compute, while nothing else runs, the part of a session's history that no tier holds, as after a change of adapter."""

        def tell() -> None:
            """Begin an advisory for the computed history, unless the session has one by now."""
            if record.is_over and record.key not in self._live:
                now = self._clock()
                again = AdvisoryRecord(
                    record.owner,
                    record.wanted,
                    record.adapter,
                    "computed",
                    now,
                    record.probability,
                    client=record.client,
                    is_pin=record.is_pin,
                )
                again.followers.update(followers)
                self._begin(again)

        if report.state == "unknown" or (report.state == "warm" and report.missing_tokens):
            self._drafts.warm_history(
                record.owner, record.wanted.session_id, record.adapter, tell, client=record.client
            )

    def _end(self, record: AdvisoryRecord, state: Any) -> None:
        report = AdvisoryReport(advisory_id=record.id, session_id=record.wanted.session_id, state=state)
        self._changed(record, report)

    # -- bounds ------------------------------------------------------------------------------------------------------

    def _adapter_of(self, model: str | None) -> str | None:
        adapter = known_adapter(self._node, model)
        assert adapter is None or isinstance(adapter, str)
        return adapter

    def _check_rate(self, client: str, now: float) -> None:
        """Take from a bucket of BURST that fills at MAX_PER_S. Raises GatewayError `rate_limited`."""
        if wait_s := self._rates.take(client, now):
            self._metrics.advisories_refused.inc()
            raise GatewayError(
                "rate_limited",
                f"More than {MAX_PER_S:.0f} advisories a second: send fewer, or none.",
                retry_after_s=wait_s,
            )


class HintAction(Struct, frozen=True):
    """One action of an envelope, in the shape of vLLM's `KvHintAction`."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class Envelope(Struct, frozen=True):
    """Hints in the shape of vLLM's `KvHintsEnvelope`. Actions of unknown types are ignored."""

    protocol_version: str
    message_id: str
    actions: Annotated[list[HintAction], Meta(max_length=64)]


def _tell(follower: OnChange, record: AdvisoryRecord) -> None:
    """Call a follower. If it raises, that is logged, and the others are still called."""
    try:
        follower(record)
    except Exception:
        log.exception("a follower of an advisory failed")


def _ms(seconds: float | None) -> float | None:
    return round(seconds * 1000, 3) if seconds is not None else None
