"""Both sides of a handshake against each other, against tampering, and against strangers."""

from __future__ import annotations

from collections.abc import Callable
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


def frames_of(data: bytes) -> list[Frame]:
    found = []
    while data:
        length, kind, channel = FRAME_HEADER.unpack_from(data)
        found.append(decode_body(kind, channel, memoryview(data)[FRAME_HEADER_BYTES : length + 4]))
        data = data[length + 4 :]
    return found


def frame_of(data: bytes) -> Frame:
    (frame,) = frames_of(data)
    return frame


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


def test_acceptor_says_nothing_first_and_nobody_shows_a_proof_in_the_first_hello() -> None:
    assert acceptor().start() == b""
    first = dialer().start()
    assert hello_of(first) == Hello(Role.CLIENT, "blue", 0, 0, 0, DIALER_NONCE, b"")
    answer = Hello(Role.COORDINATOR, "blue", 0, 0, 0, ACCEPTOR_NONCE, b"")
    assert hello_of(acceptor().receive(first)) == answer


def test_who_does_not_know_the_secret_gets_nothing_to_guess_with_and_the_dialer_proves_itself_first() -> None:
    """What an acceptor sends before it has seen a proof is the same whatever its secret is."""
    for proof in (b"", bytes(32)):
        said = []
        for secret in (SECRET, b"another"):
            other = acceptor(secret=secret)
            first = dialer(secret=b"guess")
            answer = other.receive(first.start())
            mine = replace(hello_of(first.receive(answer)), proof=proof)
            said.append((answer, refusal(other, encode_frame(mine)).final_frame))
        assert said[0] == said[1]
    one, other = dialer(), acceptor()
    third = one.receive(other.receive(one.start()))
    assert len(hello_of(third).proof) == 32 and one.peer is None
    hello, welcome = frames_of(other.receive(third))
    assert isinstance(hello, Hello) and len(hello.proof) == 32 and welcome == Welcome(0, 0)


def test_every_split_of_the_bytes_gives_the_same() -> None:
    one, other = dialer(), acceptor()
    first = one.start()
    second = other.receive(first)
    third = one.receive(second)
    fourth = other.receive(third)
    assert one.receive(fourth) == b"" and one.peer == COORDINATOR
    for side, incoming, outgoing in (
        (acceptor, first + third, second + fourth),
        (dialer, second + fourth, first + third),
    ):
        for cut in range(1, len(incoming)):
            tried = side()
            said = tried.start() + tried.receive(incoming[:cut])
            assert tried.peer is None
            assert said + tried.receive(incoming[cut:]) == outgoing
            assert tried.peer is not None


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
        (replace(hello_of(dialer().start()), version=PROTOCOL_VERSION + 1), "version", "version 8"),
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
        bytes(9),
        FRAME_HEADER.pack(limits.HANDSHAKE_FRAME_BYTES_MAX + 1, 1, 0),
        FRAME_HEADER.pack(7, 1, 0) + b"MS",
        FRAME_HEADER.pack(5 + 20, 1, 0) + encode_frame(hello_of(dialer().start()))[9:29],
    ],
)
def test_garbage_is_malformed_on_both_sides(garbage: bytes) -> None:
    assert refusal(acceptor(), garbage).reason == "malformed"
    assert refusal(dialer(), garbage).reason == "malformed"


@pytest.mark.parametrize(
    ("side", "said", "text"),
    [
        (acceptor, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "the side that dialed uses TLS, and"),
        (dialer, b"\x15\x03\x03\x00\x02\x02\x46", "the side that was dialed uses TLS, and"),
    ],
)
def test_a_peer_that_uses_tls_alone_is_named_for_that(
    side: Callable[[], Handshake], said: bytes, text: str
) -> None:
    verdict = refusal(side(), said)
    assert (verdict.reason, str(verdict)[: len(text)]) == ("tls", text)
    assert "set tls_certificate, tls_key and tls_ca for both, or for neither" in str(verdict)


def test_a_proof_holds_for_the_connection_that_it_was_made_on() -> None:
    for bindings, good in (((b"one", b"one"), True), ((b"one", b"two"), False), ((b"one", b""), False)):
        one, other = dialer(), acceptor()
        one.binding, other.binding = bindings
        proof = one.receive(other.receive(one.start()))
        if good:
            one.receive(other.receive(proof))
            assert one.peer is not None and other.peer is not None
        else:
            assert refusal(other, proof).reason == "secret"


def test_frame_of_the_largest_size_is_waited_for() -> None:
    other = acceptor()
    assert other.receive(FRAME_HEADER.pack(limits.HANDSHAKE_FRAME_BYTES_MAX, 1, 0)) == b""
    assert other.peer is None


def test_any_changed_bit_of_the_acceptors_hellos_is_noticed() -> None:
    answer = acceptor().receive(dialer().start())
    for at in range(NONCE_AT, NONCE_AT + 32):
        one, other = dialer(), acceptor()
        proof = one.receive(_flip(other.receive(one.start()), at))
        assert refusal(other, proof).reason == "secret"
    for at in [*range(NONCE_AT, NONCE_AT + 32), *range(len(answer), len(answer) + 32)]:
        one, other = dialer(), acceptor()
        last = other.receive(one.receive(other.receive(one.start())))
        assert refusal(one, _flip(last, at)).reason in ("secret", "malformed")
        assert one.peer is None


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
    other.receive(encode_frame(replace(first, **claim)))  # type: ignore[arg-type]
    proof = hello_of(one.receive(acceptor().receive(encode_frame(first))))
    assert refusal(other, encode_frame(replace(proof, **claim))).reason == "secret"  # type: ignore[arg-type]


@pytest.mark.parametrize("claim", [{"worker": 3}, {"epoch": 99}])
def test_proof_covers_who_the_acceptor_is(claim: dict[str, int]) -> None:
    """Someone on the path changes what an acceptor says of itself."""
    one, other = dialer(WORKER_1, target=claim.get("worker", 2)), acceptor(WORKER_2)
    first = replace(hello_of(one.start()), target=2)
    answer = hello_of(other.receive(encode_frame(first)))
    proof = hello_of(one.receive(encode_frame(replace(answer, **claim))))  # type: ignore[arg-type]
    assert refusal(other, encode_frame(replace(proof, target=2))).reason == "secret"
    honest = dialer(WORKER_1, target=2)
    twin = acceptor(WORKER_2)
    hello, _ = frames_of(twin.receive(honest.receive(twin.receive(honest.start()))))
    assert isinstance(hello, Hello)
    assert refusal(one, encode_frame(replace(hello, **claim))).reason == "secret"  # type: ignore[arg-type]


def test_nothing_sent_back_to_its_maker_proves_anything() -> None:
    assert refusal(dialer(), dialer().start()).reason == "peer"
    # The dialer's own words, as an acceptor's.
    one = dialer(WORKER_2, target=2)
    first = hello_of(one.start())
    proof = hello_of(one.receive(encode_frame(first)))
    assert refusal(one, encode_frame(proof)).reason == "secret"
    # The acceptor's own words, as a dialer's.
    other = acceptor(WORKER_2)
    honest = dialer(WORKER_2, target=2)
    hello, _ = frames_of(other.receive(honest.receive(other.receive(honest.start()))))
    assert isinstance(hello, Hello)
    twin = acceptor(WORKER_2)
    twin.receive(encode_frame(replace(hello, proof=b"")))
    assert refusal(twin, encode_frame(hello)).reason == "secret"


def test_old_proof_is_worth_nothing_in_a_new_handshake() -> None:
    one, other = dialer(), acceptor()
    first = one.start()
    proof = one.receive(other.receive(first))
    fresh = Handshake(COORDINATOR, SECRET, b"f" * 32, dialer=False)
    fresh.receive(first)
    assert refusal(fresh, proof).reason == "secret"


def test_an_acceptor_with_another_secret_says_so_to_the_dialer() -> None:
    one, other = dialer(secret=b"another"), acceptor()
    verdict = refusal(other, one.receive(other.receive(one.start())))
    assert verdict.reason == "secret"
    assert frame_of(verdict.final_frame) == Reject(1, str(verdict))
    passed_on = refusal(one, verdict.final_frame)
    assert (passed_on.reason, str(passed_on)) == ("secret", str(verdict))


def test_a_dialer_that_is_welcomed_with_a_wrong_proof_only_closes() -> None:
    one, other = dialer(), acceptor()
    hello, _ = frames_of(other.receive(one.receive(other.receive(one.start()))))
    assert isinstance(hello, Hello)
    verdict = refusal(one, encode_frame(replace(hello, proof=bytes(32))))
    assert (verdict.reason, verdict.final_frame) == ("secret", b"")


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
    hello, _ = frames_of(other.receive(one.receive(other.receive(one.start()))))
    assert isinstance(hello, Hello)
    assert one.receive(encode_frame(hello)) == b""
    assert refusal(one, encode_frame(frame)).reason == "malformed"


def test_dialer_takes_no_welcome_without_proof() -> None:
    assert refusal(dialer(), encode_frame(Welcome(0, 0))).reason == "malformed"
    one = dialer()
    one.receive(acceptor().receive(one.start()))
    assert refusal(one, encode_frame(Welcome(0, 0))).reason == "malformed"
    assert one.peer is None


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
