"""How a worker is looked into while it runs."""
