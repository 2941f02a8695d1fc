"""A diagnosis as text, and what cannot be diagnosed."""

from __future__ import annotations

from minishuffle.cli.diagnose import diagnosis_lines
from minishuffle.observe.diagnosis import Diagnosis


def test_a_diagnosis_names_task_rule_numbers_and_fix() -> None:
    keys = [{"key": "'the'", "share": 0.6}, {"key": "1", "share": 0.1}]
    evidence = {"busy": 0.98, "records_per_second": 12345.0, "to_workers": [2, 3], "hot_keys": keys}
    found = Diagnosis(
        job="j7",
        verdict="throttled",
        task="count[1]",
        rule="skewed key",
        evidence=evidence,
        advice="split the hot key",
    )
    assert diagnosis_lines(found) == [
        "job j7 is throttled by count[1]: skewed key",
        "  busy                0.98",
        "  records per second  12,345.0",
        "  to workers          2, 3",
        "  hot keys            'the' (60%), 1 (10%)",
        "what to do: split the hot key",
    ]


def test_a_job_that_waits_says_for_what() -> None:
    found = Diagnosis(
        job="j7",
        verdict="waiting",
        task="",
        rule="waiting for a slot",
        evidence={"why": ["a[1] wait for a slot: worker 2 was lost"]},
        advice="start another worker",
    )
    assert diagnosis_lines(found) == [
        "job j7 is waiting for a slot",
        "  why  a[1] wait for a slot: worker 2 was lost",
        "what to do: start another worker",
    ]


def test_a_healthy_job_is_said_to_be_so() -> None:
    found = Diagnosis(
        job="j7",
        verdict="healthy",
        task="",
        rule="none",
        evidence={"busiest": "a[0]", "none": []},
        advice="nothing is wrong: so be it",
    )
    assert diagnosis_lines(found) == [
        "job j7: nothing is wrong: so be it",
        "  busiest  a[0]",
        "  none     none",
    ]


def test_a_task_that_falls_behind_is_named_with_its_rates() -> None:
    found = Diagnosis(
        job="j7",
        verdict="throttled",
        task="a[0]",
        rule="slow function",
        evidence={"falls_behind": "450 of 2,000 records/s, the rest waits in buffers"},
        advice="make it cheaper",
    )
    assert diagnosis_lines(found, " --cluster ops") == [
        "job j7: a[0] falls behind: 450 of 2,000 records/s, the rest waits in buffers (slow function)",
        "  falls behind  450 of 2,000 records/s, the rest waits in buffers",
        "what to do: make it cheaper",
        "which code it is: minishuffle --cluster ops profile j7 --task 'a[0]'",
    ]
