"""The coordinator: it registers workers, places subtasks, follows jobs and answers clients."""
