"""Bytes to frames under every split of the stream, and streams that are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import RemoteProtocolError
from minishuffle.ids import JobId, PartitionId
from minishuffle.wire.decoder import NO_MEMORY, FrameDecoder
from minishuffle.wire.frames import (
    BUFFER_HEADER_BYTES,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    AddCredit,
    BufferHeader,
    Close,
    Error,
    FrameType,
    Hello,
    PartitionRequest,
    Stable,
    encode_frame,
)
from support.frames import Recorder, buffer_response, decode

HELLO = Hello(1, "here", 3, 9, 4, b"n" * 32, b"p" * 32, counter=8)
REQUEST = PartitionRequest(PartitionId(JobId("j1"), 1, 2), 3, 4, 5, 6, channel=5, initial_credit=2)
STREAM = b"".join(
    [
        encode_frame(HELLO),
        buffer_response(7, b"0123456789"),
        encode_frame(AddCredit(((7, 3), (9, 1)))),
        buffer_response(99, b"to be discarded"),
        buffer_response(7, b""),
        encode_frame(Error(0, 22, "é")),
        buffer_response(8, b"x"),
        encode_frame(REQUEST),
        encode_frame(Stable(7, 2, 1 << 40)),
    ]
)


def test_every_split_in_two_gives_the_same_frames() -> None:
    whole = decode(STREAM)
    assert len(whole) == 9  # the discarded buffer leaves no trace
    for cut in range(len(STREAM) + 1):
        assert decode(STREAM[:cut], STREAM[cut:]) == whole, cut


def test_byte_by_byte() -> None:
    assert decode(*(bytes([octet]) for octet in STREAM)) == decode(STREAM)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_fragments(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert decode(*pieces) == decode(STREAM)


@given(st.lists(st.binary(max_size=64), max_size=8))
def test_garbage_gives_frames_or_the_documented_error(pieces: list[bytes]) -> None:
    recorder = Recorder()
    decoder = FrameDecoder(recorder, 256)
    with contextlib.suppress(RemoteProtocolError):
        for piece in pieces:
            decoder.receive(piece)
    assert len(recorder.seen) <= sum(map(len, pieces)) // FRAME_HEADER_BYTES


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (FRAME_HEADER.pack(4097, FrameType.MESSAGE, 0), "at most 4096"),
        (FRAME_HEADER.pack(4097, FrameType.BUFFER_RESPONSE, 0), "at most 4096"),
        (FRAME_HEADER.pack(4, FrameType.CLOSE, 0), "too short"),
        (FRAME_HEADER.pack(22, FrameType.BUFFER_RESPONSE, 0) + bytes(18), "too short"),
        (FRAME_HEADER.pack(5, 77, 0), "unknown type 77"),
        (encode_frame(AddCredit(((1, 0),))), "credit 0"),
        (encode_frame(AddCredit(((1, 1), (2, 0xFFFFFFFF)))), "credit 4294967295"),
        (FRAME_HEADER.pack(5, FrameType.ADD_CREDIT, 0), "names 1 to 4096 channels"),
        (FRAME_HEADER.pack(5 + 12, FrameType.ADD_CREDIT, 0), "names 1 to 4096 channels"),
        (FRAME_HEADER.pack(5 + 8 * 4097, FrameType.ADD_CREDIT, 0), "at most 4096 are|names 1 to 4096"),
        (FRAME_HEADER.pack(6, FrameType.CANCEL_PARTITION_REQUEST, 1) + b"\x00", "unknown reason 0"),
    ],
)
@pytest.mark.parametrize("bytewise", [False, True])
def test_bad_frames_are_refused_before_anything_is_allocated(
    stream: bytes, says: str, bytewise: bool
) -> None:
    pieces = [bytes([octet]) for octet in stream] if bytewise else [stream]
    with pytest.raises(RemoteProtocolError, match=says):
        decode(*pieces)


def test_a_payload_whose_memory_was_taken_back_is_skipped() -> None:
    recorder = Recorder()
    decoder = FrameDecoder(recorder, 4096)
    stream = buffer_response(7, b"0123456789") + encode_frame(Close())
    decoder.receive(stream[: BUFFER_HEADER_BYTES + 3])
    decoder.discard_payload()
    decoder.receive(stream[BUFFER_HEADER_BYTES + 3 :])
    assert recorder.seen == [Close()]


class Stubborn(Recorder):
    """Has memory for a payload when it is asked for the third time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def buffer_begin(self, header: BufferHeader) -> memoryview | None:
        self.asked += 1
        return NO_MEMORY if self.asked % 3 else super().buffer_begin(header)


def test_a_decoder_stops_in_front_of_a_payload_without_memory_wherever_it_is_cut() -> None:
    for cut in range(len(STREAM) + 1):
        recorder = Stubborn()
        decoder = FrameDecoder(recorder, 4096)
        for left in (STREAM[:cut], STREAM[cut:]):
            taken = decoder.receive(left)
            while decoder.stopped:
                left = left[taken:]
                taken = decoder.receive(left)
            assert taken == len(left)
        assert recorder.seen == decode(STREAM), cut
        assert recorder.asked == 3 * decoder.counts[FrameType.BUFFER_RESPONSE] == 12


def test_frames_are_counted_by_type_those_of_closed_channels_too() -> None:
    decoder = FrameDecoder(Recorder(), 4096)
    decoder.receive(STREAM)
    counted = {FrameType(kind).name: count for kind, count in enumerate(decoder.counts) if count}
    assert counted == {
        "HELLO": 1,
        "BUFFER_RESPONSE": 4,
        "ADD_CREDIT": 1,
        "ERROR": 1,
        "PARTITION_REQUEST": 1,
        "STABLE": 1,
    }
