"""The manifest of a snapshot: what its folder holds, and a seal that shows whether that is as it was. Pure.

It is a text of three lines::

    minishuffle snapshot 1
    {"release": "0.2.0", "kind": "savepoint", "number": 1, …}
    {"sha256": "…", "signed_by": "…", "hmac": "…"}

The first has the version of the format, of this file and of all others. The second is a
:class:`SnapshotManifest`. The third has the checksum of the two, and their HMAC under a key that is derived
from the secret of the cluster: the manifest has the checksums of the indexes of all files, and these have
those of the segments, so that the HMAC covers every byte of the snapshot. ``signed_by`` tells keys apart and
says nothing of the secret. A cluster without a secret does not sign; both are empty then.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeAlias

from pydantic import TypeAdapter, ValidationError

from minishuffle.errors import UnreadableSnapshot, UntrustedSnapshot

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "SnapshotManifest",
    "SavedOperator",
    "SavedSplit",
    "SavedTask",
    "SavedVertex",
    "SnapshotKind",
    "WrittenState",
    "fingerprint",
    "seal",
    "unseal",
]

FORMAT_VERSION: Final = 1
"""A release that changes the contents of a snapshot's files uses the next number. ``tests/snapshots/formats``
has a snapshot of each, which stays readable."""
MANIFEST: Final = "manifest"
"""Its name in the folder."""
_MAGIC: Final = b"minishuffle snapshot "
SnapshotKind: TypeAlias = Literal["savepoint", "durable"]
"""Who asked for it: a user, to whom it belongs; or the job's interval, and then a later one takes its
place."""
TaskPhase: TypeAlias = Literal["running", "ended", "waiting"]


class _Saved:
    """Base class of what a manifest consists of: an unknown field is an error, bytes are Base64."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "ser_json_bytes": "base64",
        "val_json_bytes": "base64",
    }


@dataclass(frozen=True, slots=True)
class WrittenState(_Saved):
    """The state of one task, in a file of the snapshot's folder."""

    file: str
    """Its name in the folder."""
    bytes: int
    """Its length, that of its index included."""
    index_bytes: int
    """The length of the index of its segments, at its end."""
    checksum: str
    """The SHA-256 of the index, in hexadecimal. The index has those of the segments."""
    rows: int
    """Rows of all segments."""


@dataclass(frozen=True, slots=True)
class SavedOperator(_Saved):
    """An operator that may have state."""

    id: str
    """That of its state, the same in each plan of the job."""
    name: str
    kind: str
    keys: tuple[str, ...] = ()
    """The names of the columns that it goes by; none: keys are values of Python."""
    outputs: tuple[str, ...] = ()
    """The names of its aggregates."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """What its state is made of, by what of it: see ``plan.graph.StatefulOperator``."""


@dataclass(frozen=True, slots=True)
class SavedVertex(_Saved):
    """A vertex of the job's graph."""

    name: str
    parallelism: int
    operators: tuple[SavedOperator, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedTask(_Saved):
    """What one subtask held at the cut."""

    vertex: int
    """Its vertex, by position in ``SnapshotManifest.vertices``."""
    index: int
    state: TaskPhase
    """Whether it had ended, or its region had not begun."""
    watermark: int | None = None
    """The last that it had passed on: microseconds since 1970. None: none yet."""
    written: WrittenState | None = None
    """None: it has no state."""


@dataclass(frozen=True, slots=True)
class SavedSplit(_Saved):
    """How far a source is in one of its splits."""

    number: int
    """The split's number."""
    rows: int
    """Rows of it that precede the cut."""
    cursor: bytes = b""
    """The source's own position, from which a split with a name is read on."""
    cursor_rows: int = 0
    """Rows of it that precede the cursor."""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotManifest(_Saved):
    """All there is to know of a snapshot but for the state itself."""

    release: str
    """The version of minishuffle that wrote it."""
    kind: SnapshotKind
    number: int
    """Counts the snapshots of its job."""
    taken_at: float
    """Seconds since 1970."""
    cluster: str
    job: str
    """The job's id in that cluster."""
    name: str
    """The job's name."""
    vertices: tuple[SavedVertex, ...] = ()
    tasks: tuple[SavedTask, ...] = ()
    positions: Mapping[str, Mapping[str, SavedSplit]] = field(default_factory=dict)
    """By the id of a source's operator and the name or number of a split."""
    committed: bytes = b""
    """What the sinks have committed: a table of the coordinator's own."""

    def states(self) -> tuple[WrittenState, ...]:
        """The files of all tasks that have any."""
        return tuple(task.written for task in self.tasks if task.written is not None)

    def size(self) -> int:
        """The bytes of all files but the manifest."""
        return sum(written.bytes for written in self.states())


_MANIFESTS: Final = TypeAdapter(SnapshotManifest)


def fingerprint(manifest: SnapshotManifest) -> str:
    """What tells a manifest from all others, those of later snapshots in the same folder too."""
    return hashlib.sha256(_MANIFESTS.dump_json(manifest)).hexdigest()[:32]


def seal(manifest: SnapshotManifest, secret: bytes) -> bytes:
    """The contents of a manifest's file, signed under the ``secret`` of the cluster unless that is empty."""
    body = b"%s%d\n%s\n" % (_MAGIC, FORMAT_VERSION, _MANIFESTS.dump_json(manifest))
    lines = {"sha256": hashlib.sha256(body).hexdigest(), "signed_by": "", "hmac": ""}
    if secret:
        lines |= {"signed_by": _signer(secret), "hmac": _signature(secret, body)}
    return body + json.dumps(lines).encode() + b"\n"


def unseal(data: bytes, where: str, secret: bytes, *, trust: bool = False) -> SnapshotManifest:
    """The manifest in the contents of a file.

    Args:
        where: what errors call the file.
        secret: of the cluster that is to use the snapshot; empty: it has none.
        trust: take one that is not signed under this secret, but no broken one.

    Raises:
        UnreadableSnapshot: it is cut, changed, or of another format.
        UntrustedSnapshot: it is not signed under this secret, or was changed by somebody who does not have
        it.
    """
    lines = data.splitlines(keepends=True)
    if not lines or not lines[0].endswith(b"\n") or not lines[0].startswith(_MAGIC):
        raise UnreadableSnapshot(f"{where} is no manifest of a snapshot, or was cut at its beginning")
    version = lines[0].removeprefix(_MAGIC).strip()
    if version != b"%d" % FORMAT_VERSION:
        raise UnreadableSnapshot(
            f"{where} has format {version.decode(errors='replace'):.20}, and this release reads format "
            f"{FORMAT_VERSION}: use the release that wrote it, or a later one"
        )
    if len(lines) != 3 or not lines[2].endswith(b"\n"):
        raise UnreadableSnapshot(f"{where} is cut after {len(data):,} bytes: use the snapshot before it")
    body, found = b"".join(lines[:2]), _seal_of(lines[2], where)
    if found["sha256"] != hashlib.sha256(body).hexdigest():
        raise UnreadableSnapshot(
            f"{where} does not have its checksum: it was changed; use the snapshot before it"
        )
    if not trust:
        _verify(body, found, where, secret)
    try:
        return _MANIFESTS.validate_json(lines[1])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UnreadableSnapshot(f"{where} has a wrong {place:.80}: {first['msg']}") from None


def _seal_of(line: bytes, where: str) -> dict[str, str]:
    try:
        found = json.loads(line)
        return {name: str(found[name]) for name in ("sha256", "signed_by", "hmac")}
    except (ValueError, TypeError, KeyError):
        raise UnreadableSnapshot(f"{where} has no seal in its last line: it was cut or changed") from None


def _verify(body: bytes, found: dict[str, str], where: str, secret: bytes) -> None:
    """
    Raises:
        UntrustedSnapshot: see :func:`unseal`.
    """
    fix = "if you know where it comes from, open it with --trust-snapshot (trust=True)"
    if not secret:
        if found["signed_by"]:
            raise UntrustedSnapshot(
                f"{where} is signed, and there is no secret here to verify it with: name its cluster with "
                f"--cluster NAME, or the file of the secret with --secret-file (secret_file=), or, {fix}"
            )
        return
    if not found["signed_by"]:
        raise UntrustedSnapshot(f"{where} is not signed: a cluster without a secret wrote it; {fix}")
    if found["signed_by"] != _signer(secret):
        raise UntrustedSnapshot(
            f"{where} is signed under another secret: another cluster wrote it, or this one had "
            f"another secret then; {fix}"
        )
    if not hmac.compare_digest(found["hmac"].encode(), _signature(secret, body).encode()):
        raise UntrustedSnapshot(
            f"{where} was changed after it was signed, by somebody without the secret; {fix}"
        )


def _signer(secret: bytes) -> str:
    """What tells secrets apart, and says nothing of them."""
    return hmac.digest(secret, b"minishuffle snapshots, name of the key", "sha256").hex()[:16]


def _signature(secret: bytes, body: bytes) -> str:
    key = hmac.digest(secret, b"minishuffle snapshots, key", "sha256")
    return hmac.digest(key, body, "sha256").hex()
