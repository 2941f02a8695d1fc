"""Attempts of subtasks: their threads, and their way between the thread and the loop."""
