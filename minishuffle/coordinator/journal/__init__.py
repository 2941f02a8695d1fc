"""What outlives a coordinator, and how the next one goes on with it."""
