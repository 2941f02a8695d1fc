"""Requests of clients, and the table of requests that wait for an answer."""
