"""The parts of the resident server that need no sandbox."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepswe.sandbox import server


@given(st.integers(0, 2**32 - 1), st.integers(0, 255), st.lists(st.binary(max_size=50)))
def test_a_frame_comes_back_as_it_went(call, kind, fields):
    frame = server.pack(call, kind, *fields)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert server.unpack(frame[4:]) == (call, kind, fields)


@pytest.mark.parametrize("body", [b"", b"\0\0\0\1", b"\0\0\0\1\1\0\0\0\5ab"])
def test_a_broken_frame_is_a_value_error(body):
    with pytest.raises(ValueError, match="frame"):
        server.unpack(body)


@given(st.lists(st.binary(max_size=40)), st.integers(0, 30))
def test_a_sink_keeps_the_two_ends_and_counts_the_rest(pieces, limit):
    sink = server.Sink(limit)
    for piece in pieces:
        sink.add(piece)
    whole = b"".join(pieces)
    kept = sink.kept()
    head, tail = limit - limit // 2, limit // 2
    expected = whole if len(whole) <= limit else whole[:head] + whole[len(whole) - tail :]
    assert kept == expected
    assert sink.dropped == len(whole) - len(kept)


def test_a_sink_never_holds_much_more_than_its_limit():
    sink = server.Sink(1000)
    for _ in range(1000):
        sink.add(b"x" * server.CHUNK)
        assert len(sink.head) + len(sink.tail) <= 1000 + 6 * server.CHUNK
    assert len(sink.kept()) == 1000
    assert sink.dropped == 1000 * server.CHUNK - 1000
