"""Reports of a worker to its coordinator, kept until they are acknowledged."""
