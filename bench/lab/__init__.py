"""Comparisons and simulations that only the benches use; not part of the wheel."""
