"""The error tree as it crosses the wire."""

from __future__ import annotations

import pytest

from minishuffle import errors
from minishuffle.errors import (
    ShuffleError,
    UsageError,
    clipped,
    clipped_inside,
    counted,
    described,
    did_you_mean,
    encodable,
    error_from_code,
    text_of,
)
from minishuffle.wire.handshake import HandshakeRefused

CLASSES = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]


def test_codes_are_unique_and_fit_the_wire() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(CLASSES) > 10
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 1 << 16 for code in codes)


NUMBERS = {
    "ShuffleError": "MS-101",
    "UsageError": "MS-110",
    "UnknownName": "MS-111",
    "InvalidGraph": "MS-112",
    "UnserializableRecord": "MS-113",
    "CannotWrite": "MS-114",
    "WrongResult": "MS-115",
    "MissingColumn": "MS-116",
    "WrongColumns": "MS-117",
    "WrongInput": "MS-118",
    "LateRecord": "MS-119",
    "ProtocolError": "MS-120",
    "LocalProtocolError": "MS-121",
    "RemoteProtocolError": "MS-122",
    "AuthenticationError": "MS-130",
    "UntrustedSnapshot": "MS-131",
    "PeerLost": "MS-140",
    "PartitionNotFound": "MS-141",
    "Superseded": "MS-142",
    "PeerSuspected": "MS-143",
    "PartitionLost": "MS-144",
    "UnreadableSnapshot": "MS-145",
    "StateLost": "MS-147",
    "StorageUnavailable": "MS-146",
    "ResourceExhausted": "MS-150",
    "TaskFailed": "MS-160",
    "TaskCancelled": "MS-161",
    "RowsLost": "MS-162",
    "FatalRecord": "MS-163",
}
"""By class. Users look them up and programs compare them: none ever changes, or becomes another class's."""


def test_the_numbers_of_errors_never_change() -> None:
    assert {cls.__name__: cls.number for cls in CLASSES} == NUMBERS
    assert HandshakeRefused.number == "MS-130"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_survives_as_code_and_text(cls: type[ShuffleError]) -> None:
    again = error_from_code(cls.code, "what happened")
    assert type(again) is cls
    assert str(again) == "what happened"
    assert again.retriable == cls.retriable


def test_unknown_code_becomes_a_plain_error() -> None:
    again = error_from_code(9_999, "from a newer release")
    assert type(again) is ShuffleError
    assert str(again) == "from a newer release"


def test_subclass_without_a_code_of_its_own_arrives_as_its_base() -> None:
    refused = HandshakeRefused("secret", "no")
    assert type(error_from_code(refused.code, str(refused))) is errors.AuthenticationError


def test_only_what_may_pass_by_itself_is_worth_another_try() -> None:
    passing = {errors.PeerLost, errors.PeerSuspected, errors.PartitionNotFound, errors.StorageUnavailable}
    assert {cls for cls in CLASSES if cls.retriable} == passing


def test_the_callers_mistakes_are_usage_errors() -> None:
    mistakes = {cls for cls in CLASSES if issubclass(cls, UsageError)}
    assert mistakes == {
        UsageError,
        errors.UnknownName,
        errors.MissingColumn,
        errors.InvalidGraph,
        errors.UnserializableRecord,
        errors.CannotWrite,
        errors.WrongColumns,
        errors.WrongInput,
        errors.LateRecord,
        errors.WrongResult,
    }


def test_what_no_other_attempt_can_change_is_final() -> None:
    assert {cls for cls in CLASSES if cls.final} == {
        errors.CannotWrite,
        errors.MissingColumn,
        errors.WrongColumns,
        errors.WrongInput,
        errors.LateRecord,
        errors.WrongResult,
        errors.UnreadableSnapshot,
        errors.FatalRecord,
    }


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("short", "short"),
        ("x" * 100, "x" * 100),
        ("x" * 1_101, "x" * 36 + "… (1,065 more characters)"),
        ("half a \udc80", "half a ?"),
        ("a\tb\nc\x00\x1b[31m\r\x9b", r"a" "\tb\nc" r"\x00\x1b[31m\x0d\x9b"),
    ],
)
def test_text_is_cut_to_what_a_message_takes(text: str, cut: str) -> None:
    assert clipped(text, 100) == cut


def test_the_nearest_name_is_asked_for() -> None:
    assert did_you_mean("custmer", [1, "name", "customer"]) == "did you mean 'customer'? "
    assert did_you_mean("x", ["name"]) == ""


def test_one_thing_is_counted_in_the_singular() -> None:
    assert [counted(each, "row") for each in (0, 1, 1001)] == ["0 rows", "1 row", "1,001 rows"]
    assert counted(2, "entry", "entries") == "2 entries"


@pytest.mark.parametrize(
    ("encoding", "text", "found"),
    [
        ("ascii", "a\xfc\u4e16\U0001f600", "a\\xfc\\u4e16\\U0001f600"),
        ("utf-8", "a\xfc\udc80", "a\xfc\\udc80"),
        (None, "\u4e16", "\u4e16"),
    ],
)
def test_escapes_are_those_of_python(encoding: str | None, text: str, found: str) -> None:
    assert encodable(text, encoding) == found


def test_a_traceback_is_cut_in_its_middle() -> None:
    assert clipped_inside("short \udc80\x1b", 100) == r"short ?\x1b"
    text = "a" * 500 + "b" * 500
    cut = clipped_inside(text, 100)
    assert cut == "a" * 9 + "… (964 more characters) …" + "b" * 27
    assert len(cut) <= 100


@pytest.mark.parametrize(
    ("error", "text", "description"),
    [
        (PermissionError(13, "Permission denied", "/a"), "Permission denied: '/a'", "PermissionError: "),
        (OSError(28, "No space left on device"), "No space left on device", "OSError: "),
        (
            FileNotFoundError(2, "No such file", "a", None, "b"),
            "No such file: 'a' -> 'b'",
            "FileNotFoundError: ",
        ),
        (OSError("of one's own"), "of one's own", "OSError: "),
        (ValueError("no"), "no", "ValueError: "),
        (AssertionError(), "", "AssertionError"),
    ],
)
def test_an_error_is_described_without_numbers_and_never_by_an_empty_text(
    error: Exception, text: str, description: str
) -> None:
    assert text_of(error) == text
    assert described(error) == description + text
