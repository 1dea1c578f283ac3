"""Errors of profiles, in sentences for people."""

from __future__ import annotations

from hetero.backends.errors import UserError


class ProfileError(UserError):
    """A profile cannot be read, taken or used; one sentence with the remedy."""


class ProfileWarning(UserWarning):
    """A profile was taken on another device or driver than the one it is used for."""
