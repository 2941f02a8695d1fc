"""Loops on whole columns, compiled to machine code, that run without the interpreter's lock."""
