"""What a process is set to shows in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

SECONDS_MAX: Final = 60

PROGRAM: Final = """
import resource
import numpy as np
from minishuffle.worker.interpreter import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        blocks = [np.empty(450_000, dtype=np.uint8) for _ in range(8)]
        for block in blocks:
            block.fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = page_faults()
keep_freed_memory()
page_faults()
print(before, page_faults())
"""


def test_memory_of_elements_is_not_faulted_in_again() -> None:
    """Fifty times eight blocks of 450 kB are 110 pages each: 44,000 faults if they are given back."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    before, after = map(int, done.stdout.split())
    assert before > 100 * max(after, 1)


REFUSED: Final = """
import logging, os
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # that of the tests may be another one
from minishuffle.worker import interpreter

def refuse(*arguments):
    raise PermissionError(1, "Operation not permitted")

logging.basicConfig(format="%(message)s")
interpreter.os.sched_setscheduler = refuse
interpreter.tune_interpreter(0.005, lets_tasks_finish=True)
"""


def test_a_system_that_refuses_the_policy_is_told_of_and_the_worker_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], check=True, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert "the system refuses the policy SCHED_BATCH ([Errno 1] Operation not permitted)" in done.stderr


THREADS: Final = """
import os, threading
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
from minishuffle.worker.interpreter import compete, tune_interpreter

found = []

def look():
    found.append(os.sched_getscheduler(0))

def task():
    compete()
    look()

tune_interpreter(0.005, lets_tasks_finish=False)
look()
tune_interpreter(0.005, lets_tasks_finish=True)
look()
for run in (look, task):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
print(*found, os.SCHED_BATCH, os.SCHED_OTHER)
"""


def test_only_the_loop_waits_for_the_end_of_time_slices() -> None:
    """Threads take over what the one has that starts them, but for those that compete."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS], check=True, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    before, loop, plain, task, batch, other = map(int, done.stdout.split())
    assert (before, loop, plain, task) == (other, batch, batch, other)


COLLECTED: Final = """
import gc, sys, weakref
from minishuffle.worker.interpreter import collect_garbage, tune_interpreter

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

tune_interpreter(0.005, lets_tasks_finish=False)
kept = [Node() for _ in range(1000)]
found = cycle()
collect_garbage(settled=True)
assert found() is None and len(gc.get_objects()) >= 1000
assert "wave" not in sys.modules
import wave
node = Node()
node.itself = node
found = weakref.ref(node)
collect_garbage(settled=False)
del node  # a thread that was in a user's code has come to its end
collect_garbage(settled=False)
assert found() is None and len(gc.get_objects()) >= 1000
found = cycle()
collect_garbage(settled=True)
assert found() is None and len(gc.get_objects()) < 1000
"""


def test_collections_pass_over_what_is_there_once_modules_came_and_no_user_code_runs() -> None:
    subprocess.run([sys.executable, "-c", COLLECTED], check=True, timeout=SECONDS_MAX)
