"""Measuring this machine with whole models: profiles, first starts, benchmarks, evaluations."""
