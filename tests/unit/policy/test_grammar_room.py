"""What grammars of running answers may take together, and each tenant of it."""

from engine_bridge.policy.limits.grammar_room import GrammarRoom


def test_what_is_given_back_can_be_taken_again() -> None:
    room = GrammarRoom(1000)
    assert room.take("one", 400) and not room.take("one", 400)
    room.give_back("one", 400)
    assert room.num_held_bytes == 0
    assert room.take("one", 400)
