"""Persistent contexts of many applications on one model, kept compressed in memory and on disk."""
