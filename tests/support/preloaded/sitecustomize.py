"""Runs when a Python of the tests' shared session of Spark begins, which has this folder in PYTHONPATH.

Spark starts a process for each kind of its work in Python, which forks another for each use. Each of those
imports half a second's worth of modules. Here the one that forks has imported them all, and collections of
garbage, of which Spark has one behind each use, pass over them.
"""

import gc
import importlib
import os
import sys

if "pyspark.daemon" in sys.orig_argv:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # What is forked has no other thread.
    gc.disable()
    for module in ("pandas", "pyarrow", "pyspark.worker", sys.orig_argv[-1], "minishuffle.spark.source"):
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
