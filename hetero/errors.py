"""Errors that a user can cause: one sentence that names the thing, the rule and the remedy."""

from __future__ import annotations


class UserError(ValueError):
    """Something that the user can mend; the message is one sentence for people."""


class ModelError(UserError):
    """A model, its files or the name it was asked by cannot be used."""


class FallbackWarning(UserWarning):
    """A device is missing or failed; another does its work."""
