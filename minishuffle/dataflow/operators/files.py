"""The files that sources read: of this machine or of an object store, plain or compressed.

A path with ``://`` is a URI of a file system that pyarrow knows (``s3://bucket/folder``, ``gs://…``); its
options stand in the URI, as in ``s3://bucket/folder?region=eu-west-1``, and its credentials are found in the
environment of whoever reads: the client and every worker. Texts, CSV and JSON may be compressed, which the
end of the name says: ``.gz``, ``.bz2``, ``.zst`` or ``.lz4``.
"""

from __future__ import annotations

import glob
import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, Literal, TypeAlias, cast
from urllib.parse import quote, urlsplit

import pyarrow as pa

from minishuffle.dataflow.operators.inferred import InferredTypes, Part, UnfitNumber
from minishuffle.dataflow.operators.widertype import in_schema
from minishuffle.errors import UnknownName, UsageError
from minishuffle.exchange.schemas import with_innermost
from minishuffle.limits import BATCH_ROWS_MAX, INFERRED_FILE_BYTES_MAX, MIB

__all__ = [
    "Paths",
    "RecordFiles",
    "compression_of",
    "parsed_schema",
    "files_below",
    "files_of",
    "is_uri",
    "opened",
    "decompressed",
]

Paths: TypeAlias = "str | Path | Sequence[str | Path]"
"""A file, a directory, a URI of one of them, or a glob pattern, or several of these."""

COMPRESSIONS: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def is_uri(path: str | Path) -> bool:
    """Whether it names a file system, and not a file of this machine's."""
    return isinstance(path, str) and "://" in path


def compression_of(path: str) -> str | None:
    """How the file is compressed, by its name."""
    return COMPRESSIONS.get(PurePosixPath(urlsplit(path).path if is_uri(path) else path).suffix)


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
        UsageError: it cannot be opened, or (from its ``read``) not be decompressed.
    """
    file = opened(path)
    if (compression := compression_of(path)) is None:
        return cast("io.BufferedReader", file)
    return io.BufferedReader(_Reported(path, pa.CompressedInputStream(file, compression)), MIB)


class _Reported(io.RawIOBase):
    """A stream of pyarrow whose errors name the file."""

    def __init__(self, path: str, stream: Any) -> None:
        self._path = path
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        seekable: bool = self._stream.seekable()
        return seekable

    def readinto(self, buffer: Any) -> int:
        with _reported(self._path):
            count: int = self._stream.readinto(buffer)
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _reported(self._path):
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
def _reported(path: str) -> Iterator[None]:
    """Turn what the system says of a file into an error that names it."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


# --- which files ------------------------------------------------------------------------------------


def files_of(paths: Paths) -> list[str]:
    """All files meant, absolute or as URIs; a directory's and a pattern's sorted, hidden ones left out.

    Raises:
        UnknownName: there is no such file.
        UsageError: it is a URI of no file system, or one that does not answer.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise UsageError("a source needs at least one file")
    found: list[str] = []
    for item in given:
        if is_uri(item):
            found.extend(_files_of_uri(str(item)))
            continue
        path = Path(item).expanduser().absolute()
        if path.is_file():
            found.append(str(path))
            continue
        matches = path.iterdir() if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
        files = sorted(str(match) for match in matches if match.is_file() and match.name[0] not in "._")
        if not files:
            raise UnknownName(
                f"directory {path} has no files"
                if path.is_dir()
                else f"no file {path}: check the path, seen from the directory {Path.cwd()}"
            )
        found.extend(files)
    return found


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
        (_as_uri(str(root), path), PurePosixPath(path).relative_to(base).parts)
        for path in _listed(str(root), system, inside, recursive=True)
    ]


def _files_of_uri(uri: str) -> list[str]:
    from pyarrow.fs import FileType

    system, inside = _file_system(uri)
    with _reported(uri):
        kind = system.get_file_info(inside).type
    if kind == FileType.File:
        return [_as_uri(uri, inside)]
    files = [
        path
        for path in _listed(uri, system, inside, recursive=False)
        if PurePosixPath(path).name[0] not in "._"
    ]
    if not files:
        raise UnknownName(f"directory {uri} has no files")
    return [_as_uri(uri, path) for path in files]


def _listed(uri: str, system: Any, inside: str, *, recursive: bool) -> list[str]:
    from pyarrow.fs import FileSelector, FileType

    try:
        with _reported(uri):
            infos = system.get_file_info(FileSelector(inside, recursive=recursive))
    except UsageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            patterns = " (patterns are for files of this machine)" if "*" in inside else ""
            raise UnknownName(f"there is no file or directory {uri}{patterns}: check the path") from None
        raise
    return sorted(info.path for info in infos if info.type == FileType.File)


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


# --- records of files -------------------------------------------------------------------------------


def parsed_schema(schema: pa.Schema) -> pa.Schema:
    """What pyarrow is to make of texts: it has no word for numbers that are too large for short floats."""
    return pa.schema([field.with_type(with_innermost(field.type, _long)) for field in schema])


def _long(kind: pa.DataType) -> pa.DataType:
    return pa.float64() if pa.types.is_floating(kind) else kind


class RecordFiles:
    """Record batches of files that are read from first to last; a split is a file.

    ``schema`` None: the one that holds what :meth:`whole` makes of all files. Each is read in its own types
    then, and converted, so that a value that does not fit is noticed.
    """

    bounded = True
    format: Literal["arrow"] = "arrow"
    finds_times = False
    """What :meth:`whole` has as texts may be times."""

    def __init__(self, paths: Paths, schema: pa.Schema | None) -> None:
        self._splits = files_of(paths)
        self._own: dict[str, pa.Schema] = {}
        self.schema = self._inferred() if schema is None else schema

    def splits(self) -> list[str]:
        return self._splits

    def read(self, split: str, offset: int) -> Iterator[pa.RecordBatch]:
        with decompressed(split) as file:
            for batch in self.batches(split, file, self._own.get(split, self.schema)):
                for start in range(min(offset, batch.num_rows), batch.num_rows, BATCH_ROWS_MAX):
                    yield in_schema(batch.slice(start, BATCH_ROWS_MAX), self.schema, split)
                offset = max(0, offset - batch.num_rows)

    def whole(self, file: io.BytesIO) -> pa.Table:
        """The file in types that are inferred from all of it."""
        raise NotImplementedError

    def literals(self, file: io.BytesIO, parts: Collection[Part]) -> Iterator[tuple[Part, int, str]]:
        """All numbers of those parts as they stand in the file, each with the line of its record."""
        raise NotImplementedError

    def batches(self, path: str, file: io.BufferedReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The file's batches with the columns of that schema, of any length."""
        raise NotImplementedError

    def _inferred(self) -> pa.Schema:
        """The schema for all files, without columns if there are none. A column without values is text.

        Raises:
            UsageError: a file is larger than INFERRED_FILE_BYTES_MAX, cannot be read, or is not UTF-8; a
                column has types with none in common, or numbers that no type holds.
        """
        types = InferredTypes(self.finds_times)
        for path in self._splits:
            self._infer(path, types)
        try:
            own, schema = types.own(), types.common()
        except UnfitNumber as error:
            place = error.place
            file = io.BytesIO(_all_of(place.path))
            line = next(
                line for _, line, literal in self.literals(file, [place.part]) if literal == place.literal
            )
            raise UsageError(
                f"{place.path}, line {line}: column {place.name!r} has {place.literal:.40}, {error}: declare "
                "its type with schema=, such as float64, which rounds it"
            ) from None
        schema = pa.schema(
            field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema
        )
        self._own = {path: each for path, each in own.items() if not each.equals(schema)}
        return schema

    def _infer(self, path: str, types: InferredTypes) -> None:
        file = io.BytesIO(_all_of(path))
        try:
            table = self.whole(file)
            unclear = types.add(path, table)
            if unclear:
                file.seek(0)
                types.tell(path, self.literals(file, unclear))
        except pa.ArrowException as error:
            if not any(f"Empty {kind} file" in str(error) for kind in ("CSV", "JSON")):
                raise UsageError(f"{path}: {error}: correct the file, or declare schema=") from error
            return
        if not_text := [field.name for field in table.schema if pa.types.is_binary(field.type)]:
            raise UsageError(
                f"{path}: column {not_text[0]!r} is not UTF-8: convert the file first, with iconv for "
                "example, or declare the column as bytes with schema="
            )


def _all_of(path: str) -> bytes:
    """The file's bytes, decompressed. Raises UsageError: there are more than INFERRED_FILE_BYTES_MAX."""
    with decompressed(path) as file:
        data = file.read(INFERRED_FILE_BYTES_MAX + 1)
    if len(data) > INFERRED_FILE_BYTES_MAX:
        raise UsageError(
            f"{path} has more than {INFERRED_FILE_BYTES_MAX // MIB} MiB, and all of it would be read for "
            "the types of its columns: declare them with schema="
        )
    return data
