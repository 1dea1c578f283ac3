"""One server for all modules that do not end it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

NEEDED = ("fastapi", "uvicorn", "llguidance", "prometheus_client", "httpx")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if missing else []

if not missing:
    from tests.serving.servers import Server, serving

    @pytest.fixture(scope="session")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        options = ("--alias", "tiny", "--contexts-per-app", "8")
        with serving(tmp_path_factory.mktemp("server"), *options) as found:
            yield found
