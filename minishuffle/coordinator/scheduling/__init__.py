"""Placement of subtasks on workers, and when they are deployed or moved."""
