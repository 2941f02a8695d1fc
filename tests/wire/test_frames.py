"""Frames to bytes and back, under every split of the stream."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError
from minishuffle.wire.frames import (
    BUFFER_HEADER_BYTES,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    AddCredit,
    BacklogAnnouncement,
    CancelPartitionRequest,
    Close,
    Error,
    Frame,
    FrameDecoder,
    FrameType,
    Hello,
    Message,
    NewBufferSize,
    PartitionRequest,
    Ping,
    Pong,
    Reject,
    ResumeConsumption,
    Welcome,
    decode_body,
    encode_frame,
    write_buffer_header,
)

HELLO = Hello(1, "here", 3, 9, 4, b"n" * 32, b"p" * 32)
REQUEST = PartitionRequest(5, "j1", 1, 2, 3, 4, 5, 6, 2)
FRAMES: list[tuple[Frame, str]] = [
    (AddCredit(7, 3), "00000009 06 00000007 00000003"),
    (BacklogAnnouncement(7, 4), "00000009 07 00000007 00000004"),
    (ResumeConsumption(7), "00000005 08 00000007"),
    (CancelPartitionRequest(7), "00000005 09 00000007"),
    (Close(), "00000005 0a 00000000"),
    (Error(7, 22, "no"), "0000000d 0b 00000007 0016 00000002 6e6f"),
    (NewBufferSize(7, 512), "00000009 0c 00000007 00000200"),
    (Ping(258), "0000000d 0d 00000000 0000000000000102"),
    (Pong(258), "0000000d 0e 00000000 0000000000000102"),
    (Message(9, b"\x80"), "00000006 0f 00000009 80"),
    (Welcome(3, 9), "00000011 02 00000000 00000003 0000000000000009"),
    (Reject(1, "no"), "0000000d 03 00000000 0001 00000002 6e6f"),
    (
        REQUEST,
        "00000025 04 00000005 00000001 00000002 00000003 00000004 00000005 00000006 00000002 0002 6a31",
    ),
    (
        HELLO,
        "00000063 01 00000000 4d534846 0001 01 00000003 0000000000000009 00000004"
        + "6e" * 32
        + "0004 68657265 20"
        + "70" * 32,
    ),
]


class Recorder:
    """A sink that lends memory for every payload but those of channel 99."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def frame(self, frame: Frame) -> None:
        self.seen.append(frame)

    def buffer_begin(self, channel: int, *fields: int) -> memoryview | None:
        self._header = (channel, *fields)
        self._memory = bytearray(fields[-1])
        return None if channel == 99 else memoryview(self._memory)

    def buffer_end(self) -> None:
        self.seen.append((self._header, bytes(self._memory)))


def buffer_response(channel: int, payload: bytes) -> bytes:
    memory = memoryview(bytearray(64 + len(payload)))
    memory[64:] = payload
    return bytes(write_buffer_header(memory, 64, len(payload), channel, 1, 2, 1, 3, 0, 5))


def decode(*pieces: bytes, limit: int = 4096) -> list[object]:
    recorder = Recorder()
    decoder = FrameDecoder(recorder, limit)
    for piece in pieces:
        decoder.receive(piece)
    return recorder.seen


@pytest.mark.parametrize(("frame", "expected"), FRAMES, ids=lambda value: type(value).__name__)
def test_bytes_of_each_frame_both_ways(frame: Frame, expected: str) -> None:
    assert encode_frame(frame).hex() == expected.replace(" ", "")
    assert decode(bytes.fromhex(expected)) == [frame]


def test_every_frame_type_but_data_is_in_the_table() -> None:
    names = {type(frame).__name__.upper() for frame, _ in FRAMES}
    assert names | {"BUFFERRESPONSE"} == {kind.name.replace("_", "") for kind in FrameType}


def test_buffer_header_lies_right_in_front_of_its_payload() -> None:
    memory = memoryview(bytearray(b"." * 64 + b"payload!"))
    frame = write_buffer_header(memory, 64, 8, 7, 0xFFFFFFFF, 2, 1, 4, 5, 6)
    assert frame.obj is memory.obj
    assert len(frame) == BUFFER_HEADER_BYTES + 8
    assert decode(bytes(frame)) == [((7, 0xFFFFFFFF, 2, 1, 4, 5, 6, 8), b"payload!")]
    assert bytes(memory[: 64 - BUFFER_HEADER_BYTES]) == b"." * (64 - BUFFER_HEADER_BYTES)


STREAM = b"".join(
    [
        encode_frame(HELLO),
        buffer_response(7, b"0123456789"),
        encode_frame(AddCredit(7, 3)),
        buffer_response(99, b"to be discarded"),
        buffer_response(7, b""),
        encode_frame(Error(0, 22, "é")),
        buffer_response(8, b"x"),
        encode_frame(REQUEST),
    ]
)


def test_every_split_in_two_gives_the_same_frames() -> None:
    whole = decode(STREAM)
    assert len(whole) == 7  # the discarded buffer leaves no trace
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


@given(st.sampled_from([frame for frame, _ in FRAMES]), st.data())
def test_truncated_or_longer_bodies_are_refused(frame: Frame, data: st.DataObject) -> None:
    encoded = encode_frame(frame)
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


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (FRAME_HEADER.pack(4097, FrameType.MESSAGE, 0), "at most 4096"),
        (FRAME_HEADER.pack(4097, FrameType.BUFFER_RESPONSE, 0), "at most 4096"),
        (FRAME_HEADER.pack(4, FrameType.CLOSE, 0), "too short"),
        (FRAME_HEADER.pack(22, FrameType.BUFFER_RESPONSE, 0) + bytes(18), "too short"),
        (FRAME_HEADER.pack(5, 77, 0), "unknown type 77"),
        (encode_frame(AddCredit(1, 1))[:9] + bytes(4), "credit 0"),
        (encode_frame(AddCredit(1, 1))[:9] + b"\xff" * 4, "credit 4294967295"),
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


def test_long_texts_are_cut_and_long_names_refused() -> None:
    frame = Error(1, 22, "é" * limits.ERROR_TEXT_BYTES_MAX)
    (decoded,) = decode(encode_frame(frame), limit=1 << 20)
    assert isinstance(decoded, Error)
    assert len(decoded.text.encode()) <= limits.ERROR_TEXT_BYTES_MAX
    assert frame.text.startswith(decoded.text)
    with pytest.raises(LocalProtocolError, match="at most"):
        encode_frame(replace(REQUEST, job="j" * (limits.NAME_BYTES_MAX + 1)))
