"""Fuzzing of everything that reads a file: `python -m tests.fuzz.run --minutes 30`."""
