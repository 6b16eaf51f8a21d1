"""The part of the API's description that is about people; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from gateway.doors.description.operation import OPERATE, Operation, Parameter, ReplyShape
from gateway.doors.rest.usage import DEFAULT_DAYS, MAX_DAYS, UsageReport

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
)
