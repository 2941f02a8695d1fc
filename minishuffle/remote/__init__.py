"""External clients: programs that write records into a running job, or read those of its sinks."""
