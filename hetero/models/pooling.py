"""The pooling of a text's hidden states to one embedding, by the model's own files.

A directory of sentence-transformers says it in `1_Pooling/config.json`, a GGUF file in
`ARCHITECTURE.pooling_type` (the numbers of llama.cpp's `llama_pooling_type`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from hetero.arguments import check_one_of
from hetero.errors import ModelError
from hetero.models.fields import read_json_object, read_text

Pooling: TypeAlias = Literal["last", "mean"]
POOLINGS: Final[tuple[Pooling, ...]] = ("last", "mean")
DEFAULT_POOLING: Final[Pooling] = "last"  # vLLM's of decoders
POOLING_FILE: Final = "1_Pooling/config.json"
MODULES_FILE: Final = "modules.json"
DENSE: Final = "dense"  # further layers, which no pooling here has
_GGUF: Final = ("none", "mean", "cls", "last", "rank")
_MODES: Final = {"lasttoken": "last", "mean_tokens": "mean"}
_MODE: Final = "pooling_mode"


def pooling_of(source: Path | None, given: str | None = None) -> Pooling:
    """Return the pooling of a model's embeddings: `given`, else its files', else the last token.

    Raises `ModelError` where its files say one that is not supported, `UserError` for a `given`
    one.
    """
    if given is not None:
        check_one_of("pooling", given, POOLINGS)
    name = given or stored_pooling(source) or DEFAULT_POOLING
    for pooling in POOLINGS:
        if name == pooling:
            return pooling
    raise ModelError(
        f"{source}: its embeddings are pooled by {name[:40]!r}, supported are last and mean: "
        "choose another model, or name one of these as pooling"
    )


def stored_pooling(source: Path | None) -> str | None:
    """Return the pooling that a model's files say, supported or not; None where they say none."""
    if source is None:
        return None
    return _of_gguf(source) if source.is_file() else _of_directory(source)


def pooling_document(pooling: str) -> dict[str, str]:
    """Return the contents of `1_Pooling/config.json` for a pooling."""
    return {_MODE: next((mode for mode, name in _MODES.items() if name == pooling), pooling)}


def _of_gguf(path: Path) -> str | None:
    from hetero.models.gguf import GgufFile

    metadata = GgufFile.opened(path).metadata
    architecture = metadata.get("general.architecture")
    if f"{architecture}.dense_2_feat_out" in metadata:
        return DENSE
    number = metadata.get(f"{architecture}.pooling_type", 0)
    known = isinstance(number, int) and 0 <= number < len(_GGUF)
    name = _GGUF[number] if known else str(number)
    return None if name == "none" else name


def _of_directory(directory: Path) -> str | None:
    modules = directory / MODULES_FILE
    if modules.is_file() and any(_is_dense(x) for x in _modules(modules)):
        return DENSE
    path = directory / POOLING_FILE
    return _mode(read_json_object(path)) if path.is_file() else None


def _mode(raw: Mapping[str, Any]) -> str | None:
    """Return the pooling of a `1_Pooling/config.json`, several modes as one name."""
    modes = [x.removeprefix(f"{_MODE}_") for x, on in raw.items() if on is True and _MODE in x]
    named = str(raw.get(_MODE) or "+".join(modes))
    return _MODES.get(named, named.removesuffix("_tokens")) or None


def _modules(path: Path) -> list[Any]:
    try:
        modules = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: is not valid JSON ({error}); download the file again") from error
    return modules if isinstance(modules, list) else []


def _is_dense(module: object) -> bool:
    kind = module.get("type") if isinstance(module, dict) else None
    return isinstance(kind, str) and kind.endswith("Dense")
