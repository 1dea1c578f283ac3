"""Stop strings and the accounting of a generation, without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import UserError
from hetero.generation.answer_text import StopFilter

PARTS = st.lists(st.text(alphabet="ab ", max_size=3), max_size=12)


@given(PARTS, st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3))
def test_stop_filter_equals_searching_the_whole_text(parts: list[str], stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    shown = ""
    for part in parts:
        shown += stop_filter.push(part)
        if stop_filter.stopped:
            break
    else:
        shown += stop_filter.flush()
    whole = "".join(parts)
    # The first moment at which any stop text is complete decides, then the earliest start.
    ends = [(at + len(s), at) for s in stops if (at := whole.find(s)) >= 0]
    if stop_filter.stopped:
        assert any(shown == whole[:at] for _, at in ends)
    else:
        assert shown == whole
        assert not ends


def test_text_before_a_possible_stop_is_shown_at_once() -> None:
    stop_filter = StopFilter(["END"])
    assert stop_filter.push("hello E") == "hello "
    assert stop_filter.push("NTER") == "ENTER"
    assert stop_filter.push("EN") == ""
    assert stop_filter.push("D more") == ""
    assert stop_filter.stopped


@pytest.mark.parametrize("stops", [[""], ""])
def test_an_empty_stop_text_is_refused(stops: str | list[str]) -> None:
    with pytest.raises(UserError, match="must not be empty"):
        StopFilter(stops)


def test_a_bare_string_is_one_stop_text() -> None:
    stop_filter = StopFilter("END")
    assert stop_filter.push("a Nice EmD END ") == "a Nice EmD "
    assert stop_filter.stopped
