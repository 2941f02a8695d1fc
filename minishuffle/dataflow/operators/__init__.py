"""What a task thread runs: sources, functions, keyed state, sinks."""
