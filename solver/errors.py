"""Errors of plans, in sentences for people."""

from __future__ import annotations

from hetero.backends.errors import UserError


class PlanError(UserError):
    """A plan breaks a rule; the message names the operator, the rule and the value."""
