"""Which worker runs what, and when it is deployed or moved."""
