"""A streaming shuffle runtime: worker processes exchange keyed data with credit-based flow control.

::

    from minishuffle import LocalCluster, Stream

    counts = Stream.text("moby.txt").flat_map(str.split).key_by(lambda word: word).count()
    with LocalCluster(workers=2) as cluster:
        for word, count in cluster.run(counts.collect()):
            print(word, count)

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from minishuffle.api.columns import ColumnExpression as ColumnExpression
    from minishuffle.api.columns import col as col
    from minishuffle.api.stream import KeyedStream as KeyedStream
    from minishuffle.api.stream import KeyedTable as KeyedTable
    from minishuffle.api.stream import Stream as Stream
    from minishuffle.api.stream import Table as Table
    from minishuffle.api.stream import WindowedStream as WindowedStream
    from minishuffle.api.stream import WindowedTable as WindowedTable
    from minishuffle.client import Client as Client
    from minishuffle.client import JobHandle as JobHandle
    from minishuffle.client import JobResult as JobResult
    from minishuffle.connectors.sinks import Sink as Sink
    from minishuffle.errors import AuthenticationError as AuthenticationError
    from minishuffle.errors import CannotWrite as CannotWrite
    from minishuffle.errors import FatalRecord as FatalRecord
    from minishuffle.errors import InvalidGraph as InvalidGraph
    from minishuffle.errors import LateRecord as LateRecord
    from minishuffle.errors import LocalProtocolError as LocalProtocolError
    from minishuffle.errors import MissingColumn as MissingColumn
    from minishuffle.errors import PartitionLost as PartitionLost
    from minishuffle.errors import PartitionNotFound as PartitionNotFound
    from minishuffle.errors import PeerLost as PeerLost
    from minishuffle.errors import PeerSuspected as PeerSuspected
    from minishuffle.errors import ProtocolError as ProtocolError
    from minishuffle.errors import RemoteProtocolError as RemoteProtocolError
    from minishuffle.errors import ResourceExhausted as ResourceExhausted
    from minishuffle.errors import RowsLost as RowsLost
    from minishuffle.errors import ShuffleError as ShuffleError
    from minishuffle.errors import StateLost as StateLost
    from minishuffle.errors import StorageUnavailable as StorageUnavailable
    from minishuffle.errors import Superseded as Superseded
    from minishuffle.errors import TaskCancelled as TaskCancelled
    from minishuffle.errors import TaskFailed as TaskFailed
    from minishuffle.errors import UnknownName as UnknownName
    from minishuffle.errors import UnreadableSnapshot as UnreadableSnapshot
    from minishuffle.errors import UnserializableRecord as UnserializableRecord
    from minishuffle.errors import UntrustedSnapshot as UntrustedSnapshot
    from minishuffle.errors import UsageError as UsageError
    from minishuffle.errors import WrongColumns as WrongColumns
    from minishuffle.errors import WrongInput as WrongInput
    from minishuffle.errors import WrongResult as WrongResult
    from minishuffle.local import LocalCluster as LocalCluster
    from minishuffle.operators.base import Aside as Aside
    from minishuffle.operators.base import Source as Source
    from minishuffle.operators.base import SplitSource as SplitSource
    from minishuffle.operators.base import TaskContext as TaskContext
    from minishuffle.operators.base import TimedBatch as TimedBatch
    from minishuffle.operators.event_time import EVENT_TIME as EVENT_TIME
    from minishuffle.operators.keyed_process import ProcessContext as ProcessContext
    from minishuffle.plan.graph import JobSettings as JobSettings
    from minishuffle.snapshots.statetable import SavedState as SavedState
    from minishuffle.snapshots.statetable import read_state as read_state

__version__: Final = "0.2.0"

_MODULE_OF: Final = {
    "col": "minishuffle.api.columns",
    "ColumnExpression": "minishuffle.api.columns",
    "Client": "minishuffle.client",
    "JobHandle": "minishuffle.client",
    "JobResult": "minishuffle.client",
    "JobSettings": "minishuffle.plan.graph",
    "KeyedStream": "minishuffle.api.stream",
    "KeyedTable": "minishuffle.api.stream",
    "WindowedTable": "minishuffle.api.stream",
    "Aside": "minishuffle.operators.base",
    "Source": "minishuffle.operators.base",
    "SplitSource": "minishuffle.operators.base",
    "TaskContext": "minishuffle.operators.base",
    "TimedBatch": "minishuffle.operators.base",
    "ProcessContext": "minishuffle.operators.keyed_process",
    "Sink": "minishuffle.connectors.sinks",
    "EVENT_TIME": "minishuffle.operators.event_time",
    "Stream": "minishuffle.api.stream",
    "Table": "minishuffle.api.stream",
    "WindowedStream": "minishuffle.api.stream",
    "AuthenticationError": "minishuffle.errors",
    "CannotWrite": "minishuffle.errors",
    "InvalidGraph": "minishuffle.errors",
    "LateRecord": "minishuffle.errors",
    "LocalProtocolError": "minishuffle.errors",
    "MissingColumn": "minishuffle.errors",
    "PartitionLost": "minishuffle.errors",
    "PartitionNotFound": "minishuffle.errors",
    "PeerLost": "minishuffle.errors",
    "PeerSuspected": "minishuffle.errors",
    "ProtocolError": "minishuffle.errors",
    "RemoteProtocolError": "minishuffle.errors",
    "ResourceExhausted": "minishuffle.errors",
    "RowsLost": "minishuffle.errors",
    "ShuffleError": "minishuffle.errors",
    "FatalRecord": "minishuffle.errors",
    "StateLost": "minishuffle.errors",
    "StorageUnavailable": "minishuffle.errors",
    "Superseded": "minishuffle.errors",
    "TaskCancelled": "minishuffle.errors",
    "TaskFailed": "minishuffle.errors",
    "UnknownName": "minishuffle.errors",
    "UnreadableSnapshot": "minishuffle.errors",
    "UnserializableRecord": "minishuffle.errors",
    "UntrustedSnapshot": "minishuffle.errors",
    "UsageError": "minishuffle.errors",
    "WrongColumns": "minishuffle.errors",
    "WrongInput": "minishuffle.errors",
    "WrongResult": "minishuffle.errors",
    "LocalCluster": "minishuffle.local",
    "SavedState": "minishuffle.snapshots.statetable",
    "read_state": "minishuffle.snapshots.statetable",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
