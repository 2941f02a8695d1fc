"""What tests of jobs and operators share."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.csv as pa_csv

# pyarrow opens a pipe for signals, once in a process, when it first reads a whole CSV file: no test's leak.
pa_csv.read_csv(pa.BufferReader(b"a\n1\n"))
