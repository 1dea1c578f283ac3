"""One scripted server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.agents.assistant import Assistant, assistant


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assistant]:
    with assistant(tmp_path_factory.mktemp("scripted")) as found:
        yield found
