"""`/v1/usage`: the tokens that people used by day. Source: docs/protocol.md, "REST beside it"."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from gateway.access.person_limits import PersonLimits, in_force
from gateway.doors.http.bodies import json_reply
from gateway.errors import GatewayError
from gateway.people.ledger import Day
from gateway.services import SERVICES, Services

DEFAULT_DAYS, MAX_DAYS = 30, 366


class DayUsage(Struct, frozen=True, kw_only=True):
    """The tokens and requests that one person used on one UTC day. num_requests: calls and chat turns that were answered, also in part."""

    day: str
    num_requests: int
    prompt_tokens: int
    answer_tokens: int


class PersonUsage(Struct, frozen=True, kw_only=True):
    """The usage of one person, and the bytes that the person's conversations take. name: "" for somebody whom the key file no longer has.

    limits: those in force for the person, an operator's or the server's; null: no limit.
    """

    name: str
    owner: str
    tokens_today: int
    num_sessions: int
    num_stored_bytes: int
    limits: PersonLimits
    days: list[DayUsage]


class UsageReport(Struct, frozen=True, kw_only=True):
    """The usage of the caller, or for an operator of everybody, the caller first. Limits here are those of the server; null: no limit."""

    today: str
    max_tokens_per_day: int | None
    max_stored_bytes: int | None
    people: list[PersonUsage]


async def read_usage(request: web.Request) -> web.Response:
    """Handle `GET /v1/usage`: what the caller has used by day; an operator sees everybody."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    sees_all = services.keys.is_operator(principal)
    report = await report_of(services, principal.owner, _days(request), sees_all=sees_all)
    return json_reply(report)


async def report_of(services: Services, owner: str, num_days: int, *, sees_all: bool) -> UsageReport:
    """Return the usage of the last days, of one owner or of everybody. Raises GatewayError `storage_failed`."""
    usage = services.usage
    found = await usage.days(usage.since(num_days), None if sees_all else owner)
    stored = await services.store.rows.stored()
    by_owner: dict[str, list[Day]] = {}
    for day in found:
        by_owner.setdefault(day.owner, []).append(day)
    names = services.keys.people()
    shown = sorted({owner, *by_owner, *stored, *names} if sees_all else {owner})
    shown.sort(key=lambda each: (each != owner, names.get(each, "")))
    return UsageReport(
        today=usage.day(),
        max_tokens_per_day=usage.max_tokens_per_day or None,
        max_stored_bytes=services.config.max_stored_mib << 20 or None,
        people=[
            PersonUsage(
                name=names.get(each, "local" if services.keys.is_open else ""),
                owner=each,
                tokens_today=usage.today(each).num_tokens,
                num_sessions=stored.get(each, (0, 0))[1],
                num_stored_bytes=stored.get(each, (0, 0))[0],
                limits=_limits_in_force(services, each),
                days=[DayUsage(day=day, **spent._asdict()) for _, day, spent in by_owner.get(each, ())],
            )
            for each in shown
        ],
    )


def _limits_in_force(services: Services, owner: str) -> PersonLimits:
    own, config = services.keys.limits_of(owner), services.config
    return PersonLimits(
        requests_per_min=in_force(own.requests_per_min, config.max_requests_per_min) or None,
        concurrent_requests=in_force(own.concurrent_requests, services.budgets.max_concurrent) or None,
        stored_mib=in_force(own.stored_mib, config.max_stored_mib) or None,
        tokens_per_day=in_force(own.tokens_per_day, services.usage.max_tokens_per_day) or None,
    )


def _days(request: web.Request) -> int:
    """Return the query's `days`. Raises GatewayError `bad_request`."""
    given = request.query.get("days", str(DEFAULT_DAYS))
    if given.isascii() and given.isdecimal() and len(given) < 9 and 1 <= int(given) <= MAX_DAYS:
        return int(given)
    raise GatewayError("bad_request", f"'days' must be a whole number from 1 to {MAX_DAYS}.", param="days")


ROUTES = (web.get("/v1/usage", read_usage),)
