"""What grammars of running answers may take together, and each tenant of it."""

from __future__ import annotations

from engine_bridge.policy.limits.grammar_room import (
    MAX_STATES,
    MIB,
    GrammarRoom,
    default_room_bytes,
    first_states,
    most_bytes,
)


def taken(room: GrammarRoom, tenant: str, num_bytes: int) -> int:
    """How often a tenant gets so many bytes until it gets no more."""
    count = 0
    while room.take(tenant, num_bytes):
        count += 1
    return count


def test_a_tenant_gets_half_and_the_next_ones_half_of_what_is_left() -> None:
    room = GrammarRoom(1000)
    assert taken(room, "first", 10) == 50
    assert taken(room, "second", 10) == 25
    assert taken(room, "third", 10) == 12
    assert room.num_held_bytes <= 1000


def test_what_is_given_back_can_be_taken_again() -> None:
    room = GrammarRoom(1000)
    assert room.take("one", 400) and not room.take("one", 400)
    room.give_back("one", 400)
    assert room.num_held_bytes == 0
    assert room.take("one", 400)


def test_what_is_refused_changes_nothing() -> None:
    room = GrammarRoom(100)
    assert not room.take("one", 60)
    assert room.num_held_bytes == 0 and room.take("one", 50)


def test_by_itself_a_full_batch_of_one_tenants_ordinary_grammars_has_room() -> None:
    for max_num_seqs in (1, 64, 256, 1024):
        room = GrammarRoom(default_room_bytes(max_num_seqs))
        assert taken(room, "one", most_bytes(2000, first_states(2000))) >= max_num_seqs


def test_the_largest_grammar_alone_has_room_at_its_largest() -> None:
    assert GrammarRoom(default_room_bytes(64)).take("one", most_bytes(1000, MAX_STATES))
    assert first_states(256 << 10) < MAX_STATES and most_bytes(0, 0) == MIB
