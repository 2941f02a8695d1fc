"""The coordinator's journal, and how the next coordinator continues from it."""
