"""What the tests of compiled graphs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.helpers import own_cache


@pytest.fixture(scope="module")
def no_graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of compiled graphs for one module alone."""
    folder = own_cache(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
