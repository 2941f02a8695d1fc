"""Snapshots: what a job holds at one cut, in a folder that refers to nothing outside of itself.

::

    SNAPSHOT_DIR/                     a directory, or s3://bucket/folder
        j1-savepoint-1/               one snapshot; may be moved and renamed
            0-0-1.state …             what one subtask held: Arrow IPC by operator, part and key groups
            manifest                  all there is to know of it, written last: without it, it is unfinished
"""
