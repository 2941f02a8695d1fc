"""What a task thread runs between sources and sinks: functions and keyed state, on one kind of batch."""
