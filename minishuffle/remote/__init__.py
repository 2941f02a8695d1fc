"""What programs that are no workers exchange records with a running job through."""
