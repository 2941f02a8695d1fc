"""Where snapshots are: folders of a directory, or of an object store that pyarrow knows
(``s3://bucket/folder``).

A folder has files and folders; a file is written once, from its beginning to its end, and is never changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from minishuffle.errors import StorageUnavailable, UnreadableSnapshot, UsageError
from minishuffle.limits import STORE_SECONDS_MAX, STORE_TRIES
from minishuffle.snapshots.sealedmanifest import MANIFEST

__all__ = [
    "Entry",
    "Folder",
    "OpenFile",
    "folder_at",
    "folder_above",
    "place_below",
    "place_for_all",
    "without_credentials",
]


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder in a folder."""

    name: str
    is_folder: bool
    bytes: int
    """0 for a folder."""
    modified: float
    """Seconds since 1970."""


class OpenFile(Protocol):
    """A file that is being written."""

    def write(self, data: Any, /) -> Any:
        """Raises StorageUnavailable."""

    def close(self) -> None:
        """Have all of it outlive this machine. Raises StorageUnavailable."""

    def abandon(self) -> None:
        """What was written is of no use to anybody, and may stay."""


class Folder(Protocol):
    """A folder, which need not exist. Every method but :meth:`child` raises StorageUnavailable if the storage
    refuses, or does not answer."""

    where: str
    """Its path or URI, for errors and users."""

    def child(self, name: str) -> Folder:
        """The folder of that name in it."""

    def name(self) -> str:
        """Its own name, without those of the folders that it is in."""

    def entries(self) -> list[Entry]:
        """What is in it, by name; nothing if it does not exist."""

    def create(self, name: str) -> OpenFile:
        """Begin to write a file, in place of another of this name if there is one.

        Raises:
            StorageUnavailable: e.g. a folder on a disk is not there, as one that was removed meanwhile.
        """

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from ``offset`` on, fewer than ``length`` only if it has no more.

        Raises:
            UnreadableSnapshot: there is no such file.
        """

    def publish(self, name: str, data: bytes) -> None:
        """Write a whole file at once: whoever looks finds none, or all of it."""

    def remove(self) -> None:
        """Remove the folder with all that is in it. The manifest goes first: what is left is unfinished."""


def folder_at(where: str | Path) -> Folder:
    """The folder of a path, or of a URI of a file system that pyarrow knows.

    Raises:
        UsageError: it is no path of a directory and no such URI.
    """
    text = str(where)
    if "://" in text and not text.startswith("file://"):
        return _from_uri(text)
    text = text.removeprefix("file://")
    if not text or "\0" in text:
        raise UsageError(f"{text!r} cannot be the path of a directory: give another")
    return _Directory(_absolute(text))


def _absolute(path: str | Path) -> Path:
    """
    Raises:
        UsageError: it begins with the home of a user who is not there.
    """
    try:
        return Path(os.path.abspath(Path(path).expanduser()))
    except RuntimeError as error:
        raise UsageError(f"{path} cannot be the path of a directory: {error}") from error


def place_for_all(where: str | Path) -> str:
    """A path as other processes of this machine find it; a URI, or nothing, as it is. Raises UsageError as
    :func:`folder_at`."""
    text = str(where)
    return text if not text or "://" in text else str(_absolute(text))


def place_below(where: str, name: str) -> str:
    """The path or URI of a folder in that of another, with its options. Pure."""
    head, question, options = where.partition("?") if "://" in where else (where, "", "")
    return f"{head.rstrip('/')}/{name}{question}{options}"


def folder_above(where: str | Path) -> Folder:
    """The folder that the folder of a path or URI is in. Raises UsageError as :func:`folder_at`."""
    parts = urlsplit(str(where))
    if parts.scheme:
        return folder_at(parts._replace(path=parts.path.rstrip("/").rpartition("/")[0]).geturl())
    return folder_at(_absolute(where).parent)


# --- directories ------------------------------------------------------------------------------------------


@contextmanager
def _reported(where: str) -> Iterator[None]:
    """An OSError within becomes a StorageUnavailable that names the file."""
    try:
        yield
    except OSError as error:
        said = error.strerror or str(error)
        raise StorageUnavailable(
            f"{where}: {said}: see that it is there, that it may be written, and that there is room"
        ) from error


def _missing(where: str) -> UnreadableSnapshot:
    return UnreadableSnapshot(f"there is no {where}: it was removed, or was never written")


class _Written:
    """A file of a directory that is being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _reported(str(path)):
            self._file: BinaryIO = path.open("wb")

    def write(self, data: Any, /) -> None:
        with _reported(str(self._path)):
            self._file.write(data)

    def close(self) -> None:
        with _reported(str(self._path)), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            _sync_directory(self._path.parent)

    def abandon(self) -> None:
        try:
            self._file.close()
        except OSError:  # It could not write what was left.
            return


class _Directory:
    """A folder on a disk of this machine, or on one that machines share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.where = str(path)

    def child(self, name: str) -> Folder:
        return _Directory(self._path / name)

    def name(self) -> str:
        return self._path.name

    def entries(self) -> list[Entry]:
        try:
            with _reported(self.where), os.scandir(self._path) as found:
                each = [(entry.name, entry.is_dir(), stat) for entry in found if (stat := _stat(entry))]
        except StorageUnavailable as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return []
            raise
        return sorted(
            (
                Entry(name, is_folder, 0 if is_folder else stat.st_size, stat.st_mtime)
                for name, is_folder, stat in each
            ),
            key=lambda entry: entry.name,
        )

    def create(self, name: str) -> OpenFile:
        return _Written(self._path / name)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self._path / name
        try:
            with _reported(str(path)), path.open("rb") as file:
                file.seek(offset)
                return file.read(-1 if length is None else length)
        except StorageUnavailable as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise _missing(str(path)) from None
            raise

    def publish(self, name: str, data: bytes) -> None:
        path = self._path / name
        hidden = path.with_name(f".{name}.new")
        with _reported(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
        file = self.create(hidden.name)
        file.write(data)
        file.close()
        with _reported(str(path)):
            hidden.replace(path)
            _sync_directory(self._path)
            _sync_directory(self._path.parent)

    def remove(self) -> None:
        with _reported(self.where):
            (self._path / MANIFEST).unlink(missing_ok=True)
            _sync_directory(self._path)
            shutil.rmtree(self._path)


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """None: it was removed meanwhile. Of a link that leads nowhere, the link itself."""
    for follow in (True, False):
        with suppress(FileNotFoundError):
            return entry.stat(follow_symlinks=follow)
    return None


def _sync_directory(path: Path) -> None:
    """Have the names in it outlive this machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- object stores, and what else pyarrow knows -------------------------------------------------------------

_OBJECT_STORES: Final = ("s3", "gcs", "abfs")
"""Kinds of file systems that write a file in one request, and have no directories."""
_S3_OPTIONS: Final = ("scheme", "endpoint_override", "tls_ca_file_path")
"""Options of a URI; the region is found by it as well."""


def _from_uri(uri: str) -> Folder:
    from pyarrow.fs import FileSystem

    where = without_credentials(uri)
    try:
        with _reported(where):
            system, inside = FileSystem.from_uri(uri)
            if system.type_name == "s3":
                system = _bounded(system, uri)
    except ValueError as error:  # ArrowInvalid is one
        said = str(error).replace(uri, where)
        raise UsageError(
            f"{where} names no file system: {said}: write a path, or a URI such as s3://bucket/folder"
        ) from error
    return _Objects(system, inside.rstrip("/"), where)


def _bounded(system: Any, uri: str) -> Any:
    """The file system of an ``s3://`` URI, with bounds for its requests: by itself it waits for minutes. A
    short file is one request."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    parts = urlsplit(uri)
    options = {name: text for name, text in parse_qsl(parts.query) if name in _S3_OPTIONS}
    return S3FileSystem(
        access_key=None if parts.username is None else unquote(parts.username),
        secret_key=None if parts.password is None else unquote(parts.password),
        region=system.region,
        request_timeout=STORE_SECONDS_MAX,
        connect_timeout=STORE_SECONDS_MAX,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=STORE_TRIES),
        allow_delayed_open=True,
        **options,
    )


def without_credentials(where: str) -> str:
    """A path or URI as errors and events show it: an access key may stand in front of the bucket, and options
    behind it. Pure."""
    kind, mark, rest = where.partition("://")
    if not mark:
        return where
    bucket, slash, path = rest.partition("?")[0].partition("/")
    return f"{kind}://{bucket.rpartition('@')[2]}{slash}{path}".rstrip("/")


class _Upload:
    """A file of pyarrow's that is being written."""

    def __init__(self, stream: Any, where: str) -> None:
        self._stream = stream
        self._where = where

    def write(self, data: Any, /) -> None:
        with _reported(self._where):
            self._stream.write(data)

    def close(self) -> None:
        with _reported(self._where):
            self._stream.close()

    def abandon(self) -> None:
        try:
            self._stream.close()
        except OSError:  # It could not write what was left.
            return


class _Objects:
    """A folder of a file system of pyarrow's."""

    def __init__(self, system: Any, path: str, where: str) -> None:
        self._system = system
        self._path = path
        self.where = where

    def child(self, name: str) -> Folder:
        return _Objects(self._system, f"{self._path}/{name}", f"{self.where}/{name}")

    def name(self) -> str:
        return self._path.rpartition("/")[2]

    def entries(self) -> list[Entry]:
        from pyarrow.fs import FileSelector, FileType

        with _reported(self.where):
            infos = self._system.get_file_info(FileSelector(self._path, allow_not_found=True))
        found = [
            Entry(info.base_name, info.type == FileType.Directory, info.size or 0, (info.mtime_ns or 0) / 1e9)
            for info in infos
        ]
        return sorted(found, key=lambda entry: entry.name)

    def create(self, name: str) -> OpenFile:
        where = f"{self.where}/{name}"
        with _reported(where):
            if self._system.type_name not in _OBJECT_STORES:
                self._system.create_dir(self._path)
            return _Upload(self._system.open_output_stream(f"{self._path}/{name}"), where)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        where = f"{self.where}/{name}"
        try:
            with _reported(where), self._system.open_input_file(f"{self._path}/{name}") as file:
                size = file.size()
                wanted = max(0, size - offset) if length is None else length
                found: bytes = file.read_at(wanted, offset) if offset < size else b""
                return found
        except StorageUnavailable as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise _missing(where) from None
            raise

    def publish(self, name: str, data: bytes) -> None:
        direct = self._system.type_name in _OBJECT_STORES
        written = name if direct else f".{name}.new"
        file = self.create(written)
        file.write(data)
        file.close()
        if not direct:
            with _reported(f"{self.where}/{name}"):
                self._system.move(f"{self._path}/{written}", f"{self._path}/{name}")

    def remove(self) -> None:
        names = [entry.name for entry in self.entries()]
        with _reported(self.where):
            if MANIFEST in names:
                self._system.delete_file(f"{self._path}/{MANIFEST}")
            self._system.delete_dir(self._path)
