"""What tests of sources and sinks share. Hypothesis has no deadlines: on a busy machine any example may be
slow."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.csv as pa_csv
from hypothesis import settings

settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")

# pyarrow opens a pipe for signals, once in a process, when it first reads a whole CSV file: no test's leak.
pa_csv.read_csv(pa.BufferReader(b"a\n1\n"))
