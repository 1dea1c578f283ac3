"""Contexts of a model: what is in its cache, conversations on it, sessions on disk."""
