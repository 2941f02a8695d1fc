"""External clients of a worker: they write into its tasks, or read what its sinks kept."""
