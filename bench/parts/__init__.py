"""Subcommands of the benches, one module for each question."""
