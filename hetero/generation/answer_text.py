"""The text of an answer: tokens decoded as they come, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.errors import UserError
from hetero.models.tokenizer import StreamDecoder


class StopFilter:
    """Holds back text that may be the start of a stop string; cuts at the first one found.

    A single string is one stop text, not its letters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        stops = (stops,) if isinstance(stops, str) else stops
        if any(not stop for stop in stops):
            raise UserError("a stop text must not be empty")
        self._stops = tuple(stops)
        self._pending = ""
        self.stopped = False
        self.matched = ""  # the stop text that ended it

    def push(self, text: str) -> str:
        """Return text that is safe to show now."""
        self._pending += text
        matches = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if matches:
            self.stopped = True
            at, self.matched = min(matches)
            shown, self._pending = self._pending[:at], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._pending) - keep
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown

    def flush(self) -> str:
        """Return the rest of the text, at the end of the answer."""
        shown, self._pending = self._pending, ""
        return shown

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if self._pending.endswith(stop[:n])), 0)


class AnswerText:
    """The text of an answer so far, after `echo`, the prompt's own text where it is part of it."""

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str], echo: str) -> None:
        self._decoder, self._filter = decoder, StopFilter(stops)
        self._texts = [echo]

    def push(self, token: int | None, *, ends: bool) -> str:
        """Return the text that a token adds; with `ends` also what was kept back until now.

        None for a token without a text.
        """
        text = "" if token is None else self._decoder.push(token)
        if ends:
            text += self._decoder.finish()
        shown = self._filter.push(text)
        if ends and not self._filter.stopped:
            shown += self._filter.flush()
        self._texts.append(shown)
        return shown

    @property
    def stopped(self) -> bool:
        """Return whether a stop text came."""
        return self._filter.stopped

    @property
    def stop(self) -> str:
        """Return the stop text that came; empty while none has."""
        return self._filter.matched

    def __str__(self) -> str:
        return "".join(self._texts)
