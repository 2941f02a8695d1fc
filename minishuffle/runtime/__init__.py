"""What runs a chain of operators in one thread, without a network."""
