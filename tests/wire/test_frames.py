"""Frames to bytes and back, field by field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError
from minishuffle.ids import JobId, PartitionId
from minishuffle.wire.frames import (
    BUFFER_HEADER_BYTES,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    AddCredit,
    BacklogAnnouncement,
    CancelPartitionRequest,
    CancelReason,
    Close,
    Error,
    Frame,
    FrameType,
    Hello,
    Message,
    NewBufferSize,
    OneWay,
    PartitionRequest,
    Ping,
    Pong,
    Reject,
    ResumeConsumption,
    Stable,
    Welcome,
    decode_body,
    encode_frame,
)
from support.frames import Piece, buffer_header, decode

HELLO = Hello(1, "here", 3, 9, 4, b"n" * 32, b"p" * 32, counter=8)
REQUEST = PartitionRequest(
    PartitionId(JobId("j1"), 1, 2),
    3,
    4,
    5,
    6,
    channel=5,
    initial_credit=2,
    buffer_size=1024,
    version=7,
    row=258,
    one_way=8,
)
FRAMES: list[tuple[Frame, str]] = [
    (AddCredit(((7, 3), (9, 1))), "00000015 06 00000000 00000007 00000003 00000009 00000001"),
    (BacklogAnnouncement(7, 4), "00000009 07 00000007 00000004"),
    (ResumeConsumption(7, 2, 258), "0000000d 08 00000007 00000002 00000102"),
    (CancelPartitionRequest(7, CancelReason.MOVED), "00000006 09 00000007 03"),
    (Close(), "00000005 0a 00000000"),
    (Error(7, 22, "no"), "0000000d 0b 00000007 0016 00000002 6e6f"),
    (NewBufferSize(7, 512), "00000009 0c 00000007 00000200"),
    (Stable(7, 2, 258), "00000011 10 00000007 00000002 0000000000000102"),
    (Ping(258), "0000000d 0d 00000000 0000000000000102"),
    (Pong(258), "0000000d 0e 00000000 0000000000000102"),
    (Message(9, b"\x80"), "00000006 0f 00000009 80"),
    (Welcome(3, 9), "00000011 02 00000000 00000003 0000000000000009"),
    (Reject(1, "no"), "0000000d 03 00000000 0001 00000002 6e6f"),
    (
        REQUEST,
        "00000039 04 00000005 00000001 00000002 00000003 00000004 00000005 00000006 00000002"
        "00000400 00000007 0000000000000102 00000008 0002 6a31",
    ),
    (
        HELLO,
        "00000072 01 00000000 4d534846 0007 01 00000003 0000000000000009 00000008 00000004"
        + "6e" * 32
        + "0004 68657265 20"
        + "70" * 32
        + "00 00000000 00000000 0000",
    ),
    (
        replace(HELLO, proof=b"", one_way=OneWay("j1", 2, False, 7)),
        "00000054 01 00000000 4d534846 0007 01 00000003 0000000000000009 00000008 00000004"
        + "6e" * 32
        + "0004 68657265 00"
        + "02 00000002 00000007 0002 6a31",
    ),
]


@pytest.mark.parametrize(("frame", "expected"), FRAMES, ids=lambda value: type(value).__name__)
def test_bytes_of_each_frame_both_ways(frame: Frame, expected: str) -> None:
    """Cases 1, 3, 4, 6, 8, 14 and 21, NettyMessageServerSideSerializationTest and
    NettyMessageClientSideSerializationTest and InputChannelIDTest."""
    assert encode_frame(frame).hex() == expected.replace(" ", "")
    decoded = list(frame.grants) if isinstance(frame, AddCredit) else [frame]
    assert decode(bytes.fromhex(expected)) == decoded


def test_every_frame_type_but_data_is_in_the_table() -> None:
    names = {type(frame).__name__.upper() for frame, _ in FRAMES}
    assert names | {"BUFFERRESPONSE"} == {kind.name.replace("_", "") for kind in FrameType}


def test_buffer_header_lies_right_in_front_of_its_payload() -> None:
    """Case 11, NettyMessageClientSideSerializationTest."""
    memory = memoryview(bytearray(b"." * 64 + b"payload!"))
    (frame,) = Piece(memory, 8, 1, 4, 5, 6).chunks(7, 0xFFFFFFFF, 2)
    assert isinstance(frame, memoryview) and frame.obj is memory.obj
    assert len(frame) == BUFFER_HEADER_BYTES + 8
    header = buffer_header(7, 0xFFFFFFFF, 1, 8, backlog=2, flags=4, first_start=5, rows=6, row=9)
    assert decode(bytes(frame)) == [(header, b"payload!")]
    assert bytes(memory[: 64 - BUFFER_HEADER_BYTES]) == b"." * (64 - BUFFER_HEADER_BYTES)


def test_a_slice_of_a_segment_goes_out_as_one_that_fills_it() -> None:
    """Case 12, NettyMessageClientSideSerializationTest."""
    memory = memoryview(bytearray(b"." * 64 + b"sent" + b"payload!" + b"unsent"))
    (frame,) = Piece(memory, 8, 1, 4, 5, 6, start=68).chunks(7, 1, 2)
    header = buffer_header(7, 1, 1, 8, backlog=2, flags=4, first_start=5, rows=6, row=9)
    assert decode(bytes(frame)) == [(header, b"payload!")]
    assert bytes(memory[76:]) == b"unsent"


def test_nothing_is_written_in_front_of_a_payload_that_other_channels_send_too() -> None:
    """Case 28, PartitionRequestQueueTest."""
    memory = memoryview(bytearray(b"." * 64 + b"payload!"))
    piece = Piece(memory, 8, 1, 4, 5, 6, shared=True)
    frames = [piece.chunks(channel, channel + 1, 2) for channel in (7, 8)]
    assert bytes(memory[:64]) == b"." * 64
    for channel, (header, payload) in zip((7, 8), frames, strict=True):
        assert isinstance(payload, memoryview) and payload.obj is memory.obj, "it is not copied"
        expected = buffer_header(channel, channel + 1, 1, 8, backlog=2, flags=4, first_start=5, rows=6, row=9)
        assert decode(bytes(header) + payload) == [(expected, b"payload!")]


@given(st.sampled_from([frame for frame, _ in FRAMES]), st.data())
def test_truncated_or_longer_bodies_are_refused(frame: Frame, data: st.DataObject) -> None:
    encoded = encode_frame(frame)
    if isinstance(frame, AddCredit):
        with pytest.raises(RemoteProtocolError, match="malformed"):
            decode(FRAME_HEADER.pack(5 + data.draw(st.integers(17, 23)), FrameType.ADD_CREDIT, 0))
        return
    kind, channel = encoded[4], int.from_bytes(encoded[5:9], "big")
    body = encoded[FRAME_HEADER_BYTES:]
    if isinstance(frame, Message):
        assert decode_body(kind, channel, memoryview(body)) == frame
        return
    if body:
        cut = data.draw(st.integers(0, len(body) - 1))
        with pytest.raises(RemoteProtocolError, match="malformed"):
            decode_body(kind, channel, memoryview(body[:cut]))
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode_body(kind, channel, memoryview(body + b"?"))


def test_a_text_that_is_no_utf8_is_written_with_escapes() -> None:
    """A file name, say, that was read with ``surrogateescape``."""
    assert decode(encode_frame(Error(1, 22, "no file a\udcff"))) == [Error(1, 22, "no file a\\udcff")]


def test_long_texts_are_cut_and_long_names_refused() -> None:
    frame = Error(1, 22, "é" * limits.ERROR_TEXT_BYTES_MAX)
    (decoded,) = decode(encode_frame(frame), limit=1 << 20)
    assert isinstance(decoded, Error)
    assert len(decoded.text.encode()) <= limits.ERROR_TEXT_BYTES_MAX
    assert frame.text.startswith(decoded.text)
    with pytest.raises(LocalProtocolError, match="at most"):
        encode_frame(
            replace(REQUEST, partition=replace(REQUEST.partition, job="j" * (limits.NAME_BYTES_MAX + 1)))
        )
