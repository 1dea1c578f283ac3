"""How a model wants to be sampled: the values of its `generation_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hetero.errors import ModelError, UserError
from hetero.generation.options import SamplingOptions
from hetero.generation.sampling import SamplingParams
from hetero.models.fields import read_json_object

FILE: Final = "generation_config.json"
# `transformers` draws with these where the file asks for drawing and names no others.
_DRAWN: Final[SamplingOptions] = {"temperature": 1.0, "top_k": 50}
_NAMES: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def model_sampling(source: Path | None) -> SamplingOptions:
    """Sampling of a model's folder as its authors set it, empty where they set nothing.

    A file with `do_sample` false asks for the likeliest token, whatever else it has. What is null
    is not set. Raises `ModelError` for a value that no sampling can have.
    """
    path = None if source is None else source / FILE
    raw = read_json_object(path) if path is not None and path.is_file() else {}
    given = {name: raw[name] for name in _NAMES if raw.get(name) is not None}
    drawn = raw.get("do_sample")
    if drawn is False or (drawn is None and "temperature" not in given):
        given = {name: given[name] for name in ("repetition_penalty",) if name in given}
        if drawn is False:
            given["temperature"] = 0.0
    elif given.get("temperature") != 0:
        given = {**_DRAWN, **given}
    found: SamplingOptions = given  # type: ignore[assignment]
    try:
        SamplingParams(**found)
    except UserError as error:
        raise ModelError(f"{path}: {error}; correct it, or delete the file") from error
    return found
