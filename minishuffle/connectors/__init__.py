"""What is outside of a job: one module for each kind of source and of sink."""
