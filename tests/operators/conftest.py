"""Hypothesis without deadlines: on a busy machine any example may be slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")
