"""The manifest of a snapshot: what it says, and what of it may be taken for true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import ShuffleError, UnreadableSnapshot, UntrustedSnapshot
from minishuffle.snapshots.sealedmanifest import (
    SavedOperator,
    SavedSplit,
    SavedTask,
    SavedVertex,
    SnapshotManifest,
    WrittenState,
    seal,
    unseal,
)
from support.savedjobs import SECRET, manifest_of

OTHER = b"another secret of some length, too"
STATE = WrittenState("1-0-1.state", 300, 100, "ab" * 32, 7)
FULL = manifest_of(
    vertices=(SavedVertex("é => b", 2, (SavedOperator("b-1", "b", "reduce"),)),),
    tasks=(SavedTask(0, 0, "running", -5, STATE), SavedTask(0, 1, "waiting")),
    positions={"a": {"0": SavedSplit(0, 3), "x": SavedSplit(1, 1 << 60, bytes(range(256)), 5, ended=True)}},
    committed=bytes(range(256)),
)


@pytest.mark.parametrize("secret", [SECRET, b""])
@pytest.mark.parametrize("manifest", [FULL, manifest_of(kind="durable")])
def test_a_manifest_comes_back(manifest: SnapshotManifest, secret: bytes) -> None:
    data = seal(manifest, secret)
    assert unseal(data, "m", secret) == manifest
    assert SECRET not in data
    assert (manifest.states(), manifest.size()) in [((STATE,), 300), ((), 0)]


def test_a_manifest_that_is_cut_anywhere_is_refused() -> None:
    data = seal(FULL, SECRET)
    for length in range(len(data)):
        for trust in (False, True):
            with pytest.raises(UnreadableSnapshot, match=r"^folder/manifest (is|has) "):
                unseal(data[:length], "folder/manifest", SECRET, trust=trust)


@given(st.data())
def test_a_manifest_with_another_byte_is_refused(drawn: st.DataObject) -> None:
    data = bytearray(seal(FULL, SECRET))
    place = drawn.draw(st.integers(0, len(data) - 1))
    data[place] = drawn.draw(st.integers(0, 255).filter(lambda byte: byte != data[place]))
    with pytest.raises((UnreadableSnapshot, UntrustedSnapshot)):
        unseal(bytes(data), "m", SECRET)


def changed(manifest: SnapshotManifest, secret: bytes) -> bytes:
    """With contents of which the signature is not, and a right checksum, which anybody can make."""
    right, wrong = seal(manifest, secret), seal(replace(manifest, number=99), b"")
    signed_by, signature = re.findall(rb'"(?:signed_by|hmac)": "(\w+)"', right)
    wrong = wrong.replace(b'"signed_by": ""', b'"signed_by": "%s"' % signed_by)
    return wrong.replace(b'"hmac": ""', b'"hmac": "%s"' % signature)


@pytest.mark.parametrize(
    ("data", "secret", "why"),
    [
        (
            seal(FULL, OTHER),
            SECRET,
            "another secret: another cluster wrote it, or this one had another secret",
        ),
        (seal(FULL, b""), SECRET, "is not signed: a cluster without a secret wrote it"),
        (seal(FULL, SECRET), b"", "no secret here to verify it with: name its cluster with --cluster NAME"),
        (changed(FULL, SECRET), SECRET, "was changed after it was signed"),
    ],
)
def test_what_is_not_signed_under_this_secret_takes_trust(data: bytes, secret: bytes, why: str) -> None:
    with pytest.raises(UntrustedSnapshot, match=f"^m .*{why}.*--trust-snapshot"):
        unseal(data, "m", secret)
    assert unseal(data, "m", secret, trust=True).vertices == FULL.vertices


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"snapshot 1\n", b"snapshot 2\n", "format 2, and this release reads format 1: use the release"),
        (b'"hmac"', b'"mac"', "no seal in its last line"),
        (b'"number":1', b'"number":2', "does not have its checksum"),
        (b"minishuffle", b"maxishuffle", "is no manifest"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(old: bytes, new: bytes, why: str) -> None:
    with pytest.raises(UnreadableSnapshot, match=why):
        unseal(seal(FULL, SECRET).replace(old, new, 1), "m", SECRET, trust=True)


def test_fields_that_this_format_does_not_have_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShuffleError, match=r"^m has a wrong kind: Input should be 'savepoint' or 'durable'"):
        unseal(seal(manifest_of(kind="other"), SECRET), "m", SECRET)
