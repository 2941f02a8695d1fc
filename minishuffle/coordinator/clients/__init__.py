"""What clients ask for, and the requests that wait for an answer."""
