"""Settings of jobs that several tests use."""

from __future__ import annotations

from minishuffle.plan.graph import JobSettings

NO_RESTARTS = JobSettings(restart_strategy="none")
"""The first failure ends the job: a function that always raises would come to its limit after 22 s only."""
