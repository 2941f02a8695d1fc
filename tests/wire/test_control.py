"""The byte stream of a control link."""

from __future__ import annotations

import pytest

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError, ResourceExhausted
from minishuffle.wire.control import MessageDecoder, encode_message
from minishuffle.wire.frames import (
    BUFFER_HEADER,
    FRAME_HEADER,
    AddCredit,
    Close,
    Frame,
    Hello,
    Message,
    Ping,
    encode_frame,
)
from minishuffle.wire.requests import ListJobs, ShowJob, SubmitJob


def test_every_split_gives_the_same_messages() -> None:
    stream = encode_message(ListJobs(), 1) + encode_message(ShowJob(job="j1"), 2**32 - 1)
    for cut in range(len(stream) + 1):
        decoder = MessageDecoder()
        received = []
        for part in (stream[:cut], stream[cut:]):
            decoder.receive(part)
            while decoder:
                received.append(decoder.take())
        assert received == [(ListJobs(), 1), (ShowJob(job="j1"), 2**32 - 1)]


@pytest.mark.parametrize(
    "frame",
    [
        Ping(1),
        Close(),
        AddCredit(((1, 1),)),
        Hello(1, "blue", 0, 0, 0, bytes(32)),
        Message(1, b"not msgpack"),
    ],
)
def test_nothing_but_messages_is_taken(frame: Frame) -> None:
    decoder = MessageDecoder()
    with pytest.raises(RemoteProtocolError):
        decoder.receive(encode_frame(frame))
        decoder.take()


@pytest.mark.parametrize(
    "data",
    [
        BUFFER_HEADER.pack(BUFFER_HEADER.size - 4, 5, 1, 0, 0, 1, 0, 0, 0, 0),
        FRAME_HEADER.pack(limits.CONTROL_FRAME_BYTES_MAX + 1, 15, 0),
        FRAME_HEADER.pack(5, 99, 0),
        FRAME_HEADER.pack(4, 15, 0),
    ],
)
def test_frames_that_no_control_link_carries(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        MessageDecoder().receive(data)


def test_what_fits_by_its_documents_fits() -> None:
    graph = bytes(limits.CONTROL_PAYLOAD_BYTES_MAX)
    data = encode_message(SubmitJob(name="n", python="3.11", graph=graph), 1)
    decoder = MessageDecoder(limits.MESSAGE_VALUES_MAX)
    decoder.receive(data)
    (message, _) = decoder.take()
    assert isinstance(message, SubmitJob) and len(message.graph) == 64 * limits.MIB


def test_message_too_large_is_refused_where_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONTROL_FRAME_BYTES_MAX", 1_000)
    assert len(encode_message(ShowJob(job="j" * 900), 1)) < 1_000
    with pytest.raises(ResourceExhausted, match="ShowJob of 10"):
        encode_message(ShowJob(job="j" * 1_000), 1)
