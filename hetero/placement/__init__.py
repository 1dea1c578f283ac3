"""The placement of a model: its devices, opened, and plans, made and chosen."""
