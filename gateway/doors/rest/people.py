"""`/v1/admin/people`: the people of the server, for operators. Source: docs/protocol.md, "REST beside it"."""

from __future__ import annotations

import asyncio
import tempfile
from typing import IO, Literal

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType, structs

from gateway.access.auth import Principal
from gateway.access.key_file import ID_CHARS, KeyLine
from gateway.access.person_limits import Limit, PersonLimits
from gateway.doors.http.bodies import json_reply, struct_body
from gateway.doors.http.key_changes import cut_off
from gateway.doors.rest.people_changes import change, erase, key_file_of, people_of, person_of
from gateway.doors.rest.transfers import saved_as
from gateway.errors import GatewayError, StartupError
from gateway.people.audit import Entry, What
from gateway.people.estate import Erased, write_export
from gateway.people.roll import Person, Roll, key_named
from gateway.services import SERVICES, Services
from gateway.sessions.archive import file_name

FOR = "Managing people is"
PIECE_BYTES = 1 << 18
Role = Literal["member", "operator"]
State = Literal["active", "disabled"]


class KeyEntry(Struct, frozen=True):
    """A key by its first characters."""

    id: str
    role: Role
    state: State


class PersonEntry(Struct, frozen=True, kw_only=True):
    """A person. owner: null until a key of an earlier version was used. Tokens and bytes are null with it. limits: null where the server's hold."""

    name: str
    owner: str | None
    role: Role
    state: State
    keys: list[KeyEntry]
    limits: PersonLimits
    tokens_today: int | None
    num_sessions: int | None
    num_stored_bytes: int | None


class PeopleList(Struct, frozen=True):
    """The people of the key file, in its order. me: the caller's owner id."""

    me: str
    people: list[PersonEntry]


class NewPerson(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/admin/people`."""

    name: str
    role: Role = "member"


class ChangedLimits(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of a person to change. null: the server's; 0: no limit; what is left out stays."""

    requests_per_min: Limit | None | UnsetType = UNSET
    concurrent_requests: Limit | None | UnsetType = UNSET
    stored_mib: Limit | None | UnsetType = UNSET
    tokens_per_day: Limit | None | UnsetType = UNSET


class ChangedPerson(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `PATCH /v1/admin/people/{id}`; what is left out stays."""

    state: State | UnsetType = UNSET
    limits: ChangedLimits | UnsetType = UNSET


class NewKey(Struct, frozen=True):
    """A key, which is shown this once and kept nowhere; id: its first characters."""

    key: str
    id: str


class SignInLink(Struct, frozen=True):
    """A link that signs one browser in, once. path: to be opened under the server's address; expires_at: seconds since the epoch."""

    path: str
    expires_at: float


class ErasedPerson(Struct, frozen=True):
    """The data that was erased: conversations, and blocks of KV on the disks of all nodes."""

    num_sessions: int
    num_kv_blocks: int


class ErasureUnderWay(Struct, frozen=True):
    """What is left of a person whose erasure takes longer than a request should: ask again."""

    num_left_sessions: int
    num_left_bytes: int


async def list_people(request: web.Request) -> web.Response:
    """Handle `GET /v1/admin/people`."""
    services, principal = _operator(request)
    roll = await people_of(services)
    stored = await services.store.rows.stored()
    entries = [_entry(services, person, stored) for person in roll.people()]
    return json_reply(PeopleList(principal.owner, entries))


def _entry(services: Services, person: Person, stored: dict[str, tuple[int, int]]) -> PersonEntry:
    owner = person.owner or None
    num_bytes, num_sessions = stored.get(person.owner, (0, 0))
    return PersonEntry(
        name=person.name,
        owner=owner,
        role=_role(person.is_operator),
        state=_state(person.is_disabled),
        limits=person.limits,
        keys=[KeyEntry(key.shown_id, _role(key.is_operator), _state(key.is_disabled)) for key in person.keys],
        tokens_today=services.usage.today(person.owner).num_tokens if owner else None,
        num_sessions=num_sessions if owner else None,
        num_stored_bytes=num_bytes if owner else None,
    )


async def add_person(request: web.Request) -> web.Response:
    """Handle `POST /v1/admin/people`: add a person with a first key."""
    services, principal = _operator(request)
    body = await struct_body(request, NewPerson)

    def work(roll: Roll) -> tuple[Person, str]:
        """Add the person and return it with the key."""
        key = roll.add_person(body.name, is_operator=body.role == "operator")
        return roll.find(body.name), key

    person, key = await change(services, work)
    _note(request, principal, "person_added", person, key[:ID_CHARS])
    return _key_reply(key)


async def patch_person(request: web.Request) -> web.Response:
    """Handle `PATCH /v1/admin/people/{id}`: disable or enable a person, or change the person's limits."""
    services, principal = _operator(request)
    body = await struct_body(request, ChangedPerson)

    def work(roll: Roll) -> Person:
        """Change the person and return it as it is then."""
        person = roll.find(request.match_info["id"])
        place = roll.people().index(person)
        if body.state is not UNSET:
            _check_other(person, principal)
            roll.set_disabled(person, body.state == "disabled")
            person = roll.people()[place]
        if body.limits is not UNSET:
            roll.set_limits(person, structs.replace(person.limits, **_set_ones(body.limits)))
        return roll.people()[place]

    person = await change(services, work)
    if body.state is not UNSET:
        _note(request, principal, "person_disabled" if body.state == "disabled" else "person_enabled", person)
    if body.limits is not UNSET:
        about = " ".join(person.limits.fields) or "limits of the server"
        _note(request, principal, "person_limited", person, about=about)
    return json_reply(_entry(services, person, await services.store.rows.stored()))


def _set_ones(changed: ChangedLimits) -> dict[str, int | None]:
    return {name: value for name, value in structs.asdict(changed).items() if value is not UNSET}


async def delete_person(request: web.Request) -> web.Response:
    """Handle `DELETE /v1/admin/people/{id}`: shut a person out, and erase all that the person has.

    The person leaves the key file last: whatever ends the erasure before, an operator sees who is left, and may ask again. A long erasure is
    answered by how much is left, and goes on; the same request waits for it.
    """
    services, principal = _operator(request)

    def work(roll: Roll) -> Person:
        """Shut the person out, who may be gone since an erasure by an earlier version that did not end."""
        person = roll.find_or_gone(request.match_info["id"])
        _check_other(person, principal)
        if not person.owner:
            raise GatewayError(
                "conflict", f"The owner id of {person.name} is not known until a key of theirs was used."
            )
        return roll.shut_out(person)

    person = await change(services, work)

    async def all_of_it() -> Erased:
        """Erase the person, who leaves the key file then, also where nobody waits for it any more."""
        erased = await erase(services, person)
        await change(services, lambda roll: roll.remove(person))
        _note(request, principal, "person_erased", person)
        return erased

    erased = await services.erasures.wait_for(person.owner, all_of_it, is_known=bool(person.lines))
    if erased is None:
        num_bytes, num_sessions = (await services.store.rows.stored()).get(person.owner, (0, 0))
        return json_reply(ErasureUnderWay(num_sessions, num_bytes), status=202)
    return json_reply(ErasedPerson(*erased))


async def add_key(request: web.Request) -> web.Response:
    """Handle `POST /v1/admin/people/{id}/keys`: make another key of a person."""
    services, principal = _operator(request)

    def work(roll: Roll) -> tuple[Person, str]:
        """Add the key and return it with its person."""
        person = roll.find(request.match_info["id"])
        return person, roll.add_key(person)

    person, key = await change(services, work)
    _note(request, principal, "key_added", person, key[:ID_CHARS])
    return _key_reply(key)


async def replace_key(request: web.Request) -> web.Response:
    """Handle `POST /v1/admin/people/{id}/keys/{key}/replace`: make a key in the place of another."""
    services, principal = _operator(request)

    def work(roll: Roll) -> tuple[Person, str]:
        """Replace the key and return the new one with its person."""
        person, line = _named(roll, request)
        return person, roll.replace_key(person, line)

    person, key = await change(services, work)
    _note(request, principal, "key_replaced", person, key[:ID_CHARS])
    return _key_reply(key)


async def revoke_key(request: web.Request) -> web.Response:
    """Handle `DELETE /v1/admin/people/{id}/keys/{key}`: withdraw a key."""
    services, principal = _operator(request)

    def work(roll: Roll) -> Person:
        """Remove the key and return its person."""
        person, line = _named(roll, request)
        roll.revoke(person, (line,))
        return person

    person = await change(services, work)
    _note(request, principal, "key_revoked", person, request.match_info["key"])
    return web.Response(status=204)


async def make_link(request: web.Request) -> web.Response:
    """Handle `POST /v1/admin/people/{id}/sign-in-link`: make a link that signs a person in without a key, once."""
    services, principal = _operator(request)

    def work(roll: Roll) -> Person:
        """Return the person, whose lines name the owner from now on, because a cookie tells nothing else."""
        person = roll.find(request.match_info["id"])
        if person.is_disabled:
            raise GatewayError("conflict", f"{person.name} is disabled.")
        return roll.name_owner(person)

    person = await change(services, work)
    token, expires_s = await services.sign_ins.make_link(person.owner)
    _note(request, principal, "link_made", person)
    response = json_reply(SignInLink(f"sign-in#{token}", expires_s), status=201)
    response.headers["Cache-Control"] = "no-store"
    return response


async def end_sign_ins(request: web.Request) -> web.Response:
    """Handle `DELETE /v1/admin/people/{id}/sign-ins`: sign a person out in all browsers, and end links that were not used."""
    services, principal = _operator(request)
    person = await person_of(services, request.match_info["id"])
    ended = await services.sign_ins.forget(person.owner) if person.owner else []
    await asyncio.gather(*(cut_off(services, each) for each in ended))
    _note(request, principal, "sign_ins_ended", person)
    return web.Response(status=204)


async def export_person(request: web.Request) -> web.StreamResponse:
    """Handle `GET /v1/admin/people/{id}/export`: all conversations of a person, and the usage by day, in a zip file."""
    services, principal = _operator(request)
    person = await person_of(services, request.match_info["id"])
    if not person.owner:
        raise GatewayError(
            "conflict", f"The owner id of {person.name} is not known until a key of theirs was used."
        )
    await services.usage.save()
    file = await asyncio.to_thread(_exported, services, person)
    try:
        _note(request, principal, "person_exported", person)
        headers = saved_as(file_name(person.name, "zip"), "person.zip")
        response = web.StreamResponse(headers=headers | {"Content-Type": "application/zip"})
        await response.prepare(request)
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            await response.write(piece)
        await response.write_eof()
        return response
    finally:
        await asyncio.to_thread(file.close)


def _exported(services: Services, person: Person) -> IO[bytes]:
    """Return an export as a file without a name, which vanishes with the process. This blocks."""
    folder = services.config.data_dir
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is sent, and closed, by the caller
    try:
        write_export(file, services.store.file, folder, person.owner, person.name)
        file.seek(0)
    except StartupError as error:
        file.close()
        raise GatewayError("storage_failed", "The export failed. The server's log says why.") from error
    except BaseException:
        file.close()
        raise
    return file


# -- what all of them share ----------------------------------------------------------------------------------------------


def _operator(request: web.Request) -> tuple[Services, Principal]:
    """Return the services and the operator who asks. Raises GatewayError `unauthorized`, `forbidden`, `rate_limited`, `conflict`."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    services.check_operator(principal, FOR)
    key_file_of(services)
    return services, principal


def _named(roll: Roll, request: web.Request) -> tuple[Person, KeyLine]:
    person = roll.find(request.match_info["id"])
    return person, key_named(person, request.match_info["key"])


def _check_other(person: Person, principal: Principal) -> None:
    if person.owner == principal.owner:
        raise GatewayError("conflict", "This is you: another operator can disable or erase you.")


def _role(is_operator: bool) -> Role:
    return "operator" if is_operator else "member"


def _state(is_disabled: bool) -> State:
    return "disabled" if is_disabled else "active"


def _key_reply(key: str) -> web.Response:
    response = json_reply(NewKey(key, key[:ID_CHARS]), status=201)
    response.headers["Cache-Control"] = "no-store"
    return response


def _note(
    request: web.Request, principal: Principal, what: What, person: Person, key: str = "", about: str = ""
) -> None:
    entry = Entry(
        what=what,
        who=principal.name,
        owner=principal.owner,
        place=request.remote or "",
        whom=person.name,
        whom_owner=person.owner,
        key=key,
        about=about,
    )
    request.app[SERVICES].audit.note(entry)


ROUTES = (
    web.get("/v1/admin/people", list_people),
    web.post("/v1/admin/people", add_person),
    web.patch("/v1/admin/people/{id}", patch_person),
    web.delete("/v1/admin/people/{id}", delete_person),
    web.get("/v1/admin/people/{id}/export", export_person),
    web.post("/v1/admin/people/{id}/keys", add_key),
    web.post("/v1/admin/people/{id}/sign-in-link", make_link),
    web.delete("/v1/admin/people/{id}/sign-ins", end_sign_ins),
    web.post("/v1/admin/people/{id}/keys/{key}/replace", replace_key),
    web.delete("/v1/admin/people/{id}/keys/{key}", revoke_key),
)
