"""Sampling defaults of a model, from its `generation_config.json` or its GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hetero.errors import ModelError, UserError
from hetero.generation.options import SamplingOptions
from hetero.generation.sampling import SamplingParams
from hetero.models.fields import read_json_object

FILE: Final = "generation_config.json"
# Of chats with a model whose authors set nothing, as in llama.cpp.
CHAT_SAMPLING: Final[SamplingOptions] = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
}  # fmt: skip
# `transformers` draws with these where the file asks for drawing and names no others.
_DRAWN: Final[SamplingOptions] = {"temperature": 1.0, "top_k": 50}
_NAMES: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Behind `general.sampling.` in a GGUF file; llama.cpp knows more that are not supported here.
_GGUF_NAMES: Final = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
                      "penalty_repeat": "repetition_penalty"}  # fmt: skip


def model_sampling(source: Path | None) -> SamplingOptions:
    """Return the sampling options that a model's authors set, empty where they set none.

    A file with `do_sample` false asks for the likeliest token, whatever else it has. Null is not
    set. Raises `ModelError` for a value that no sampling can have.
    """
    if source is not None and source.is_file():
        path, given = source, _of_gguf(source)
    else:
        path = Path() if source is None else source / FILE
        given = _of_directory(read_json_object(path)) if path.is_file() else {}
    sampling: SamplingOptions = given  # type: ignore[assignment]
    try:
        SamplingParams(**sampling)
    except UserError as error:
        raise ModelError(f"{path}: {error}; correct it, or delete the file") from error
    return sampling


def _of_directory(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a generation_config.json asks for."""
    given = {name: raw[name] for name in _NAMES if raw.get(name) is not None}
    drawn = raw.get("do_sample")
    if drawn is False or (drawn is None and "temperature" not in given):
        given = {name: given[name] for name in ("repetition_penalty",) if name in given}
        if drawn is False:
            given["temperature"] = 0.0
    elif given.get("temperature") != 0:
        given = {**_DRAWN, **given}
    return given


def _of_gguf(source: Path) -> dict[str, Any]:
    """Return the options of a GGUF file's metadata."""
    from hetero.models.gguf import GgufFile

    metadata = GgufFile.opened(source).metadata
    values = {ours: metadata.get(f"general.sampling.{name}") for name, ours in _GGUF_NAMES.items()}
    return {name: value for name, value in values.items() if value is not None}
