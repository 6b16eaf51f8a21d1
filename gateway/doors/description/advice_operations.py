"""The part of the API's description that is about advice; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from gateway.advisories.advisories import AdvisoryRequest, Envelope
from gateway.doors.description.bodies import AdvisoryBatch, AdvisoryStanding, KvHintBatch, KvHintStanding
from gateway.doors.description.operation import ADVISORIES, Body, Operation, Parameter, ReplyShape
from gateway.hints.kv_hints import KvHintRequest

_TEXT = {"type": "string"}
_ADVISORY = Parameter("id", "path", _TEXT, "The advisory's id.")
_HINT = Parameter("id", "path", _TEXT, "The hint's id.")

ADVICE_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/v1/advisories",
        "advise",
        ADVISORIES,
        "Tell that a session's request will come",
        "One advisory, or several in an envelope of the shape of vLLM's KV hints.",
        body=Body(
            shape=(AdvisoryRequest, Envelope), example={"session_id": "lisbon", "expected_arrival_s": 2}
        ),
        replies={202: ReplyShape(description="It is acted on.", shape=(AdvisoryStanding, AdvisoryBatch))},
        errors=(404,),
    ),
    Operation(
        "get",
        "/v1/advisories/{id}",
        "read_advisory",
        ADVISORIES,
        "See what became of an advisory",
        parameters=(_ADVISORY,),
        replies={200: ReplyShape(description="The advisory.", shape=AdvisoryStanding)},
        errors=(404,),
    ),
    Operation(
        "delete",
        "/v1/advisories/{id}",
        "cancel_advisory",
        ADVISORIES,
        "Take an advisory back",
        parameters=(_ADVISORY,),
        replies={204: ReplyShape(description="It is taken back, or was over.")},
        errors=(404,),
    ),
    Operation(
        "post",
        "/v1/kv_hints",
        "hint",
        ADVISORIES,
        "Tell what a session's KV is worth",
        "One hint, or several in an envelope of the shape of vLLM's and SGLang's KV hints. What is asked beyond the key's share is clipped.",
        body=Body(
            shape=(KvHintRequest, Envelope),
            example={"action": "retain", "session_id": "lisbon", "ttl_s": 600},
        ),
        replies={202: ReplyShape(description="What was granted.", shape=(KvHintStanding, KvHintBatch))},
        errors=(404,),
    ),
    Operation(
        "get",
        "/v1/kv_hints/{id}",
        "read_hint",
        ADVISORIES,
        "See what was granted of a hint",
        parameters=(_HINT,),
        replies={200: ReplyShape(description="The hint.", shape=KvHintStanding)},
        errors=(404,),
    ),
    Operation(
        "delete",
        "/v1/kv_hints/{id}",
        "take_hint_back",
        ADVISORIES,
        "End what a hint has begun",
        parameters=(_HINT,),
        replies={204: ReplyShape(description="It is taken back.")},
        errors=(404,),
    ),
)
