"""Frames, messages and the handshake: bytes and what they mean."""
