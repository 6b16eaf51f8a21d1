"""Figures of several nodes as those of one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from engine_bridge.protocol.figures import (
    AdapterStats,
    EngineState,
    GrammarStats,
    LaneStats,
    LengthErrors,
    NodeFigures,
    NodeState,
    SchedulingStats,
    TokenizerStats,
)
from kvtiers.stats import TierStats

S = TypeVar("S", bound=Struct)
K = TypeVar("K")


def _sum(parts: Sequence[S], **others: Callable[[list[Any]], Any]) -> S:
    """Field by field; others: how those are put together that are no sums."""
    first = parts[0]
    if len(parts) == 1:
        return first
    values = {name: [getattr(part, name) for part in parts] for name in first.__struct_fields__}
    summed = {name: others[name](value) if name in others else sum(value) for name, value in values.items()}
    return type(first)(**summed)


def _counts(dicts: Iterable[dict[K, Any]]) -> dict[K, Any]:
    total: Counter[K] = Counter()
    for each in dicts:
        total.update(each)
    return dict(total)


def _first(values: list[Any]) -> Any:
    return values[0]


def _any(values: list[Any]) -> Any:
    """Return the first value that is not empty; None if all are."""
    return next((value for value in values if value), None)


def _known(parts: Iterable[S | None]) -> list[S]:
    return [part for part in parts if part is not None]


def figures_of(parts: Sequence[NodeFigures], adapters: AdapterStats | None) -> NodeFigures:
    """Return the nodes' figures as those of one node; adapters: the adapters of all nodes, which are more than a sum."""
    return NodeFigures(
        num_steps=sum(part.num_steps for part in parts),
        num_rebuilds=sum(part.num_rebuilds for part in parts),
        kv_tiers=tiers_of(_known(part.kv_tiers for part in parts)),
        adapter_stats=adapters,
        tokenizer_stats=tokenizers_of(_known(part.tokenizer_stats for part in parts)),
        grammar_stats=grammars_of(_known(part.grammar_stats for part in parts)),
        scheduling_stats=scheduling_of(_known(part.scheduling_stats for part in parts)),
    )


def tiers_of(parts: Sequence[TierStats]) -> TierStats | None:
    """The nodes' figures of KV in host memory and on disk, as one; `None` where no node has such tiers."""
    if not parts:
        return None
    return TierStats(
        host=_sum([part.host for part in parts]),
        disk=_sum(
            [part.disk for part in parts],
            is_on=any,
            write_lag_s=max,
            # Readers of this figure read from one node's disk, so it is a mean and no sum.
            bytes_per_s=_rate,
        ),
        peers=_sum(
            [part.peers for part in parts], is_on=any, misses=_counts, refusals=_counts, bytes_per_s=_rate
        ),
        problem=_any([part.problem for part in parts]),
    )


def _rate(rates: list[float]) -> float:
    """Return the mean of the known values."""
    known = [rate for rate in rates if rate]
    return sum(known) / len(known) if known else 0.0


def tokenizers_of(parts: Sequence[TokenizerStats]) -> TokenizerStats | None:
    """The nodes' figures of tokenizer processes, as one."""
    return _sum(parts) if parts else None


def grammars_of(parts: Sequence[GrammarStats]) -> GrammarStats | None:
    """The nodes' figures of grammars, as one."""
    return _sum(parts) if parts else None


def scheduling_of(parts: Sequence[SchedulingStats]) -> SchedulingStats | None:
    """The nodes' figures of scheduling, as one; the policy's name is that of the first node."""
    if not parts:
        return None
    return _sum(
        parts,
        policy=_first,
        block_size=_first,
        num_by_reason=_counts,
        lanes=_lanes,
        counts=_counts,
        seconds=_counts,
        length_errors=_length_errors,
        length_calibration=_by_key,
    )


def _lanes(lanes: list[LaneStats | None]) -> LaneStats | None:
    """Return the lanes of all nodes; None where nodes have different numbers of lanes. The boundaries are the first node's."""
    found = [each for each in lanes if each is not None]
    if not found or len({len(each.quota_tokens) for each in found}) > 1:
        return None
    return _sum(
        found,
        boundaries=_first,
        num_waiting=_side_by_side,
        quota_tokens=_side_by_side,
        used_tokens=_side_by_side,
    )


def _side_by_side(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))


def _by_key(rows: list[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    keys = {key: None for row in rows for key in row}
    return {key: _side_by_side([row[key] for row in rows if key in row]) for key in keys}


def _length_errors(errors: list[LengthErrors | None]) -> LengthErrors | None:
    found = [each for each in errors if each is not None]
    return _sum(found, num_within=_counts) if found else None


def engine_state_of(parts: Sequence[EngineState], state: NodeState, limit: int) -> EngineState:
    """state: of all together. Of each kind at most `limit` requests, those of the first node first."""
    scheduling = scheduling_of([part.scheduling for part in parts])
    assert scheduling is not None
    return EngineState(
        state=state,
        num_steps=sum(part.num_steps for part in parts),
        num_rebuilds=sum(part.num_rebuilds for part in parts),
        scheduling=scheduling,
        waiting=[request for part in parts for request in part.waiting][:limit],
        running=[request for part in parts for request in part.running][:limit],
        num_waiting=sum(part.num_waiting for part in parts),
        num_running=sum(part.num_running for part in parts),
    )
