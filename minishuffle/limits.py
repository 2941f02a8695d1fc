"""Every bound in one place, units in the names, relations asserted when this is imported."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# --- frames -----------------------------------------------------------------------------------
SEGMENT_BYTES_DEFAULT: Final = 32 * KIB
SEGMENT_BYTES_MIN: Final = 256
SEGMENT_BYTES_MAX: Final = 16 * MIB
SEGMENT_HEADROOM_BYTES: Final = 64
"""Room before a segment's payload, so that header and payload are sent as one view."""
DATA_FRAME_BYTES_MAX: Final = SEGMENT_BYTES_MAX + SEGMENT_HEADROOM_BYTES
CONTROL_PAYLOAD_BYTES_MAX: Final = 64 * MIB
"""Programs of a job, rows, or a sink's result in one control message."""
CONTROL_FRAME_BYTES_MAX: Final = CONTROL_PAYLOAD_BYTES_MAX + MIB
"""Control messages carry pickled functions and collected rows."""
MESSAGE_VALUES_MAX: Final = 524_288
"""Entries of all arrays and maps together in one control message to the coordinator."""
MESSAGE_KEYS_MAX: Final = 64
"""Keys of a map with text keys in a control message, for example the message itself."""
MESSAGE_TEXT_BYTES_MAX: Final = MIB
"""Longest text in a control message."""
MESSAGE_NAME_CHARS_MAX: Final = 1_024
"""Longest name that the coordinator keeps from a control message: a host, a version, a state."""
HANDSHAKE_FRAME_BYTES_MAX: Final = 512
"""Longest frame accepted before a peer has proved the secret."""
NAME_BYTES_MAX: Final = 128
"""A job id or any other name inside a frame."""
ERROR_TEXT_BYTES_MAX: Final = 64 * KIB
PREPARED_PROGRAM_BYTES_MAX: Final = 32 * MIB
"""Programs of running jobs kept by one standby worker; further jobs send theirs with a takeover."""

# --- connections ------------------------------------------------------------------------------
RECEIVE_BUFFER_BYTES: Final = 512 * KIB
"""Size of one read from a socket. The data is copied at once: a larger buffer does not stay in the
processor's second-level cache, and a smaller one takes more turns of the loop."""
HANDSHAKE_SECONDS_MAX: Final = 5.0
PROBE_SECONDS_MAX: Final = 3.0
"""Seconds for which a worker tries to reach another in a probe of their link."""
CLUSTER_EVENTS_SHOWN: Final = 50
"""Cluster events, and pairs of workers that cannot link, in a status."""
LINK_ERROR_CHARS_MAX: Final = 300
"""Longest reason for a missing link in a worker's report."""
PROBES_MAX: Final = 32
"""Probes of one worker at a time."""
PROBES_PER_WORKER_MAX: Final = 32
"""Workers with which a newcomer is probed."""
PROBES_UNDER_WAY_MAX: Final = 256
"""Probes under way in a cluster, of links that no job needs."""
URGENT_PROBES_UNDER_WAY_MAX: Final = 1024
"""Probes under way in a cluster, of all links."""
PROBES_PER_SECOND_MAX: Final = 500
"""Probes that begin per second in a cluster, of links that no job needs."""
PROBES_BURST_MAX: Final = 256
"""Probes that may begin at once after a time without probes."""
LINK_GRACE_SECONDS: Final = 0.3
"""Seconds for which a worker with a closed control link is awaited, while it is not known whether its process
lives."""
HOST_LOOKS_MAX: Final = 10
"""Dials of another host requested by one message."""
HOST_TIMEOUT_SECONDS_MIN: Final = 0.4
"""A probe of a host takes 0.3 s."""
HOST_LOOK_LATE_SECONDS_MAX: Final = 0.1
"""If a process that probes a host is held up for longer than this, it gives no answer."""
LISTEN_BACKLOG: Final = 128
"""Connections completed by the kernel before a process accepts them, perhaps all at once."""
UNAUTHENTICATED_CONNECTIONS_MAX: Final = 2 * LISTEN_BACKLOG
"""Connections in their handshake, on one port. When the kernel's whole backlog is accepted at once, the data
of earlier ones was read before: a burst of connections closes none that has sent a Hello."""
SPLITS_MAX: Final = 1 << 20
"""Splits of one source's subtask whose positions a message may hold."""
NAMED_SPLITS_MAX: Final = 8_192
"""Splits of a source that names them; each has a name and a position in bytes."""
SPLIT_NAME_BYTES_MAX: Final = KIB
SPLIT_POSITION_BYTES_MAX: Final = KIB
EARLY_LINKS_MAX: Final = 64
"""Links of workers that the coordinator has not announced yet; the oldest makes room."""
EARLY_REQUESTS_MAX: Final = 16_384
"""PartitionRequests of one early link."""
CONTROL_UNSENT_BYTES_MAX: Final = 256 * MIB
"""A control link whose peer leaves this much unread is closed."""
TASK_UNSENT_BYTES_MAX: Final = MIB
"""Rows and lines that one task has for the coordinator; a single message may be longer. A task with more
waits."""
UNACKNOWLEDGED_BYTES_MAX: Final = 8 * MIB
"""Rows that a worker keeps until the coordinator acknowledges them; a single message may be longer. Above
the limit no rows are sent."""
RETURN_BYTES_MAX: Final = 2 * MIB
"""Bytes of reports in a repeated registration; further reports follow one by one. Their values must be fewer
than MESSAGE_VALUES_MAX: the smallest counts as 8 bytes."""
LOG_MESSAGE_BYTES: Final = 64 * KIB
"""Log lines sent together, in bytes."""
GATHERED_BYTES: Final = 512 * KIB
"""Collected record batches sent together, in bytes; each has at most a quarter of it."""
TAKEN_ROWS: Final = 1_024
TAKEN_SECONDS: Final = 0.01
TAKEN_BYTES: Final = MIB
"""A task reads queued batches of one gate together: at most as many rows as it processes in
TAKEN_SECONDS, and about TAKEN_BYTES. Each of them has less than a quarter of these rows, and less than a 32nd
of these bytes."""
FRAMES_PER_TURN_MAX: Final = 2_000
"""Frames in one read of a data connection, after which it is not read again in this turn of the loop. A read
of full buffers has 16 frames, one with only small frames 50,000."""
MESSAGES_PER_TURN_MAX: Final = 16
"""Control messages of one link that are dealt with before other links have their turn."""
LINK_REQUESTS_MAX: Final = 64
"""Requests of one control link that wait: for something new of a job, or for a worker's answer."""
CLOSE_SECONDS_MAX: Final = 5.0
"""How long a control link that is being closed may take to send what it still holds."""
HTTP_CONNECTIONS_MAX: Final = 16
"""On one HTTP port; the oldest makes room for a new one. Prometheus keeps one open."""
HTTP_IDLE_SECONDS_MAX: Final = 30.0
"""How long an HTTP connection may wait for a request, or take to send the head of one."""
HTTP_CLOSE_SECONDS_MAX: Final = 2.0
"""How long requests that are being answered may hold up the end of a process."""
CHANNELS_PER_CONNECTION_MAX: Final = 65_536
CREDIT_MAX: Final = 1 << 20
EVENTS_QUEUED_PER_CHANNEL_MAX: Final = 64
EVENT_BYTES_MAX: Final = 64
"""The payload of one event."""
CONTROL_FRAMES_UNSENT_MAX: Final = 2 * CHANNELS_PER_CONNECTION_MAX
"""A data connection whose peer leaves this many unread is closed."""
GRANTS_PER_FRAME_MAX: Final = 4_096
"""Channels that one AddCredit frame may name; more go into the next frame."""
FLUSH_SEGMENTS_MAX: Final = 16
"""Most segments gathered into one flush of a connection."""
ONE_WAY_SOCKET_BYTES: Final = 256 * KIB
"""Buffer of the sender's and of the receiver's socket of a one-way connection; Linux doubles it."""

# --- memory -----------------------------------------------------------------------------------
NETWORK_MEMORY_BYTES_DEFAULT: Final = 64 * MIB
RESTART_FAILURES_MAX_DEFAULT: Final = 10
RESTART_FAILURES_MAX: Final = 1_000_000
RESTART_MISTAKES_MAX_DEFAULT: Final = 3
POISON_ROWS_MAX: Final = 100
"""Rows that end their process and are left out, of one subtask."""
POISON_CALLS_SECONDS: Final = 10.0
"""While a task looks for such a row, it waits this long for the asynchronous calls of one piece before it
takes the next. Then it looks for none any more: the calls may wait for those of later rows."""
RESTART_FAILURE_WINDOW_SECONDS: Final = 300.0
"""Older failures of a subtask do not count against its job."""
END_REPORT_SECONDS: Final = 2.0
"""Seconds for which the coordinator waits for a launcher's report of how a worker ended; after that it stays
unknown."""
COORDINATOR_RESTARTS_MAX: Final = 5
"""Restarts in a row of a coordinator that is lost soon after its start."""
YOUNG_SECONDS: Final = 5.0
"""A process lost sooner than this after its start may be lost each time."""
SOURCE_LEASE_ROWS_MAX: Final = 1 << 40
RATE_MAX: Final = 1e12
"""Records per second of a generator: whoever means none leaves the rate out."""
LEASE_SECONDS: Final = 0.25
"""Between two reports of a source, unless its job gives the length of leases. A lease lasts a quarter longer
at its present rate."""
WITNESSED_BYTES_MAX: Final = 8 * MIB
"""Bytes of positions that one worker keeps for others without a coordinator: its registration must have room
for them."""
JOB_BUFFERS_MAX: Final = CREDIT_MAX // 2
"""Exclusive buffers of a channel, and floating buffers of a gate, that a job may ask for: a channel may
have both as credit."""
BUFFERS_PER_CHANNEL_DEFAULT: Final = 2
FLOATING_BUFFERS_PER_GATE_DEFAULT: Final = 32
"""Flink has 8; here an Arrow element is up to 1 MiB, and each time a thread waits in the middle of one
costs two switches of the interpreter's lock: 32 doubled the rate of ``bench keyby``. The pool's
minimum counts one."""
OUTPUT_BUFFERS_PER_SUBPARTITION_MAX: Final = 32
"""Output buffers lent to one subpartition, for the same reason; only free ones are lent."""
DEBLOATED_BYTES_MIN: Final = 256
DEBLOATED_BYTES_START: Final = 1024
"""Size of a producer's buffer if the job debloats: the least, and the initial one. (Flink:
``taskmanager.memory.min-segment-size``, ``starting-segment-size``.)"""
LOCAL_BATCH_BYTES_MAX: Final = 64 * MIB
"""Bytes of the batches that wait, in one worker, for consumers on the same worker; the rest goes through
segments, as to any other worker."""
ELEMENT_BYTES_MAX: Final = 1 << 30
ASSEMBLY_BYTES_MAX: Final = 256 * MIB
"""Bytes of elements being put together in memory in one worker; the rest goes to a file."""
SPILL_ELEMENT_BYTES: Final = 16 * MIB
"""A single element above this is put together in a file."""

# --- jobs -------------------------------------------------------------------------------------
PARALLELISM_MAX: Final = 32_768
TRAFFIC_PEERS_MAX: Final = 4_096
"""Former peers of one attempt, by edge, subtask and attempt, that its rows are counted for; further ones are
counted together. Peers that are attached to it are not among them."""
TRAFFIC_ENTRIES_MAX: Final = 2 * PARALLELISM_MAX
"""Peers in the table of an attempt's rows, those that are attached included."""
SLOTS_MAX: Final = 1_024
"""Slots of one worker."""
BATCH_ROWS_MAX: Final = 65_536
LIST_ROWS: Final = 4_096
"""Rows in a batch of Python objects that a source gives."""
SOURCE_SLICES_MAX: Final = 64
"""Slices of a collection in memory, and number sequences of a generator: their splits."""
BATCH_BYTES_MAX: Final = 8 * MIB
"""A batch with more is cut before it is sent; a single row may be longer."""
DURATION_MAX: Final = timedelta(days=36_500)
"""Longest of windows, delays and the like: a hundred years, far from where the arithmetic of moments ends."""
DRAFT_ROWS: Final = 1_000
"""The first rows of each source, which ``minishuffle schema`` looks at."""
SHOWN_ROWS: Final = 20
"""Rows that ``show()`` prints, unless it is called for another number."""
SHOWN_SOURCE_ROWS_MAX: Final = 10_000
SHOWN_SECONDS_MAX: Final = 10.0
"""Most rows that ``show()`` reads of each source, and the longest time."""
INFERRED_FILE_BYTES_MAX: Final = 256 * MIB
"""The largest CSV or JSON file that is read before the job starts, for types that are not declared."""
JSON_DEPTH_MAX: Final = 8_192
"""Lists and objects in each other in one record of JSON, which pyarrow reads on the stack: 15,000 are too
many. Shorter records are not looked at for this, so that a smaller number would take longer to check."""
CSV_BLOCK_BYTES: Final = 8 * MIB
"""Bytes read at once from a CSV file. A longer line may be refused; a line of twice this length always is."""
RESULT_BYTES_MAX: Final = 16 * MIB
"""Result bytes of all sinks of a job at their close."""
COLLECT_BYTES_MAX: Final = 256 * MIB
"""Bytes of collected rows of one job."""
COLLECTED_RUNNING_BYTES_MAX: Final = 512 * MIB
"""Bytes of collected rows of all running jobs; above it, fetched rows are dropped."""
COLLECTED_ENDED_BYTES_MAX: Final = 512 * MIB
"""Bytes of collected rows of all ended jobs, kept for their clients."""
BROADCAST_BYTES_MAX: Final = 256 * MIB
"""The small side of a broadcast join, in each subtask."""
KEPT_MEMORY_BYTES: Final = 16 * MIB
"""Bytes in memory of a blocking partition in a task, or of the blocking partitions that one gate reads; the
rest goes into a file."""
BLOCKING_BYTES_MAX: Final = 16 * 1024 * MIB
"""All blocking partitions of a worker, and what its gates have read of some; a setting's default."""
BLOCKS_READ_AHEAD_BYTES: Final = 4 * MIB
"""Bytes that all views of one blocking partition read ahead from the disk."""
RETAINED_BYTES: Final = 1024 * MIB
"""Bytes of sent elements that a worker retains, in memory and on disk; a setting's default."""
RETAINED_MEMORY_SHARE: Final = 4
"""One part in so many of these bytes may lie in memory."""
RETAINED_FILE_BYTES: Final = 64 * MIB
"""One file of retained elements: it is given up as a whole."""
SNAPSHOT_MEMORY_BYTES_MAX: Final = 1024 * MIB
"""Bytes in memory of the snapshots that a worker holds, by default."""
SNAPSHOT_MEMORY_SHARE: Final = 4
"""By default these are at most one part in so many of the machine's memory."""
HOLDER_AWAY_SECONDS: Final = 30.0
"""A task whose snapshots no holder has read for so long takes it that there is none: another would have been
named by now. What waits for a safe snapshot goes on without."""
SLICE_SECONDS: Final = 0.002
"""How long the next element waits while a part of a snapshot is made or sent, but for the last piece."""
SLICE_SHARE: Final = 0.1
"""Or so much of the time since the part before: where elements take long, that alone would take for ever."""
RETAINED_LOOK_BYTES: Final = 256 * KIB
"""So much may be retained of one edge before the bound is looked at again."""
DISK_THREADS: Final = 4
"""Threads of a worker that read from disks and close files for its loop."""
SECRET_CHARS_MIN: Final = 32
"""The cluster's secret: 128 bits, written in hexadecimal."""
JOURNAL_COUNTS_SECONDS: Final = 2.0
"""Seconds between two journal records of the counts of running attempts."""
JOURNAL_COUNTS_BYTES_MAX: Final = 2 * MIB
"""Bytes of these records in one write, without the last one; further ones are in the next."""
JOB_EVENTS_KEPT: Final = 10_000
EVENT_TRACEBACK_CHARS_MAX: Final = 4_000
"""The user's traceback in the event of a task that failed; what is cut is in its middle."""
JOB_LOG_LINES_KEPT: Final = 20_000
JOB_LOG_CHARS_KEPT: Final = 2 * MIB
"""Characters of all log lines of a job together; the oldest make room."""
LOG_LINE_CHARS_MAX: Final = 10_000
TASK_NAME_CHARS_MAX: Final = 1_000
"""In an error; the name of a chain grows with its operators."""
ERROR_CAUSES_KEPT: Final = 10
WINDOWS_PER_RECORD_MAX: Final = 1_000
"""Overlapping windows that a record may be in: each holds it."""
ASYNC_CALLS_MAX: Final = 10_000
"""Calls of an asynchronous function that one subtask may have under way."""
USER_METRICS_MAX: Final = 64
"""Metrics that one operator of a subtask may have for the user's code."""
USER_BUCKETS_MAX: Final = 32
"""Upper edges of a histogram among them."""
ROW_PREVIEW_CHARS: Final = 200
DEAD_LETTER_CHARS: Final = 8_000
"""Characters of the record in the line of a dead letter."""
WATERMARK_SECONDS_MIN: Final = 0.2
"""Between two watermarks of an operator that does not emit each."""
SPOOL_FILE_BYTES: Final = 1 << 30
"""One file of kept results; those of an endless job are shorter."""
SPOOL_BYTES_MAX: Final = 256 * MIB
"""Rows that a sink subtask of an endless job keeps and nobody has read."""
COMMITTABLE_BYTES_MAX: Final = KIB
"""Longest prepared commit of a user's sink, in bytes."""
SINK_FLUSH_SECONDS: Final = 1.0
"""A sink of the user that has a ``flush`` is called so long after the first row that was not flushed."""
FILE_SECONDS_DEFAULT: Final = 60.0
"""A file sink's part is complete so long after its first row, unless its job says otherwise."""
FILE_ROWS_DEFAULT: Final = 10_000_000
FILE_BYTES_DEFAULT: Final = 128 * MIB
FILE_SNAPSHOT_SECONDS_MAX: Final = 60.0
"""For how long an open file holds up the snapshots of its task, before it is completed early."""
FILE_SNAPSHOT_BYTES_MAX: Final = MIB
"""Rows of an open file that a snapshot takes along, while none of them is in the file."""
FILE_LINGER_SECONDS_MAX: Final = 1.0
"""How long a task that was cancelled waits for its last complete file to be listed."""
JOB_FILES_KEPT: Final = 10_000
"""The last files of a job that the coordinator can name; it counts all of them."""
JOB_RESULTS_KEPT: Final = 16
"""Ended jobs whose results can still be read."""
WRITES_KEPT: Final = 8
"""Ended writes into one stream whose partitions are remembered: a streaming query may repeat its last
ones."""
WRITE_IDLE_SECONDS: Final = 120.0
"""Seconds for which event time waits for a write into an endless stream without a connected client."""
WRITER_KEPT_BYTES_MAX: Final = 32 * MIB
"""Bytes of rows kept by an external writer, to send them again after a restart of the task. It must exceed
the data on the way: see ``remote.writer``."""
WRITER_UNSTABLE_BYTES_MAX: Final = 64 * MIB
"""The same in a job that loses nothing, where the writer waits at this bound; from half of it on snapshots
are begun for it. A writer of 30 MB/s sends more than half of that from one durable snapshot to the next."""
WRITER_MARK_BYTES: Final = 2 * MIB
"""Bytes of a partition, in such a job, between two marks: a task notes when snapshots cover a mark. A writer
keeps so much more than may be asked for."""
EXTERNAL_TICKETS_MAX: Final = 1_024
"""External clients that a worker expects, for each direction; the oldest has given up long before, or asks
again."""
RESULT_READERS_MAX: Final = 64
"""External clients that read results from one worker at once."""
LATENCY_SOURCES_MAX: Final = 256
"""Sources whose latencies one subtask keeps apart."""
TRACES_MAX: Final = 16
"""Channels of one worker whose frames are traced at once; the oldest trace makes room."""
TRACE_FRAMES_MAX: Final = 4_096
"""Frames of one trace that wait to be asked for; the oldest are left out."""
TRACE_SECONDS_MAX: Final = 3.0
"""A trace that nobody has asked for so long ends."""
TAPS_MAX: Final = 16
"""Edges whose rows are looked at at once on one worker; the oldest tap makes room."""
TAP_ROWS: Final = 20
"""Rows that one tap gives, of all producers on a worker."""
TAP_SECONDS_MAX: Final = 3.0
"""A tap that nobody has asked for so long ends."""
TAP_TASK_SECONDS_MAX: Final = 0.25
"""A tap that has held a task up for so long, because rows are huge, copies no more of its rows."""
TAP_VALUE_CHARS: Final = 500
"""Characters of a row, or of a value in a column."""
TAP_ROW_CHARS: Final = 8_000
"""Characters of all columns of a row; their names take as many."""
TAP_COLUMNS_MAX: Final = 64
"""Columns that a tap gives; further ones are left out."""
DUMP_CHANNELS_MAX: Final = 64
"""Channels of one gate or partition that a dump has; those that hold or wait for something come first."""
DUMP_CHANNELS_IN_ALL_MAX: Final = 8_192
"""Channels of one worker."""
DUMP_TASKS_MAX: Final = 512
DUMP_REQUESTS_MAX: Final = 256
"""Partition requests of one worker that wait for an answer."""
DUMP_FRAMES_MAX: Final = 30
"""Frames of a thread's stack, the innermost ones."""
PROFILE_SECONDS_MAX: Final = 60.0
"""How long one profile of a subtask may take."""
PROFILE_HERTZ_MAX: Final = 250.0
"""Samples of a profile in a second."""
PROFILE_FRAMES_MAX: Final = 200
"""Frames of one sample, the innermost ones."""
PROFILE_PLACES_MAX: Final = 5_000
"""Lines of code that the samples of one profile may stand at."""
PROFILE_STACKS_MAX: Final = 2_000
"""Different stacks of one profile; samples beyond these are counted alone."""
PROFILE_UNASKED_SECONDS_MAX: Final = 10.0
"""A profile that nobody has asked for so long ends, and is dropped."""
STORE_SECONDS_MAX: Final = 10.0
"""Seconds for which an object store may say nothing in one of ``STORE_TRIES`` of a request for a snapshot."""
STORE_TRIES: Final = 3
"""How often a request for a snapshot is made of an object store that does not answer, or with an error."""
UNFINISHED_SNAPSHOT_SECONDS: Final = 3_600.0
"""A snapshot without a manifest, to which nothing was added for so long, may be removed."""
RESULT_SEGMENTS: Final = 2 * RESULT_READERS_MAX
"""A worker's segments for what they read, separate from the memory reserved for jobs."""

assert SEGMENT_BYTES_MIN <= SEGMENT_BYTES_DEFAULT <= SEGMENT_BYTES_MAX
assert WITNESSED_BYTES_MAX < DATA_FRAME_BYTES_MAX
assert CONTROL_UNSENT_BYTES_MAX >= CONTROL_FRAME_BYTES_MAX
assert RECEIVE_BUFFER_BYTES >= 4 * SEGMENT_BYTES_DEFAULT
assert min(COLLECTED_RUNNING_BYTES_MAX, COLLECTED_ENDED_BYTES_MAX) >= COLLECT_BYTES_MAX
assert HANDSHAKE_FRAME_BYTES_MAX < SEGMENT_BYTES_DEFAULT
assert 2 * PREPARED_PROGRAM_BYTES_MAX <= CONTROL_PAYLOAD_BYTES_MAX
assert 2 * BATCH_BYTES_MAX <= SPILL_ELEMENT_BYTES
assert SPILL_ELEMENT_BYTES <= ASSEMBLY_BYTES_MAX <= ELEMENT_BYTES_MAX
assert NETWORK_MEMORY_BYTES_DEFAULT >= 64 * SEGMENT_BYTES_DEFAULT
assert max(BUFFERS_PER_CHANNEL_DEFAULT, FLOATING_BUFFERS_PER_GATE_DEFAULT) <= JOB_BUFFERS_MAX
assert 2 * JOB_BUFFERS_MAX <= CREDIT_MAX
