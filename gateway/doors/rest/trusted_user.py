"""The step that finds, and where the operator wants it adds, the person whom a reverse proxy names in a request's header."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.access.auth import extract_key
from gateway.doors.rest.people_changes import change, people_of
from gateway.errors import GatewayError
from gateway.people.audit import Entry
from gateway.people.named_by_proxy import NAMED_BY_PROXY, NamedByProxy, TrustedHeader
from gateway.people.roll import NoSuchPerson, Person, Roll
from gateway.services import SERVICES, Services

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def named_by_proxy(header: TrustedHeader) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware. A request with a key belongs to the key's holder, whatever the header says."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note the person whom the proxy names."""
        name = header.person_in(request.headers.getall(header.name, []), request.remote or "")
        if name is not None and extract_key(request.headers) is None:
            services = request.app[SERVICES]
            request[NAMED_BY_PROXY] = await person_named(
                services, name, request.remote or "", "named by the proxy"
            )
        return await handler(request)

    return middleware


async def person_named(services: Services, name: str, peer: str, by: str) -> NamedByProxy:
    """Return the person of this name; add an unknown person where that is allowed.

    Args:
        services: have the people.
        name: as it stands in the key file.
        peer: the address that asks, for the audit log.
        by: who vouches for the name, in words, for the audit log.

    Raises:
        GatewayError: `storage_failed` where the key file cannot be read or written.
    """
    owners = services.keys.owners_named(name)
    if len(owners) == 1:
        return NamedByProxy(name, owners[0])
    if owners:
        return NamedByProxy(name, "", f"Several people of this server are named {name!r}.")
    try:
        person = await _made(services, name, peer, by)
    except GatewayError as error:
        if error.code != "conflict":
            raise
        return NamedByProxy(name, "", error.message)
    return NamedByProxy(name, person.owner)


async def _made(services: Services, name: str, peer: str, by: str) -> Person:
    """Return a person whose lines name the owner from now on; add an unknown person where that is allowed.

    Raises GatewayError `conflict`, `storage_failed`.
    """
    may_add = services.config.add_trusted_users
    is_new = False

    def work(roll: Roll) -> Person:
        """Find the person, whom a request that came at the same time may have added."""
        nonlocal is_new
        try:
            return roll.name_owner(roll.find_by_name(name))
        except NoSuchPerson:
            is_new = True
            return roll.add_without_key(name)

    if not may_add:
        known = (await people_of(services)).people()
        if not any(person.name == name for person in known):
            raise GatewayError(
                "conflict", f"{name!r} is not among the people of this server. Ask its operator."
            )
    person = await change(services, work)
    if is_new:
        services.audit.note(
            Entry(what="person_added", place=peer, whom=person.name, whom_owner=person.owner, about=by)
        )
    return person
