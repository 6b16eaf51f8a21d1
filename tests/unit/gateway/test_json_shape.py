"""Bodies are measured without being decoded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.doors.http import json_shape
from gateway.doors.http.json_shape import shape_of

TEXT = st.text(alphabet='ab",\\[]{}:é\n', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=40,
)


def counted(value: Any) -> tuple[int, int]:
    """(values, depth) of a decoded value."""
    if not isinstance(value, dict | list):
        return 1, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(num for num, _ in inner), 1 + max((depth for _, depth in inner), default=0)


@given(VALUES, st.sampled_from([1, 2, 3, 7, 1 << 18]))
def test_depth_is_exact_and_values_are_never_fewer_than_there_are(value: Any, chunk_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "CHUNK_BYTES", chunk_bytes)
        shape = shape_of(json.dumps(value, ensure_ascii=False).encode())
    num_values, depth = counted(value)
    assert shape.depth == depth
    assert num_values <= shape.num_values <= 2 * num_values + 1


@given(st.binary(max_size=200))
def test_bytes_that_are_no_json_are_measured_all_the_same(text: bytes) -> None:
    assert shape_of(text).num_values >= 1
