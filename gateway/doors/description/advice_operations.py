"""The part of the API's description that is about advice; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from gateway.advisories.advisories import AdvisoryRequest, Envelope
from gateway.doors.description.bodies import AdvisoryBatch, AdvisoryStanding, KvHintBatch, KvHintStanding
from gateway.doors.description.operation import Body, Operation, ReplyShape, advisories
from gateway.hints.kv_hints import KvHintRequest

ADVICE_OPERATIONS: tuple[Operation, ...] = (
    advisories(
        "POST /v1/advisories",
        "advise",
        "Tell that a session's request will come",
        "One advisory, or several in an envelope of the shape of vLLM's KV hints.",
        body=Body((AdvisoryRequest, Envelope), {"session_id": "lisbon", "expected_arrival_s": 2}),
        replies={202: ReplyShape("It is acted on.", (AdvisoryStanding, AdvisoryBatch))},
        errors=(404,),
    ),
    advisories(
        "GET /v1/advisories/{id}",
        "read_advisory",
        "See what became of an advisory",
        replies={200: ReplyShape("The advisory.", AdvisoryStanding)},
        errors=(404,),
    ),
    advisories(
        "DELETE /v1/advisories/{id}",
        "cancel_advisory",
        "Take an advisory back",
        replies={204: ReplyShape("It is taken back, or was over.")},
        errors=(404,),
    ),
    advisories(
        "POST /v1/kv_hints",
        "hint",
        "Tell what a session's KV is worth",
        "One hint, or several in an envelope of the shape of vLLM's and SGLang's KV hints. What is asked beyond the key's share is clipped.",
        body=Body((KvHintRequest, Envelope), {"action": "retain", "session_id": "lisbon", "ttl_s": 600}),
        replies={202: ReplyShape("What was granted.", (KvHintStanding, KvHintBatch))},
        errors=(404,),
    ),
    advisories(
        "GET /v1/kv_hints/{id}",
        "read_hint",
        "See what was granted of a hint",
        replies={200: ReplyShape("The hint.", KvHintStanding)},
        errors=(404,),
    ),
    advisories(
        "DELETE /v1/kv_hints/{id}",
        "take_hint_back",
        "End what a hint has begun",
        replies={204: ReplyShape("It is taken back.")},
        errors=(404,),
    ),
)
