"""The files that sources read: of this machine or of an object store, plain or compressed.

A path with ``://`` is a URI of a file system that pyarrow knows (``s3://bucket/folder``, ``gs://…``); its
options stand in the URI, as in ``s3://bucket/folder?region=eu-west-1``, and its credentials are found in the
environment of whoever reads: the client and every worker. Texts, CSV and JSON may be compressed, which the
end of the name says: ``.gz``, ``.bz2``, ``.zst`` or ``.lz4``.

Files are listed once, in the program that builds the plan, and travel in it as :class:`PlannedFile`. Workers
list nothing: each split is of a file that was there then, and is read only if that is still the same.
"""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, TypeAlias, cast
from urllib.parse import quote, urlsplit

import pyarrow as pa

from minishuffle.errors import UnknownName, UsageError, WrongInput
from minishuffle.limits import MIB

__all__ = [
    "BEGINNING_BYTES",
    "PlannedFile",
    "Paths",
    "compression_of",
    "files_below",
    "files_of",
    "refuse_compressed",
    "is_uri",
    "opened",
    "decompressed",
]

Paths: TypeAlias = "str | Path | Sequence[str | Path]"
"""A file, a directory, a URI of one of them, or a glob pattern, or several of these."""

COMPRESSIONS: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_BEGINNINGS: Final = {
    b"\x1f\x8b\x08": ".gz",
    **{b"BZh%d1AY&SY" % level: ".bz2" for level in range(1, 10)},
    b"\x28\xb5\x2f\xfd": ".zst",
    b"\x04\x22\x4d\x18": ".lz4",
}
"""The first bytes of compressed files; of bzip2 there are nine sizes of blocks."""
BEGINNING_BYTES: Final = 10


def is_uri(path: str | Path) -> bool:
    """Whether it names a file system, and not a file of this machine's."""
    return isinstance(path, str) and "://" in path


def compression_of(path: str) -> str | None:
    """How the file is compressed, by its name."""
    return COMPRESSIONS.get(PurePosixPath(urlsplit(path).path if is_uri(path) else path).suffix)


def refuse_compressed(path: str, beginning: bytes) -> None:
    """Raises WrongInput if a file whose name does not say so begins as a compressed one does."""
    suffix = next((each for magic, each in _BEGINNINGS.items() if beginning.startswith(magic)), None)
    if suffix is not None:
        raise WrongInput(
            f"{path} is compressed by {COMPRESSIONS[suffix]}, which its name does not say: rename it to end "
            f"with {suffix}"
        )


# --- one file ---------------------------------------------------------------------------------------


def opened(path: str) -> BinaryIO:
    """The file as it is, for reading bytes anywhere in it.

    Raises:
        UsageError: it cannot be opened.
    """
    with _reported(path):
        if not is_uri(path):
            return open(path, "rb")
        system, inside = _file_system(path)
        return cast("BinaryIO", io.BufferedReader(_Reported(path, system.open_input_file(inside)), MIB))


def decompressed(path: str) -> io.BufferedReader:
    """The file's bytes from first to last, decompressed.

    Raises:
        UsageError: it cannot be opened, or (from its ``read``) not be read.
        WrongInput: it is compressed, and its name does not say so; (from its ``read``) what it holds cannot
            be decompressed.
    """
    file = opened(path)
    if (compression := compression_of(path)) is None:
        plain = cast("io.BufferedReader", file)
        try:
            refuse_compressed(path, plain.peek(BEGINNING_BYTES))
        except BaseException:
            plain.close()
            raise
        return plain
    stream = pa.CompressedInputStream(file, compression)
    return io.BufferedReader(_Reported(path, stream, damaged=WrongInput), MIB)


class _Reported(io.RawIOBase):
    """A stream of pyarrow whose errors name the file; those that are not of the operating system are
    ``damaged``."""

    def __init__(self, path: str, stream: Any, damaged: type[UsageError] = UsageError) -> None:
        self._path = path
        self._stream = stream
        self._damaged = damaged

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        seekable: bool = self._stream.seekable()
        return seekable

    def readinto(self, buffer: Any) -> int:
        with _reported(self._path, self._damaged):
            count: int = self._stream.readinto(buffer)
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _reported(self._path, self._damaged):
            position: int = self._stream.seek(offset, whence)
        return position

    def tell(self) -> int:
        position: int = self._stream.tell()
        return position

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


@contextmanager
def _reported(path: str, damaged: type[UsageError] = UsageError) -> Iterator[None]:
    """Name the file in errors of the system; errors of pyarrow about its contents become ``damaged``."""
    try:
        yield
    except OSError as error:
        kind = damaged if error.errno is None else UsageError
        raise kind(f"cannot read {path}: {error.strerror or error}") from error


# --- which files ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file as it was listed for a plan. ``size`` is in bytes, ``modified`` in microseconds since 1970 (a
    share that several machines mount may have no finer times on one of them); None: it is not known."""

    path: str
    """Absolute, or a URI."""
    size: int | None
    modified: int | None

    def check_unchanged(self) -> None:
        """Look at the file again, before it is read.

        Raises:
            WrongInput: it is gone, or has another size or time of change.
            UsageError: its file system does not answer.
        """
        found = _looked_up(self.path)
        if found is None:
            raise WrongInput(
                f"{self.path} is gone since the job was made, or is not on this worker's machine: put it "
                "where each worker finds it, or make the job again"
            )
        if found != self:
            raise WrongInput(
                f"{self.path} has changed since the job was made: it had {self._state()}, and now has "
                f"{found._state()}: make the job again"
            )

    def _state(self) -> str:
        size = "an unknown size" if self.size is None else f"{self.size:,} byte{'s' * (self.size != 1)}"
        if self.modified is None:
            return size
        seconds, rest = divmod(self.modified, 10**6)
        return f"{size} of {datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:06} UTC"


def _looked_up(path: str) -> PlannedFile | None:
    """The file as it is now; None: there is none."""
    with _reported(path):
        if is_uri(path):
            from pyarrow.fs import FileType

            system, inside = _file_system(path)
            info = system.get_file_info(inside)
            return None if info.type == FileType.NotFound else _listed_as(path, info)
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return PlannedFile(path, found.st_size, found.st_mtime_ns // 1000)


def _listed_as(path: str, info: Any) -> PlannedFile:
    """What a file system of pyarrow says of a file. Whole seconds: object stores may give fractions in lists,
    and none for one object."""
    modified = None if info.mtime_ns is None else info.mtime_ns // 10**9 * 10**6
    return PlannedFile(path, info.size, modified)


def files_of(paths: Paths) -> list[PlannedFile]:
    """All files meant, by absolute paths or URIs; a directory's and a pattern's sorted, hidden ones left out.

    Raises:
        UnknownName: there is no such file.
        UsageError: it is a URI of no file system, or one that does not answer.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise UsageError("a source needs at least one file")
    found: list[PlannedFile] = []
    for item in given:
        if is_uri(item):
            found.extend(_files_of_uri(str(item)))
            continue
        path = Path(item).expanduser().absolute()
        if path.is_file():
            found.extend(_of_this_machine([str(path)]))
            continue
        matches = path.iterdir() if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
        files = sorted(str(match) for match in matches if match.is_file() and match.name[0] not in "._")
        if not files:
            raise UnknownName(
                f"directory {path} has no files"
                if path.is_dir()
                else f"no file {path}: check the path, seen from the directory {Path.cwd()}"
            )
        found.extend(_of_this_machine(files))
    return found


def _of_this_machine(paths: Sequence[str]) -> list[PlannedFile]:
    """The files with their sizes and times. Raises UnknownName: one is gone already."""
    listed = []
    for path in paths:
        file = _looked_up(path)
        if file is None:
            raise UnknownName(f"no file {path}: it was there a moment ago")
        listed.append(file)
    return listed


def files_below(root: str | Path) -> list[tuple[str, tuple[str, ...]]]:
    """All files below a directory, sorted, each with the names of directories and file below that.

    Raises:
        UnknownName: there is no such directory.
        UsageError: it is a URI of no file system, or one that does not answer.
    """
    if not is_uri(root):
        top = Path(root).expanduser().absolute()
        if not top.is_dir():
            raise UnknownName(f"there is no directory {top}")
        return [(str(path), path.relative_to(top).parts) for path in sorted(top.rglob("*")) if path.is_file()]
    system, inside = _file_system(str(root))
    base = PurePosixPath(inside)
    return [
        (_as_uri(str(root), info.path), PurePosixPath(info.path).relative_to(base).parts)
        for info in _infos(str(root), system, inside, recursive=True)
    ]


def _files_of_uri(uri: str) -> list[PlannedFile]:
    from pyarrow.fs import FileType

    system, inside = _file_system(uri)
    with _reported(uri):
        only = system.get_file_info(inside)
    if only.type == FileType.File:
        infos = [only]
    else:
        infos = [
            info
            for info in _infos(uri, system, inside, recursive=False)
            if PurePosixPath(info.path).name[0] not in "._"
        ]
    if not infos:
        raise UnknownName(f"directory {uri} has no files")
    if urlsplit(uri).scheme == "file":
        return _of_this_machine([_as_uri(uri, info.path) for info in infos])
    return [_listed_as(_as_uri(uri, info.path), info) for info in infos]


def _infos(uri: str, system: Any, inside: str, *, recursive: bool) -> list[Any]:
    """What a file system of pyarrow says of each file in a directory, by their paths."""
    from pyarrow.fs import FileSelector, FileType

    try:
        with _reported(uri):
            infos = system.get_file_info(FileSelector(inside, recursive=recursive))
    except UsageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            patterns = " (patterns are for files of this machine)" if "*" in inside else ""
            raise UnknownName(f"there is no file or directory {uri}{patterns}: check the path") from None
        raise
    return sorted((info for info in infos if info.type == FileType.File), key=lambda info: info.path)


def _file_system(uri: str) -> tuple[Any, str]:
    """The file system of a URI, and the path in it."""
    from pyarrow.fs import FileSystem

    try:
        with _reported(uri):
            system, inside = FileSystem.from_uri(uri)
    except pa.ArrowInvalid as error:
        raise UsageError(
            f"{uri} names no file system: {error}: write a path, or a URI such as s3://bucket/folder"
        ) from error
    return system, inside


def _as_uri(given: str, inside: str) -> str:
    """The path ``inside`` the file system of the URI ``given``, with the same options; a path if that is
    this machine's."""
    parts = urlsplit(given)
    if parts.scheme == "file":
        return inside
    user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    place = parts.netloc if inside.startswith("/") else user
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{place}{quote(inside)}{query}"
