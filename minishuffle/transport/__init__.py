"""Bytes between machines: sockets on asyncio, and a seeded wire in memory."""
