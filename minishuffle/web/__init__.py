"""HTTP servers of workers and coordinator."""
