"""Models of text and pictures whose text part is a supported decoder.

Their `config.json` has the decoder under `text_config`; their tensors have a prefix, and those of
other parts (a vision tower, its projector) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from hetero.models.architectures import ARCHITECTURES
from hetero.models.fields import Fields

# `model_type` of a wrapper: those of the decoders that it may have.
WRAPPERS: Final[Mapping[str, tuple[str, ...]]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "mistral3": ("ministral3", "mistral"),
}
_OUTER: Final = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
_PREFIXES: Final = ("language_model.model.", "model.language_model.", "language_model.lm_head.")


def text_fields(raw: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """Return the fields of the decoder, and where they are; `raw` itself if it is no wrapper.

    Fields that the decoder leaves out have the defaults of its class in `transformers`. Raises
    `ModelError`.
    """
    source = Fields(raw, where)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in WRAPPERS:
        return raw, where
    if raw.get("text_config") is None:
        raise source.error("text_config", f"must be given for {kind}", "download the file again")
    text = Fields(source.object("text_config"), f"{where}: text_config")
    name = text.text("model_type", WRAPPERS[kind][0])
    if name not in WRAPPERS[kind]:
        raise text.error(
            "model_type", f"must be {' or '.join(WRAPPERS[kind])}", "choose another model"
        )
    outer = {key: raw[key] for key in _OUTER if raw.get(key) is not None}
    fields = {**ARCHITECTURES[name].defaults, **text.raw, **outer, "model_type": name}
    fields.pop("architectures", None)
    return fields, text.where


def text_tensors(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the tensors of the decoder, by the name that it has without a wrapper, and the others.

    Without a wrapper all names are as they are, or without `model.` in front where the decoder was
    saved without its output head (Qwen3-Embedding).
    """
    stored = list(names)
    if "embed_tokens.weight" in stored:
        return {x if x.startswith("lm_head.") else f"model.{x}": x for x in stored}, []
    if not any(name.startswith(_PREFIXES) for name in stored):
        return {name: name for name in stored}, []
    decoder = {}
    for name in stored:
        prefix = next((x for x in _PREFIXES if name.startswith(x)), None)
        if prefix is not None:
            own = "lm_head." if "lm_head" in prefix else "model."
            decoder[own + name.removeprefix(prefix)] = name
        elif name.startswith("lm_head."):
            decoder[name] = name
    return decoder, sorted(set(stored) - set(decoder.values()))
