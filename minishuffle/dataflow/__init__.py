"""What a user writes, and the job graph that becomes of it."""
