"""Registers workers, places subtasks, follows jobs, answers clients."""
