"""Writes the JSON schemas of this folder: `python docs/schemas/make.py`."""

from __future__ import annotations

import json
from pathlib import Path

from hetero import DeviceProfile, ExecutionPlan
from hetero.cache import CacheUsage

SCHEMAS = {"plan.json": ExecutionPlan, "profile.json": DeviceProfile, "cache.json": CacheUsage}


def text(name: str) -> str:
    """The schema of a document, as it is written."""
    return json.dumps(SCHEMAS[name].model_json_schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for file in SCHEMAS:
        (Path(__file__).parent / file).write_text(text(file), encoding="utf-8")
