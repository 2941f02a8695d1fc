"""How far the sources of a worker may read, and what they report of it."""
