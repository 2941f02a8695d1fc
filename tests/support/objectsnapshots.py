"""Snapshots in an object store that works, answers 503, or late: what happens, as JSON.

A process of its own: what pyarrow starts for S3 lives until the process ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from minishuffle.errors import ShuffleError
from minishuffle.limits import MIB
from minishuffle.snapshots import storage
from minishuffle.snapshots.catalog import list_snapshots
from minishuffle.snapshots.savedstate import open_snapshot
from minishuffle.snapshots.statetable import SavedState
from minishuffle.snapshots.storage import Folder, folder_above, folder_at
from support.objectstore import Faults, object_store
from support.savedjobs import SECRET, save

__all__ = ["main"]

MANY = [f"word{number}" for number in range(20_000)]


def tried(fn: Callable[[], object]) -> str:
    """What it raises."""
    try:
        return f"gave {fn()!r:.100}"
    except ShuffleError as error:
        return f"{type(error).__name__}: {error}"


def write_long(folder: Folder) -> None:
    """A file of several parts."""
    file = folder.create("1-0-1.state")
    try:
        for _ in range(4):
            file.write(bytes(MIB * 4))
        file.close()
    except ShuffleError:
        file.abandon()
        raise


def main() -> None:
    objects: dict[str, bytes] = {"bucket/": b""}
    faults, found = Faults(), dict[str, Any]()
    with object_store(objects, faults) as options:
        uri = f"s3://key:word@bucket/snapshots?{options}"
        top = folder_at(uri)
        found["empty"] = len(top.entries())
        save(top.child("s1"), MANY)
        save(top.child("s2"), number=2, taken_at=2_000.0)
        found["objects"] = sorted(objects)
        found["listed"] = [
            (each.folder.where, each.folder.name(), each.manifest is not None)
            for each in list_snapshots(top, SECRET)
        ]
        newest = SavedState(open_snapshot(uri, SECRET))
        found["newest"] = [newest.path, newest.table("count").to_pydict()]
        one = f"s3://key:word@bucket/snapshots/s1?{options}"
        state = SavedState(open_snapshot(one, SECRET))
        found["rows"] = [state.table("count").num_rows, state.table("count", keys=["word7"]).to_pydict()]
        found["above"] = folder_above(one).where
        found["missing"] = tried(lambda: folder_at(one).read("nothing"))

        faults.refused = {"PUT /bucket/snapshots/s3/1-1-1.state"}
        found["refused"] = tried(lambda: save(top.child("s3")))
        found["refusals"] = faults.refusals

        # From here on each request is made once: between its tries the store is left in peace for seconds.
        storage.STORE_TRIES = 1  # type: ignore[misc]
        top = folder_at(uri)
        faults.refused = {"partNumber=2"}
        found["long"] = tried(lambda: write_long(top.child("s5")))
        faults.refused = {"manifest"}
        found["no manifest"] = tried(lambda: save(top.child("s4")))
        faults.refused = {"GET /bucket/snapshots/s2/manifest"}
        found["cannot read"] = tried(lambda: open_snapshot(uri, SECRET))
        faults.refused = {"GET /bucket?"}
        found["cannot list"] = tried(lambda: list_snapshots(top, SECRET))
        faults.refused = set()
        found["parts"] = [each for each in objects if "/s5/" in each]
        write_long(top.child("s5"))
        found["long length"] = len(objects.pop("bucket/snapshots/s5/1-0-1.state"))
        found["manifests"] = [each for each in sorted(objects) if each.endswith("manifest")]

        storage.STORE_SECONDS_MAX = 0.5  # type: ignore[misc]
        faults.late = {"s1/manifest"}
        found["late"] = tried(lambda: open_snapshot(one, SECRET))
        faults.late = set()
        faults.released.set()
        top.child("s1").remove()
        found["removed"] = [each.folder.name() for each in list_snapshots(top, SECRET)]
    print(json.dumps(found))
