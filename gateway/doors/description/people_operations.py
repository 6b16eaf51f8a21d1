"""The part of the API's description that is about people; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from gateway.doors.description.operation import Body, Operation, ReplyShape, operate, query
from gateway.doors.rest.oidc import WaysIn
from gateway.doors.rest.people import (
    ChangedPerson,
    ErasedPerson,
    ErasureUnderWay,
    NewKey,
    NewPerson,
    PeopleList,
    PersonEntry,
    SignInLink,
)
from gateway.doors.rest.sign_in import SignedInAs, SignIn
from gateway.doors.rest.usage import DEFAULT_DAYS, MAX_DAYS, UsageReport

_OPERATORS = "With an operator's key, on a server with a key file. It stands in the audit log."

PEOPLE_OPERATIONS: tuple[Operation, ...] = (
    operate(
        "GET /v1/usage",
        "read_usage",
        "See the tokens used by day",
        "Your own; an operator's key sees everybody's, its own first.",
        parameters=(
            query(
                "days",
                "How many UTC days, today among them.",
                type="integer",
                minimum=1,
                maximum=MAX_DAYS,
                default=DEFAULT_DAYS,
            ),
        ),
        replies={200: ReplyShape("Usage and limits.", UsageReport)},
        errors=(400, 503),
    ),
    operate(
        "GET /v1/admin/people",
        "list_people",
        "List the people of the server",
        "With an operator's key, on a server with a key file: keys by their first characters, use today and what is stored.",
        replies={200: ReplyShape("All people.", PeopleList)},
        errors=(409, 503),
    ),
    operate(
        "POST /v1/admin/people",
        "add_person",
        "Add a person with a first key",
        _OPERATORS,
        body=Body(NewPerson, {"name": "ada", "role": "member"}),
        replies={201: ReplyShape("The key, shown this once.", NewKey)},
        errors=(400, 409, 503),
    ),
    operate(
        "PATCH /v1/admin/people/{id}",
        "patch_person",
        "Disable or enable a person, or change the person's limits",
        f"All keys of a disabled person are refused, and what is open with them ends. {_OPERATORS}",
        body=Body(ChangedPerson, {"state": "disabled"}),
        replies={200: ReplyShape("The person as it is now.", PersonEntry)},
        errors=(400, 404, 409, 503),
    ),
    operate(
        "DELETE /v1/admin/people/{id}",
        "delete_person",
        "Erase a person for ever",
        f"Keys, conversations, usage and what was learned of the person's agents. {_OPERATORS}",
        replies={
            200: ReplyShape("What was erased.", ErasedPerson),
            202: ReplyShape("It goes on: what is left. The same request waits for it.", ErasureUnderWay),
        },
        errors=(404, 409, 503),
    ),
    operate(
        "GET /v1/admin/people/{id}/export",
        "export_person",
        "Export all conversations of a person",
        f"A zip file with one file for each conversation, and the usage by day. {_OPERATORS}",
        replies={200: ReplyShape("The zip file.", media=("application/zip",))},
        errors=(404, 409, 503),
    ),
    operate(
        "POST /v1/admin/people/{id}/keys",
        "add_key",
        "Make another key of a person",
        _OPERATORS,
        replies={201: ReplyShape("The key, shown this once.", NewKey)},
        errors=(404, 409, 503),
    ),
    operate(
        "POST /v1/admin/people/{id}/sign-in-link",
        "make_link",
        "Make a link that signs a person in",
        f"It is good once and for a day, and gives one browser a cookie in place of a key. {_OPERATORS}",
        replies={201: ReplyShape("The link, shown this once.", SignInLink)},
        errors=(404, 409, 503),
    ),
    operate(
        "DELETE /v1/admin/people/{id}/sign-ins",
        "end_sign_ins",
        "Sign a person out in all browsers",
        f"Links that were not used end, too. Keys stay. {_OPERATORS}",
        replies={204: ReplyShape("No browser is signed in as this person.")},
        errors=(404, 409, 503),
    ),
    operate(
        "GET /v1/sign-in",
        "ways_in",
        "See how people may sign in",
        "Without keys there is no way, and none is needed.",
        replies={200: ReplyShape("The ways.", WaysIn)},
        is_public=True,
    ),
    operate(
        "GET /v1/sign-in/oidc",
        "begin",
        "Sign a browser in at the OIDC provider",
        "Sends the browser there (`--oidc-issuer`).",
        replies={302: ReplyShape("To the provider.")},
        errors=(404, 429, 503),
        is_public=True,
    ),
    operate(
        "GET /v1/sign-in/oidc/callback",
        "callback",
        "Come back from the OIDC provider",
        "The provider sends the browser here. The reply sets the cookie that a sign-in link gives.",
        replies={302: ReplyShape("To the chat page, signed in.")},
        errors=(401, 404, 429, 503),
        is_public=True,
    ),
    operate(
        "POST /v1/sign-in",
        "sign_in",
        "Sign a browser in with a link",
        "The page `/sign-in` does this. The reply sets a cookie: HttpOnly, SameSite=Strict, for 30 days.",
        body=Body(SignIn, {"token": "x" * 43}),
        replies={200: ReplyShape("Who is signed in.", SignedInAs)},
        errors=(400, 401, 409, 429, 503),
        is_public=True,
    ),
    operate(
        "POST /v1/sign-out",
        "sign_out",
        "Sign a browser out",
        "Ends what is open with its cookie. Without one nothing happens.",
        replies={204: ReplyShape("The browser is signed in no more.")},
        errors=(503,),
        is_public=True,
    ),
    operate(
        "POST /v1/admin/people/{id}/keys/{key}/replace",
        "replace_key",
        "Make a key in the place of another",
        f"The other one stops working at once; what the person has stays. {_OPERATORS}",
        replies={201: ReplyShape("The key, shown this once.", NewKey)},
        errors=(404, 409, 503),
    ),
    operate(
        "DELETE /v1/admin/people/{id}/keys/{key}",
        "revoke_key",
        "Withdraw a key",
        f"What is open with it ends. The person stays. {_OPERATORS}",
        replies={204: ReplyShape("It is withdrawn.")},
        errors=(404, 409, 503),
    ),
)
