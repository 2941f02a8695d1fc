"""The worker process: decisions, task threads, and the paths between them and the loop."""
