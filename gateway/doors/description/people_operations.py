"""The part of the API's description that is about people; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from gateway.doors.description.operation import OPERATE, Body, Operation, Parameter, ReplyShape
from gateway.doors.rest.people import (
    ChangedPerson,
    ErasedPerson,
    NewKey,
    NewPerson,
    PeopleList,
    PersonEntry,
)
from gateway.doors.rest.usage import DEFAULT_DAYS, MAX_DAYS, UsageReport

_TEXT = {"type": "string"}
_PERSON = Parameter("id", "path", _TEXT, "The person's owner id, or a name that one person alone has.")
_KEY = Parameter("key", "path", _TEXT, "The key's first characters, as the list shows them.")
_OPERATORS = "With an operator's key, on a server with a key file. It stands in the audit log."

PEOPLE_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "get",
        "/v1/usage",
        "read_usage",
        OPERATE,
        "See the tokens used by day",
        "Your own; an operator's key sees everybody's, its own first.",
        parameters=(
            Parameter(
                "days",
                "query",
                {"type": "integer", "minimum": 1, "maximum": MAX_DAYS, "default": DEFAULT_DAYS},
                "How many UTC days, today among them.",
            ),
        ),
        replies={200: ReplyShape(description="Usage and limits.", shape=UsageReport)},
        errors=(400, 503),
    ),
    Operation(
        "get",
        "/v1/admin/people",
        "list_people",
        OPERATE,
        "List the people of the server",
        "With an operator's key, on a server with a key file: keys by their first characters, use today and what is stored.",
        replies={200: ReplyShape(description="All people.", shape=PeopleList)},
        errors=(409, 503),
    ),
    Operation(
        "post",
        "/v1/admin/people",
        "add_person",
        OPERATE,
        "Add a person with a first key",
        _OPERATORS,
        body=Body(shape=NewPerson, example={"name": "ada", "role": "member"}),
        replies={201: ReplyShape(description="The key, shown this once.", shape=NewKey)},
        errors=(400, 409, 503),
    ),
    Operation(
        "patch",
        "/v1/admin/people/{id}",
        "patch_person",
        OPERATE,
        "Disable or enable a person",
        f"All keys of a disabled person are refused, and what is open with them ends. {_OPERATORS}",
        parameters=(_PERSON,),
        body=Body(shape=ChangedPerson, example={"state": "disabled"}),
        replies={200: ReplyShape(description="The person as it is now.", shape=PersonEntry)},
        errors=(400, 404, 409, 503),
    ),
    Operation(
        "delete",
        "/v1/admin/people/{id}",
        "delete_person",
        OPERATE,
        "Erase a person for ever",
        f"Keys, conversations, usage and what was learned of the person's agents. {_OPERATORS}",
        parameters=(_PERSON,),
        replies={200: ReplyShape(description="What was erased.", shape=ErasedPerson)},
        errors=(404, 409, 503),
    ),
    Operation(
        "get",
        "/v1/admin/people/{id}/export",
        "export_person",
        OPERATE,
        "Export all conversations of a person",
        f"A zip file with one file for each conversation, and the usage by day. {_OPERATORS}",
        parameters=(_PERSON,),
        replies={200: ReplyShape(description="The zip file.", media=("application/zip",))},
        errors=(404, 409, 503),
    ),
    Operation(
        "post",
        "/v1/admin/people/{id}/keys",
        "add_key",
        OPERATE,
        "Make another key of a person",
        _OPERATORS,
        parameters=(_PERSON,),
        replies={201: ReplyShape(description="The key, shown this once.", shape=NewKey)},
        errors=(404, 409, 503),
    ),
    Operation(
        "post",
        "/v1/admin/people/{id}/keys/{key}/replace",
        "replace_key",
        OPERATE,
        "Make a key in the place of another",
        f"The other one stops working at once; what the person has stays. {_OPERATORS}",
        parameters=(_PERSON, _KEY),
        replies={201: ReplyShape(description="The key, shown this once.", shape=NewKey)},
        errors=(404, 409, 503),
    ),
    Operation(
        "delete",
        "/v1/admin/people/{id}/keys/{key}",
        "revoke_key",
        OPERATE,
        "Withdraw a key",
        f"What is open with it ends. The person stays. {_OPERATORS}",
        parameters=(_PERSON, _KEY),
        replies={204: ReplyShape(description="It is withdrawn.")},
        errors=(404, 409, 503),
    ),
)
