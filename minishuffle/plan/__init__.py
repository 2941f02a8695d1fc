"""From what a user wrote to the job graph: logical nodes, rewrites, and one planner."""
