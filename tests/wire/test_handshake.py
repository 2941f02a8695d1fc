"""Both sides of a handshake against each other, against tampering, and against strangers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minishuffle import limits
from minishuffle.errors import AuthenticationError, LocalProtocolError
from minishuffle.wire.frames import (
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    PROTOCOL_VERSION,
    Frame,
    Hello,
    Ping,
    Reject,
    Role,
    Welcome,
    decode_body,
    encode_frame,
)
from minishuffle.wire.handshake import REASONS, Handshake, HandshakeRefused, Identity

SECRET = b"a secret of the cluster"
COORDINATOR = Identity(Role.COORDINATOR, "blue", 0, 0)
CLIENT = Identity(Role.CLIENT, "blue", 0, 0)
WORKER_1 = Identity(Role.WORKER, "blue", 1, 5)
WORKER_2 = Identity(Role.WORKER, "blue", 2, 6)
DIALER_NONCE = b"d" * 32
ACCEPTOR_NONCE = b"a" * 32
NONCE_AT = FRAME_HEADER_BYTES + 4 + 2 + 1 + 4 + 8 + 4 + 4


def dialer(identity: Identity = CLIENT, secret: bytes = SECRET, **options: object) -> Handshake:
    return Handshake(identity, secret, DIALER_NONCE, dialer=True, **options)  # type: ignore[arg-type]


def acceptor(identity: Identity = COORDINATOR, secret: bytes = SECRET, **options: object) -> Handshake:
    return Handshake(identity, secret, ACCEPTOR_NONCE, dialer=False, **options)  # type: ignore[arg-type]


def frame_of(data: bytes) -> Frame:
    length, kind, channel = FRAME_HEADER.unpack_from(data)
    assert length + 4 == len(data), "exactly one frame is expected"
    return decode_body(kind, channel, memoryview(data)[FRAME_HEADER_BYTES:])


def hello_of(data: bytes) -> Hello:
    frame = frame_of(data)
    assert isinstance(frame, Hello)
    return frame


def refusal(side: Handshake, data: bytes) -> HandshakeRefused:
    with pytest.raises(HandshakeRefused) as caught:
        side.receive(data)
    return caught.value


def run(one: Handshake, other: Handshake) -> HandshakeRefused | None:
    """Carry bytes between the two until both are done or one refuses; the refuser's verdict."""
    to_other = one.start()
    while one.peer is None or other.peer is None:
        try:
            to_one = other.receive(to_other)
        except HandshakeRefused as verdict:
            return verdict
        try:
            to_other = one.receive(to_one)
        except HandshakeRefused as verdict:
            return verdict
    return None


def test_two_workers_prove_themselves() -> None:
    low, high = dialer(WORKER_1, target=2, expected_epoch=6), acceptor(WORKER_2)
    assert run(low, high) is None
    assert (low.peer, high.peer) == (WORKER_2, WORKER_1)
    assert (low.leftover(), high.leftover()) == (b"", b"")


def test_the_acceptor_learns_how_often_it_was_dialed() -> None:
    low, high = dialer(replace(WORKER_1, counter=3), target=2), acceptor(WORKER_2)
    assert run(low, high) is None
    assert high.peer == replace(WORKER_1, counter=3)


def test_acceptor_says_nothing_first_and_dialer_shows_no_proof_first() -> None:
    assert acceptor().start() == b""
    assert hello_of(dialer().start()) == Hello(Role.CLIENT, "blue", 0, 0, 0, DIALER_NONCE, b"")


def test_every_split_of_the_bytes_gives_the_same() -> None:
    one, other = dialer(), acceptor()
    first = one.start()
    second = other.receive(first)
    third = one.receive(second)
    fourth = other.receive(third)
    assert one.receive(fourth) == b"" and one.peer == COORDINATOR
    for cut in range(1, max(len(first + third), len(second + fourth))):
        one, other = dialer(), acceptor()
        incoming = first + third
        assert other.receive(incoming[:cut]) + other.receive(incoming[cut:]) == second + fourth
        assert other.peer == CLIENT
        incoming = second + fourth
        assert (
            one.receive(incoming[:cut]) + (one.receive(incoming[cut:]) if cut < len(incoming) else b"")
            == third
        )
        assert one.peer == COORDINATOR


def test_bytes_behind_the_last_frame_are_left_over() -> None:
    one, other = dialer(), acceptor()
    welcome = other.receive(one.receive(other.receive(one.start())) + b"for the acceptor")
    assert one.receive(welcome + b"for the dialer") == b""
    assert (other.leftover(), one.leftover()) == (b"for the acceptor", b"for the dialer")


@pytest.mark.parametrize(
    ("one", "other", "reason", "text"),
    [
        (dialer(secret=b"another"), acceptor(), "secret", "do not have the same secret"),
        (dialer(Identity(Role.CLIENT, "red", 0, 0)), acceptor(), "cluster", "'red'"),
        (dialer(WORKER_1, target=3), acceptor(WORKER_2), "peer", "worker 3 was dialed, but worker 2"),
        (dialer(WORKER_1), acceptor(WORKER_2), "peer", "the coordinator was dialed, but worker 2"),
        (dialer(target=4), acceptor(), "peer", "worker 4 was dialed, but the coordinator"),
        (dialer(), acceptor(CLIENT), "peer", "the coordinator was dialed, but a client"),
        (
            dialer(WORKER_1, target=2, expected_epoch=7),
            acceptor(WORKER_2),
            "peer",
            "epoch 7 was dialed, epoch 6",
        ),
        (
            dialer(),
            acceptor(authorize=lambda peer: f"{peer} has no business here"),
            "peer",
            "a client has no",
        ),
    ],
)
def test_refusals(one: Handshake, other: Handshake, reason: str, text: str) -> None:
    verdict = run(one, other)
    assert verdict is not None
    assert verdict.reason == reason
    assert text in str(verdict)
    assert isinstance(verdict, AuthenticationError)


@pytest.mark.parametrize(
    ("first", "reason", "text"),
    [
        (replace(hello_of(dialer().start()), version=PROTOCOL_VERSION + 1), "version", "version 7"),
        (replace(hello_of(dialer().start()), magic=7), "malformed", "magic is 0x00000007"),
        (replace(hello_of(dialer().start()), role=9), "malformed", "role 9"),
        (replace(hello_of(dialer().start()), proof=b"p" * 32), "malformed", "a proof already"),
        (Ping(1), "malformed", "type 13"),
        (Welcome(0, 0), "malformed", "type 2"),
        (Reject(1, "no"), "malformed", "type 3"),
    ],
)
def test_acceptor_refuses_first_frames_and_says_why(first: Frame, reason: str, text: str) -> None:
    verdict = refusal(acceptor(), encode_frame(first))
    assert verdict.reason == reason
    assert text in str(verdict)
    assert frame_of(verdict.final_frame) == Reject(REASONS.index(reason) + 1, str(verdict))


def test_version_is_looked_at_before_the_rest() -> None:
    """Another version may lay out the rest otherwise."""
    body = (
        encode_frame(replace(hello_of(dialer().start()), version=PROTOCOL_VERSION + 1))[FRAME_HEADER_BYTES:][
            :6
        ]
        + b"new layout"
    )
    verdict = refusal(acceptor(), FRAME_HEADER.pack(len(body) + 5, 1, 0) + body)
    assert verdict.reason == "version"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        bytes(9),
        FRAME_HEADER.pack(limits.HANDSHAKE_FRAME_BYTES_MAX + 1, 1, 0),
        FRAME_HEADER.pack(7, 1, 0) + b"MS",
        FRAME_HEADER.pack(5 + 20, 1, 0) + encode_frame(hello_of(dialer().start()))[9:29],
    ],
)
def test_garbage_is_malformed_on_both_sides(garbage: bytes) -> None:
    assert refusal(acceptor(), garbage).reason == "malformed"
    assert refusal(dialer(), garbage).reason == "malformed"


def test_frame_of_the_largest_size_is_waited_for() -> None:
    other = acceptor()
    assert other.receive(FRAME_HEADER.pack(limits.HANDSHAKE_FRAME_BYTES_MAX, 1, 0)) == b""
    assert other.peer is None


def test_any_changed_bit_of_the_acceptors_hello_is_noticed() -> None:
    one = dialer()
    answer = acceptor().receive(one.start())
    for at in range(NONCE_AT, NONCE_AT + 32):
        assert refusal(dialer(), _flip(answer, at)).reason == "secret"
    for at in range(len(answer) - 32, len(answer)):
        assert refusal(dialer(), _flip(answer, at)).reason == "secret"


def test_any_changed_bit_of_the_dialers_hello_is_noticed() -> None:
    first = dialer().start()
    second = acceptor().receive(first)
    proof = dialer().receive(second)
    for at in [*range(NONCE_AT, NONCE_AT + 32), *range(len(proof) - 32, len(proof))]:
        other = acceptor()
        other.receive(first)
        assert refusal(other, _flip(proof, at)).reason in ("secret", "malformed")
        other = acceptor()
        if at < NONCE_AT + 32:
            other.receive(_flip(first, at))
            assert refusal(other, proof).reason == "secret"


def test_fields_that_change_between_the_two_hellos_are_noticed() -> None:
    one, other = dialer(WORKER_1, target=2), acceptor(WORKER_2)
    proof = hello_of(one.receive(other.receive(one.start())))
    assert refusal(other, encode_frame(replace(proof, worker=9))).reason == "malformed"


@pytest.mark.parametrize("claim", [{"worker": 7}, {"epoch": 99}, {"counter": 2}, {"role": Role.WORKER}])
def test_proof_covers_who_the_dialer_is(claim: dict[str, int]) -> None:
    """Someone on the path changes both Hellos of a dialer alike."""
    one, other = dialer(), acceptor()
    first = hello_of(one.start())
    answer = hello_of(other.receive(encode_frame(replace(first, **claim))))  # type: ignore[arg-type]
    assert answer.proof != _proved_for(first).proof
    proof = hello_of(one.receive(encode_frame(_proved_for(first))))
    assert refusal(other, encode_frame(replace(proof, **claim))).reason == "secret"  # type: ignore[arg-type]


def _proved_for(first: Hello) -> Hello:
    """What an acceptor that saw ``first`` would have answered."""
    return hello_of(acceptor().receive(encode_frame(first)))


@pytest.mark.parametrize("claim", [{"worker": 3}, {"epoch": 99}])
def test_proof_covers_who_the_acceptor_is(claim: dict[str, int]) -> None:
    one = dialer(WORKER_1, target=claim.get("worker", 2))
    first = replace(hello_of(one.start()), target=2)
    answer = hello_of(acceptor(WORKER_2).receive(encode_frame(first)))
    assert refusal(one, encode_frame(replace(answer, **claim))).reason == "secret"  # type: ignore[arg-type]


def test_nothing_sent_back_to_its_maker_proves_anything() -> None:
    assert refusal(dialer(), dialer().start()).reason == "peer"
    # A peer that plays back the acceptor's own words as a dialer, and the other way round.
    answer = hello_of(acceptor(WORKER_2).receive(dialer(WORKER_1, target=2).start()))
    twin = Handshake(WORKER_2, SECRET, ACCEPTOR_NONCE, dialer=False)
    twin.receive(encode_frame(replace(answer, target=2, proof=b"")))
    assert refusal(twin, encode_frame(replace(answer, target=2))).reason == "secret"
    mirrored = dialer(WORKER_2, target=2)
    first = hello_of(mirrored.start())
    verdict = refusal(mirrored, encode_frame(replace(first, proof=b"")))
    assert verdict.reason == "secret"
    proof = hello_of(dialer(WORKER_2, target=2).receive(acceptor(WORKER_2).receive(encode_frame(first))))
    assert refusal(dialer(WORKER_2, target=2), encode_frame(proof)).reason == "secret"


def test_old_proof_is_worth_nothing_in_a_new_handshake() -> None:
    one, other = dialer(), acceptor()
    first = one.start()
    proof = one.receive(other.receive(first))
    fresh = Handshake(COORDINATOR, SECRET, b"f" * 32, dialer=False)
    fresh.receive(first)
    assert refusal(fresh, proof).reason == "secret"


def test_dialer_that_finds_the_proof_wrong_lets_the_acceptor_know_without_a_proof_of_its_own() -> None:
    one, other = dialer(secret=b"another"), acceptor()
    verdict = refusal(one, other.receive(one.start()))
    assert verdict.reason == "secret"
    assert hello_of(verdict.final_frame).proof == b""
    told = refusal(other, verdict.final_frame)
    assert told.reason == "secret"
    assert frame_of(told.final_frame) == Reject(1, str(told))


def test_dialer_passes_on_a_reject_in_printable_characters() -> None:
    verdict = refusal(dialer(), encode_frame(Reject(3, "no\x1b[31m\n")))
    assert (verdict.reason, str(verdict), verdict.final_frame) == ("cluster", "no [31m ", b"")
    assert refusal(dialer(), encode_frame(Reject(77, "no"))).reason == "peer"


def test_dialer_is_told_of_a_refusal_after_its_proof() -> None:
    one, other = dialer(), acceptor(authorize=lambda peer: "epoch 3 is over")
    verdict = refusal(other, one.receive(other.receive(one.start())))
    told = refusal(one, verdict.final_frame)
    assert (told.reason, str(told)) == ("peer", "epoch 3 is over")


def test_a_refusal_that_is_no_utf8_reaches_the_peer_with_escapes() -> None:
    one, other = dialer(), acceptor(authorize=lambda peer: "not \udcff")
    verdict = refusal(other, one.receive(other.receive(one.start())))
    assert str(refusal(one, verdict.final_frame)) == "not \\udcff"


def test_long_refusal_is_cut_to_fit_a_handshake_frame() -> None:
    one, other = dialer(), acceptor(authorize=lambda peer: "ä" * 10_000)
    verdict = refusal(other, one.receive(other.receive(one.start())))
    assert len(verdict.final_frame) <= limits.HANDSHAKE_FRAME_BYTES_MAX
    assert str(refusal(one, verdict.final_frame)).startswith("ääää")


@pytest.mark.parametrize("frame", [Welcome(1, 0), Welcome(0, 1), hello_of(dialer().start())])
def test_dialer_takes_only_the_acceptors_own_welcome(frame: Frame) -> None:
    one, other = dialer(), acceptor()
    one.receive(other.receive(one.start()))
    assert refusal(one, encode_frame(frame)).reason == "malformed"


def test_dialer_takes_no_welcome_without_proof() -> None:
    assert refusal(dialer(), encode_frame(Welcome(0, 0))).reason == "malformed"


def test_authorize_sees_the_proven_peer_only() -> None:
    seen: list[Identity] = []

    def note(peer: Identity) -> str | None:
        seen.append(peer)
        return None

    one, other = dialer(secret=b"another"), acceptor(authorize=note)
    other.receive(one.start())
    refusal(other, one.start())
    assert seen == []
    assert run(dialer(), acceptor(authorize=note)) is None
    assert seen == [CLIENT]


def test_misuse_is_a_bug_of_ours() -> None:
    with pytest.raises(LocalProtocolError):
        dialer(secret=b"")
    with pytest.raises(LocalProtocolError):
        Handshake(CLIENT, SECRET, b"short", dialer=True)
    other = acceptor()
    refusal(other, bytes(9))
    with pytest.raises(LocalProtocolError):
        other.receive(b"more")


def _flip(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x40
    return bytes(changed)
