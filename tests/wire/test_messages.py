"""Every control message there and back, and what happens to anything else."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from annotated_types import Ge, Le
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import minishuffle.wire.clients
import minishuffle.wire.inquiries
import minishuffle.wire.outputs  # noqa: F401 - registers its messages
from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError
from minishuffle.wire.control import MessageDecoder, pack_message, unpack_message
from minishuffle.wire.frames import Message, encode_frame
from minishuffle.wire.messages import (
    ControlMessage,
    DeployTasks,
    ErrorInfo,
    InputSpec,
    TaskAttempt,
    TaskSpec,
    WorkerAddress,
)
from minishuffle.wire.packed import (
    Cursor,
    PeerRows,
    SplitPosition,
    pack_placement,
    pack_positions,
    pack_traffic,
)
from minishuffle.wire.registration import Register
from minishuffle.wire.reports import AttemptReport, TaskStateChanged
from minishuffle.wire.requests import GetRows, JobInfo, JobList, ListJobs
from support.attempts import attempt

ADDRESS = WorkerAddress(worker=7, epoch=1, host="10.0.0.7", data_port=5007)
MESSAGE_TYPES = tuple(ControlMessage.by_type.values())
INT_MAX = 2**63 - 1
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    type(None): st.none(),
    Any: st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=5),
}


def values(annotation: Any, metadata: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Values that a field of that type, with these bounds, takes."""
    annotation = getattr(annotation, "__supertype__", annotation)  # of a NewType
    if annotation in (int, float):
        least = next((bound.ge for bound in metadata if isinstance(bound, Ge)), 0)
        most = next((bound.le for bound in metadata if isinstance(bound, Le)), None)
        if annotation is float:
            return st.floats(least, most, allow_nan=False, allow_infinity=False)
        return st.integers(least, INT_MAX if most is None else most)
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values(arguments[0], arguments[1:])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=2)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if origin in (Union, UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        return st.builds(annotation, **{each.name: values(hints[each.name]) for each in fields(annotation)})
    return messages(annotation)


def messages(cls: type[ControlMessage]) -> st.SearchStrategy[ControlMessage]:
    fields = {name: values(field.annotation, field.metadata) for name, field in cls.model_fields.items()}
    if cls is InputSpec:
        fields |= {"operator": st.just(0), "first": st.integers(0, 2), "count": st.integers(0, 2)}
    if cls is DeployTasks:
        fields["workers"] = fields["workers"].map(lambda workers: [*workers, ADDRESS])
        fields["placement"] = st.just({0: pack_placement([ADDRESS.worker] * 4)})
    if "traffic" in fields:
        count = st.integers(0, 2**32 - 1)
        fields["traffic"] = st.lists(st.builds(PeerRows, *[count] * 7), max_size=2).map(pack_traffic)
    if "positions" in fields:
        rows = st.integers(0, 2**40)
        cursor = st.none() | st.builds(Cursor, st.text(max_size=3), st.binary(max_size=3), rows)
        entry = st.builds(SplitPosition, st.integers(0, 2**32 - 1), rows, rows, cursor=cursor)
        fields["positions"] = st.lists(entry, max_size=2).map(pack_positions)
    return st.builds(cls, **fields)


def test_every_module_of_messages_registers_its_own() -> None:
    modules = {cls.__module__.rpartition(".")[2] for cls in MESSAGE_TYPES}
    assert modules == {"messages", "registration", "reports", "requests", "clients", "outputs", "inquiries"}
    assert ErrorInfo not in MESSAGE_TYPES


def test_two_messages_of_one_name_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="'list_jobs'"):

        class Another(ControlMessage):
            type: Literal["list_jobs"] = "list_jobs"


@pytest.mark.parametrize("cls", MESSAGE_TYPES, ids=lambda cls: cls.__name__)
def test_round_trip(cls: type[ControlMessage]) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(messages(cls))
    def check(message: ControlMessage) -> None:
        body = pack_message(message)
        again = unpack_message(body)
        assert type(again) is cls
        assert again == message
        assert unpack_message(memoryview(body)) == message

    check()


def test_nested_and_empty_values_survive() -> None:
    fact = TaskStateChanged(
        attempt=attempt(0, 3, 2),
        state="failed",
        error=ErrorInfo(code=60, text="boom", traceback="Traceback…", task="count[3]"),
        result=b"\x00\xff",
    )
    message = AttemptReport(term=1, facts=[fact])
    again = unpack_message(pack_message(message))
    assert again == message and isinstance(again, AttemptReport)
    assert again.facts[0] == fact


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"type": "list_jobs", "surprise": 1}, "cannot be read"),
        ({"type": "no_such_type"}, "cannot be read"),
        ({"type": ["list_jobs"]}, "cannot be read"),
        ({}, "cannot be read"),
        ([], "cannot be read"),
        (None, "cannot be read"),
        ({"type": "get_rows"}, "cannot be read"),
        ({"type": "get_rows", "job": "j1", "after": "many"}, "cannot be read"),
        ({"type": "get_rows", "job": "j1", "after": [1]}, "cannot be read"),
        ({"type": "get_rows", 7: "j1"}, "cannot be read"),
    ],
)
def test_fields_that_do_not_fit(fields: Any, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        unpack_message(msgpack.packb(fields))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 5_000 + b"\xc0",
        b"\x81\x90\xc0",
        pack_message(ListJobs()) + b"\x00",
        b"\x81\xa1\xff\xc0",
        b"\xc7\x0c\xff" + b"\xff" * 12,
    ],
)
def test_bytes_that_are_not_one_message(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_message(body)


def keys(count: int) -> dict[str, int]:
    return {f"key {number}": 0 for number in range(count)}


HEARTBEAT = {"type": "heartbeat", "term": 1, "worker": 1, "epoch": 1, "report": {}, "tasks": [], "peers": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (lambda: {"type": "list_jobs", **keys(1_000_000)}, "exceeds max_map_len"),
        (lambda: {"type": "list_jobs", **keys(100_000)}, "a map has 100,001 keys, more than 64"),
        (lambda: HEARTBEAT | {"report": keys(100_000)}, "a map has 100,000 keys"),
        (lambda: HEARTBEAT | {"tasks": [{}] * 50_000}, "Heartbeat.tasks.0.attempt: Field required"),
        (lambda: {"type": "attempt_report", "term": 1, "facts": [{}] * 50_000}, "facts.0: Unable to extract"),
        (lambda: HEARTBEAT | {"tasks": [{}] * 100_000}, "more than 524,288 values"),
        (lambda: HEARTBEAT | {"tasks": [[]] * 500_000}, "more than 524,288 values"),
        (
            lambda: HEARTBEAT | {"tasks": ["x"] * 500_000},
            "Heartbeat.tasks.0: Input should be a valid dictionary",
        ),
        (
            lambda: {"type": "commit_write", "stream": "", "write": "", "partitions": ["x"] * 500_000},
            "partitions.0",
        ),
        (
            lambda: {
                "type": "commit_result",
                "job": "",
                "sink": "",
                "offsets": dict.fromkeys(range(250_000), "x"),
            },
            "off",
        ),
        (
            lambda: {"type": "show_job", "job": "x" * (limits.MESSAGE_TEXT_BYTES_MAX + 1)},
            "exceeds max_str_len",
        ),
    ],
)
def test_what_a_message_can_have_done_is_bounded(fields: Callable[[], Any], text: str) -> None:
    body = msgpack.packb(fields())
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match=text):
            unpack_message(body)
        assert tracemalloc.get_traced_memory()[1] < 64 * limits.MIB
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_what_the_coordinator_says_may_be_longer() -> None:
    job = JobInfo(job="j1", name="n", state="running", submitted_at=1.0)
    body = pack_message(JobList(jobs=[job] * 40_000))
    with pytest.raises(RemoteProtocolError, match="more than 524,288 values"):
        unpack_message(body)
    decoder = MessageDecoder()
    decoder.receive(encode_frame(Message(1, body)))
    (message, request) = decoder.take()
    assert request == 1 and isinstance(message, JobList) and len(message.jobs) == 40_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_port", -5),
        ("metrics_port", 65_536),
        ("slots", 2**62),
        ("slots", 0),
        ("segments", 2**62),
        ("segments", -1),
        ("segment_bytes", 0),
        ("pid", -1),
        ("pid", 2**63),
        ("requested_worker", 2**31),
        ("host", "x" * 1_025),
        ("python", "x" * 1_025),
    ],
)
def test_a_worker_that_cannot_be_is_not_read(field: str, value: Any) -> None:
    fields = {
        "type": "register",
        "host": "h",
        "data_port": 5,
        "metrics_port": 6,
        "pid": 7,
        "slots": 2,
        "python": "3.11",
        "segments": 10,
        "segment_bytes": 32_768,
    }
    assert isinstance(unpack_message(msgpack.packb(fields)), Register)
    with pytest.raises(RemoteProtocolError, match=rf"Register\.{field}: "):
        unpack_message(msgpack.packb(fields | {field: value}))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_wait_has_a_length(seconds: float) -> None:
    with pytest.raises(RemoteProtocolError, match=r"WaitJob\.wait_seconds: "):
        unpack_message(msgpack.packb({"type": "wait_job", "job": "j1", "wait_seconds": seconds}))


@pytest.mark.parametrize("cls", MESSAGE_TYPES, ids=lambda cls: cls.__name__)
def test_every_number_of_a_message_is_bounded(cls: type[ControlMessage]) -> None:
    for name, field in cls.model_fields.items():
        for bad in {int: (-2, 2**63), float: (-1.0, float("nan"))}.get(field.annotation, ()):  # type: ignore[arg-type]
            with pytest.raises(ValidationError) as caught:
                cls.model_validate({name: bad})
            assert any(error["loc"] == (name,) for error in caught.value.errors()), (name, bad)


@given(st.binary(max_size=200))
def test_garbage_gives_the_one_error(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_message(body)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
        max_leaves=10,
    ),
    st.sampled_from([cls.model_fields["type"].default for cls in MESSAGE_TYPES]),
)
def test_any_msgpack_under_any_type_is_read_or_refused(value: Any, kind: str) -> None:
    fields = {**value, "type": kind} if isinstance(value, dict) else value
    try:
        message = unpack_message(msgpack.packb(fields))
    except RemoteProtocolError:
        return
    assert isinstance(message, MESSAGE_TYPES)


@given(st.data())
def test_changed_bytes_are_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(pack_message(GetRows(job="job-one", after=70_000)))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = unpack_message(bytes(body))
    except RemoteProtocolError:
        return
    assert isinstance(message, MESSAGE_TYPES)


def test_text_that_is_no_unicode_is_escaped_and_not_lost() -> None:
    error = ErrorInfo(code=60, text="no file caf\udce9.csv")
    fact = TaskStateChanged(attempt=attempt(), state="failed", error=error)
    back = unpack_message(pack_message(AttemptReport(term=1, facts=[fact])))
    assert isinstance(back, AttemptReport) and isinstance(fact := back.facts[0], TaskStateChanged)
    assert fact.error is not None and fact.error.text == "no file caf\\udce9.csv"


# --- deployments ----------------------------------------------------------------------------------


def deployment(**fields: Any) -> DeployTasks:
    """Consumer 0 of operator 1 reads producers 1 and 2 of operator 0."""
    spec = InputSpec(edge=0, input=0, operator=0, first=1, count=2)
    task = TaskSpec(operator=1, name="join", index=0, parallelism=1, attempt=1, inputs=[spec], outputs=[])
    values = {
        "term": 1,
        "job": "j1",
        "name": "job",
        "settings": {},
        "programs": {1: b"program"},
        "tasks": [task],
        "workers": [ADDRESS.model_copy(update={"worker": worker}) for worker in (7, 8, 9)],
        "placement": {0: pack_placement([7, 8, 9])},
    }
    return DeployTasks(**values | fields)


def test_channels_are_named_by_range_and_attempts_by_exception() -> None:
    exceptions = [
        TaskAttempt(operator=0, index=2, attempt=5),
        TaskAttempt(operator=1, index=1, attempt=4),
        TaskAttempt(operator=0, index=0, attempt=3),
    ]
    back = unpack_message(pack_message(deployment(attempts=exceptions)))
    assert isinstance(back, DeployTasks)
    assert list(back.channels(back.tasks[0].inputs[0])) == [(1, 1, 8), (2, 5, 9)]


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ({}, "input 0 of operator 1 reads 2 producers from 1 on, operator 0 is placed with 0"),
        ({0: pack_placement([7, 8])}, "operator 0 is placed with 2"),
        ({0: pack_placement([7, 8, 3])}, "operator 0 is read from worker 3 without an address"),
        ({0: b"12345"}, "a placement of 5 bytes is not a table of u32"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(placement: dict[int, bytes], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        deployment(placement=placement)


def test_a_deployment_is_as_large_as_its_tasks_and_not_as_their_channels() -> None:
    """4,000 consumers of 8,000 producers have 32 million channels."""
    small, large = (
        len(pack_message(deployment(placement={0: pack_placement([7] * count)}, tasks=tasks)))
        for count, tasks in (
            (3, deployment().tasks),
            (
                8_000,
                [
                    deployment()
                    .tasks[0]
                    .model_copy(
                        update={"inputs": [InputSpec(edge=0, input=0, operator=0, first=0, count=8_000)]}
                    )
                ],
            ),
        )
    )
    assert large - small < 4.1 * 8_000
