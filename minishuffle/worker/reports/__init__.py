"""What a worker tells its coordinator, and what it keeps until that is acknowledged."""
