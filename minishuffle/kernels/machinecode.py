"""Compiles the loops once for a machine, keeps the code in a file, and loads it.

numba compiles (a second or two, and 100 MB of memory); what it makes is one object file without any
reference outside, which llvmlite alone loads in milliseconds. So only the first process on a machine
ever imports numba. numba's own cache is not used: it does not notice when a function that was inlined
from another file has changed, and it needs all of numba to be loaded. Here the file's name has the
versions, the processor and a hash of the sources, so that code that fits is found or none.

The file is code: it is loaded only if nobody but this user and root can have written it.

A compiled loop is called through ctypes, which releases the interpreter's lock for the call.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from minishuffle.kernels.trust import distrusted

__all__ = ["KERNELS", "TEXT_SLACK", "kernel", "load_kernels", "text_kernel"]

log = logging.getLogger(__name__)

Loop: TypeAlias = Callable[..., int]

INT, WORD = "int64", "uint64"
INTS, WORDS, FLOATS, BYTES, PLACES = "int64[]", "uint64[]", "float64[]", "uint8[]", "uint32[]"
TO_INTS, TO_WORDS, TO_FLOATS, TO_BYTES = "> int64[]", "> uint64[]", "> float64[]", "> uint8[]"
TO_PLACES = "> uint32[]"
"""Vectors that a loop writes to."""
OFFSETS, TO_OFFSETS = "offsets[]", "> offsets[]"
"""Where Arrow's texts begin and end, in 32 or 64 bits: a loop is compiled for each (:func:`text_kernel`)."""

KERNELS: Final[dict[str, tuple[str, ...]]] = {
    "hash_words": (INTS, INT, WORD, TO_WORDS, INT),
    "hash_texts": (OFFSETS, BYTES, WORD, TO_WORDS, INT),
    "combine_hashes": (TO_WORDS, WORDS, INT),
    "choose_consumers": (WORDS, WORD, TO_INTS, INT),
    "arrange": (INTS, TO_INTS, TO_INTS, INT, INT),
    "sum_lengths": (OFFSETS, INTS, TO_OFFSETS, INT),
    "copy_texts": (OFFSETS, BYTES, INT, INTS, OFFSETS, TO_BYTES, INT),
    "count_arrays": (BYTES, INT),
    "find_keys": (PLACES, WORD, INTS, INT, INTS, TO_INTS, INT),
    "add_keys": (TO_PLACES, WORD, TO_INTS, INT, INTS, TO_INTS, INT, INT, TO_INTS, INT),
    "fill_table": (TO_PLACES, WORD, INTS, INT, INT),
    "write_texts": (OFFSETS, BYTES, TO_INTS, INT, INT, INT, INT),
    "fold_ints": (INT, TO_INTS, INTS, INTS, TO_INTS, INT, INT),
    "fold_wide": (TO_INTS, INTS, INTS, INT, TO_INTS, INT, INT),
    "fold_spread": (*[TO_FLOATS] * 3, INTS, *[FLOATS] * 3, TO_FLOATS, INT),
    "fold_floats": (INT, TO_FLOATS, INTS, FLOATS, TO_FLOATS, INT, INT),
    "link_rows": (INTS, INTS, INT, TO_INTS, WORD, TO_INTS, INT, INT),
    "find_rows": (INTS, INTS, INT, *[INTS] * 3, WORD, INTS, *[INT] * 3, *[TO_INTS] * 3, INT),
    "match_as_of": (INTS, INTS, INT, INTS, INTS, INT, TO_INTS, INT, TO_INTS),
    "assign_sessions": (INTS, INTS, *[TO_INTS] * 5, INT, INT, INT, TO_INTS, INT),
    "first_rows": (INTS, TO_BYTES, INT, TO_INTS, INT),
    "count_begun": (BYTES, INT),
    "deepest_nesting": (BYTES, INT),
}
"""The arguments of each function of ``loops`` that is compiled; all return an int64."""

TEXT_SLACK: Final = 7
"""Bytes of room behind its texts that ``copy_texts`` needs."""

_CHECKSUM_BYTES: Final = 16

_loading: Final = threading.Lock()
"""Several tasks may be the first to need a loop, in processes that do not load them at their start."""
_loaded: Final[dict[str, Loop]] = {}


def kernel(name: str) -> Loop:
    """The compiled loop of that name in :data:`KERNELS`.

    It takes numpy vectors, one after the other in memory, and ints, and raises ``ctypes.ArgumentError``
    for one of another type.
    """
    return load_kernels()[name]


def text_kernel(name: str, offsets: np.ndarray[Any, Any]) -> Loop:
    """The compiled loop of that name for texts with such offsets, int32 or int64."""
    return load_kernels()[f"{name}_int{8 * offsets.itemsize}"]  # the name of a dtype takes 2 µs


def load_kernels() -> dict[str, Loop]:
    """All loops by name, compiled first if they never were on this machine."""
    with _loading:
        if not _loaded:
            _loaded.update(_load())
    return _loaded


def _load() -> dict[str, Loop]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(_object_code()))
    engine.finalize_object()
    loops: dict[str, Loop] = {}
    for name, _, kinds in _variants():
        prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *map(_argument, kinds))
        loops[name] = prototype(engine.get_function_address(name))
    # The code is never freed: a thread without the interpreter's lock may run it until the process is gone.
    engine.detach()
    return loops


def _variants() -> Iterator[tuple[str, str, list[str]]]:
    """What is compiled: its name, that of the function, and its arguments."""
    for function, kinds in KERNELS.items():
        if OFFSETS not in kinds:
            yield function, function, list(kinds)
            continue
        for dtype in ("int32", "int64"):
            yield f"{function}_{dtype}", function, [kind.replace("offsets", dtype) for kind in kinds]


@cache
def _argument(kind: str) -> Any:
    """The ctypes type of an argument: one that checks vectors and passes their address."""
    if not kind.endswith("[]"):
        return {INT: ctypes.c_int64, WORD: ctypes.c_uint64}[kind]
    written = kind.startswith("> ")
    dtype = np.dtype(kind.removeprefix("> ").removesuffix("[]"))
    begin = ctypes.c_char * 0

    class Vector:
        @classmethod
        def from_param(cls, array: Any) -> Any:
            flags = array.flags
            if array.dtype != dtype or not flags.c_contiguous or (written and not flags.writeable):
                raise TypeError(f"expected {kind}, got {array.dtype} with the flags {flags}")
            if flags.writeable:  # An eighth of the time, which counts for batches of a few rows.
                return begin.from_buffer(array)
            return ctypes.c_void_p(array.__array_interface__["data"][0])

    return Vector


def _target() -> Any:
    """This very processor."""
    import llvmlite.binding as llvm

    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )


# --- the file -------------------------------------------------------------------------------------


def _object_code() -> bytes:
    """From the file if there is one that fits, else compiled; only one process at a time compiles."""
    try:
        path = _cache_folder() / _file_name()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why := distrusted(path):  # Whoever can write the file has this process run what is in it.
            log.warning(
                "the compiled loops in %s are not used, and this process compiles them anew: %s; take that "
                "right away, or set XDG_CACHE_HOME to a folder of your own",
                path.parent,
                why,
            )
            return _compile()
        code = _read(path)
        if code is None:
            with _locked(path.parent / "lock"):
                code = _read(path)
                if code is None:
                    code = _compile()
                    _write(path, code)
        return code
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        log.warning(
            "the compiled loops cannot be kept (%s), so each process compiles them anew when it starts: set "
            "XDG_CACHE_HOME to a folder that can be written to",
            error,
        )
        return _compile()


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is to be ignored, says the XDG base directory specification.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "minishuffle" / "kernels"


def _file_name() -> str:
    import llvmlite.binding as llvm

    names = f"numba-{version('numba')}-llvmlite-{version('llvmlite')}-{llvm.get_host_cpu_name()}"
    digest = hashlib.blake2b(llvm.get_host_cpu_features().flatten().encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return f"{names}-{digest.hexdigest()}.o"


def _checksum(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_CHECKSUM_BYTES).digest()


def _read(path: Path) -> bytes | None:
    """None if there is no whole file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    checksum, code = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    return code if checksum == _checksum(code) else None


def _write(path: Path, code: bytes) -> None:
    number, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(number, "wb") as file:
        file.write(_checksum(code) + code)
    os.replace(name, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the lock, which ends with the process that holds it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- compiling ------------------------------------------------------------------------------------


def _compile() -> bytes:
    """One object file with all kernels, by their own names."""
    import llvmlite.binding as llvm
    from numba import cfunc, types

    from minishuffle.kernels import loops

    pointer: Any = types.CPointer

    def numba_type(kind: str) -> Any:
        plain = getattr(types, kind.removeprefix("> ").removesuffix("[]"))
        return pointer(plain) if kind.endswith("[]") else plain

    module = llvm.parse_assembly("")
    for name, function, kinds in _variants():
        signature = types.int64(*map(numba_type, kinds))
        compiled = cfunc(signature, error_model="numpy")(getattr(loops, function))
        module.link_in(llvm.parse_assembly(compiled.inspect_llvm().replace(compiled.native_name, name)))
    return bytes(_target().emit_object(module))
