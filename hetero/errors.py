"""Errors that a user can cause: one sentence that names the thing, the rule and the remedy."""

from __future__ import annotations


class ModelError(ValueError):
    """A model, its files or the name it was asked by cannot be used."""
