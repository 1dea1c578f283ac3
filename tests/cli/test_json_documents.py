"""The documents that docs/reference/json.md describes are those that are written."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from jsonschema_rs import validator_for

import hetero.cache
from hetero.profiler.profile_files import shipped_path

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["plan.json", "profile.json", "cache.json"])
def test_schemas_are_those_of_the_records(name: str) -> None:
    made = runpy.run_path(str(DOCS / "schemas" / "make.py"))
    assert (DOCS / "schemas" / name).read_text(encoding="utf-8") == made["text"](name)


def test_documents_obey_their_schemas() -> None:
    plan = hetero.plan("demo", "host", seq_lens=(64,), curves=False).model_dump_json()
    profile = shipped_path("snapdragon-8-gen-3").read_text(encoding="utf-8")
    usage = hetero.cache.usage(["packed", "locks"]).model_dump_json()
    for name, text in (("plan.json", plan), ("profile.json", profile), ("cache.json", usage)):
        schema = json.loads((DOCS / "schemas" / name).read_text(encoding="utf-8"))
        found = validator_for(schema)
        document = json.loads(text)
        assert found.is_valid(document), next(found.iter_errors(document))
        assert not found.is_valid(document | {"schema_version": 99})
