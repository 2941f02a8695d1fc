"""What a user writes: streams and tables."""
