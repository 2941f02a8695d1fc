"""The command line: ``minishuffle`` or ``python -m minishuffle.cli``."""
