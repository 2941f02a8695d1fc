"""Where compiled loops are kept, what they take, and that they leave the interpreter's lock alone."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from minishuffle.kernels import machinecode
from minishuffle.kernels.machinecode import KERNELS, kernel, load_kernels

CODE = b"machine code"


class Compiler:
    """Stands for the one that takes seconds."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return CODE


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = Compiler()
    monkeypatch.setattr(machinecode, "_compile", compiler)
    return compiler


def the_file() -> Path:
    return machinecode._cache_folder() / machinecode._file_name()


def test_the_code_is_compiled_once_and_then_read(compiler: Compiler) -> None:
    assert [machinecode._object_code() for _ in range(3)] == [CODE] * 3
    assert compiler.calls == 1
    assert the_file().stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in the_file().parent.iterdir()) == ["lock", the_file().name]


@pytest.mark.parametrize("content", [b"", b"short", bytes(16) + CODE])
def test_a_damaged_file_is_compiled_anew(compiler: Compiler, content: bytes) -> None:
    machinecode._object_code()
    the_file().write_bytes(content)
    assert [machinecode._object_code() for _ in range(2)] == [CODE] * 2
    assert compiler.calls == 2


def test_a_process_that_waits_for_another_one_reads_what_that_compiled(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, found = threading.Event(), []
    read = machinecode._read

    def watched(path: Path) -> bytes | None:
        content = read(path)
        looked.set()
        return content

    monkeypatch.setattr(machinecode, "_read", watched)
    the_file().parent.mkdir(parents=True)
    waiting = threading.Thread(target=lambda: found.append(machinecode._object_code()))
    with machinecode._locked(the_file().parent / "lock"):
        waiting.start()
        assert looked.wait(20)
        machinecode._write(the_file(), b"from another process")
    waiting.join(20)
    assert (found, compiler.calls) == ([b"from another process"], 0)


def test_without_a_folder_that_can_be_written_each_start_compiles_and_warns_once(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert machinecode._object_code() == CODE
    assert compiler.calls == 1
    [record] = caplog.records
    assert "set XDG_CACHE_HOME to a folder that can be written to" in record.getMessage()


def test_what_others_may_have_written_is_neither_loaded_nor_replaced_and_warned_of_once(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    the_file().parent.mkdir(parents=True)
    machinecode._write(the_file(), b"another's code")
    assert machinecode._object_code() == b"another's code", "as long as it is one's own"
    tmp_path.chmod(0o777)
    try:
        with caplog.at_level(logging.WARNING):
            assert machinecode._object_code() == CODE
    finally:
        tmp_path.chmod(0o700)
    assert compiler.calls == 1
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the compiled loops in {the_file().parent} are not used, and this process compiles them anew: "
        f"others may write {tmp_path} (mode 0777); take that right away, or set XDG_CACHE_HOME to a folder "
        "of your own"
    )
    assert machinecode._object_code() == b"another's code"


def test_without_a_home_directory_it_compiles_and_warns_once(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/do/not/count")
    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        assert machinecode._object_code() == CODE
    assert (compiler.calls, len(caplog.records)) == (1, 1)


def test_the_file_is_another_one_for_other_sources_versions_and_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import llvmlite.binding as llvm

    names = [machinecode._file_name()]
    for source in Path(machinecode.__file__).parent.glob("*.py"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(machinecode, "__file__", str(tmp_path / "machinecode.py"))
    assert machinecode._file_name() == names[0]
    (tmp_path / "loops.py").write_text((tmp_path / "loops.py").read_text() + "\n")
    names.append(machinecode._file_name())
    monkeypatch.setattr(machinecode, "version", lambda package: "99")
    names.append(machinecode._file_name())
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "another")
    names.append(machinecode._file_name())
    assert len(set(names)) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_the_first_process_loads_the_compiler(tmp_path: Path) -> None:
    """With one loop: all of them take ten seconds of a processor."""
    program = (
        "import sys, numpy as np; from minishuffle.kernels import machinecode; "
        "machinecode.KERNELS = {'hash_words': machinecode.KERNELS['hash_words']}; "
        "hashes = np.empty(2, np.uint64); "
        "machinecode.kernel('hash_words')(np.array([0, 1]), 1, 0, hashes, 2); "
        "print([hex(hash) for hash in hashes], 'numba' in sys.modules)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        for _ in range(2)
    ]
    assert [run.stdout for run in runs] == [
        f"['0x0', '0x5692161d100b05e5'] {used}\n" for used in (True, False)
    ]
    assert [run.stderr for run in runs] == ["", ""]


def test_threads_that_load_the_loops_at_once_run_the_same_code() -> None:
    """Code that one of them loaded and another one let go crashed the process."""
    program = (
        "import threading, numpy as np\n"
        "from minishuffle.kernels.machinecode import kernel\n"
        "together = threading.Barrier(8)\n"
        "def run():\n"
        "    together.wait()\n"
        "    for _ in range(100):\n"
        "        kernel('hash_words')(np.arange(9), 1, 0, np.empty(9, np.uint64), 9)\n"
        "threads = [threading.Thread(target=run) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")


def test_each_loop_of_the_table_is_there() -> None:
    found = [name.removesuffix("_int32").removesuffix("_int64") for name in load_kernels()]
    assert sorted(set(found)) == sorted(KERNELS)
    assert sorted(name for name in KERNELS if found.count(name) == 2) == [
        "copy_texts",
        "hash_texts",
        "sum_lengths",
        "write_texts",
    ]


WORDS = np.arange(4)


@pytest.mark.parametrize(
    ("words", "hashes"),
    [
        (WORDS.astype(np.float64), np.empty(4, np.uint64)),
        (WORDS.astype(np.int32), np.empty(4, np.uint64)),
        (WORDS[::2], np.empty(2, np.uint64)),
        (WORDS, np.empty(4, np.int64)),
        (WORDS, np.frombuffer(bytes(32), np.uint64)),
        (WORDS, [0, 0, 0, 0]),
    ],
    ids=["floats", "narrow", "with gaps", "signed", "read-only", "a list"],
)
def test_vectors_of_another_kind_are_refused(words: np.ndarray, hashes: np.ndarray) -> None:
    with pytest.raises(ctypes.ArgumentError):
        kernel("hash_words")(words, 1, 0, hashes, len(words))


def test_read_only_and_unaligned_vectors_are_taken() -> None:
    data = b"x" + np.array([5, 6], np.int64).tobytes()
    hashes = np.empty(2, np.uint64)
    kernel("hash_words")(np.frombuffer(data, np.int64, offset=1), 1, 0, hashes, 2)
    expected = np.empty(2, np.uint64)
    kernel("hash_words")(np.array([5, 6]), 1, 0, expected, 2)
    assert hashes.tolist() == expected.tolist()


A_CALL_WITHOUT_END = """
import threading
import numpy as np
from minishuffle.kernels import machinecode
find, fill = machinecode.kernel("find_keys"), machinecode.kernel("fill_table")
stored, words, slots = np.array([7]), np.array([7, 8]), np.full(2, 99)
table = np.zeros(1024, np.uint32)
fill(table, 10, stored, 1, 1)
table[table == 0] = 1  # now every place is taken, by another key than 8
call = threading.Thread(target=find, args=(table, 10, stored, 1, words, slots, 2))
call.start()
while slots[0] != 0:
    pass
print("looking for 8")
table[:] = 0
call.join()
print(slots)
"""
"""A lookup that looks for a free place until another thread makes some."""


def test_other_threads_run_while_a_loop_runs() -> None:
    run = subprocess.run(
        [sys.executable, "-c", A_CALL_WITHOUT_END], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "looking for 8\n[ 0 -1]\n"
