"""Metric families made from the processes' plain counters."""
