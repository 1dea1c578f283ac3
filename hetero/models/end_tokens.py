"""Tokens that end a generation, by their text: the names of llama.cpp's vocabulary loader.

Files often give one end-of-text id where a chat ends its turns by another token (`<|end|>`,
`<|eot_id|>`, `<end_of_turn>`), so llama.cpp ends a generation at every token of these names
(`llama_vocab::impl::load` in `llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

ENDS: Final = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# Fill-in-the-middle tokens of code models: the first of each kind is special.
FIM: Final[Mapping[str, tuple[str, ...]]] = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>",
                "<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>",
                "<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>",
                "<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
FIM_ENDS: Final = ("fim_pad", "fim_rep", "fim_sep")  # these end a generation
# Vocabularies in which `<|end|>` ends a message, but not the turn: o200k_harmony and Solar Open.
_END_GOES_ON: Final = ({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"},
                       {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"})  # fmt: skip
# Vocabularies in which `</s>` is text.
_PLAIN_S: Final = ("<|tool_response>", "<|plamo:eos|>")


def not_ends(ends: set[str]) -> set[str]:
    """Return the tokens among `ends` that do not end a generation, given the others."""
    plain = {"<|end|>"} if any(pair <= ends for pair in _END_GOES_ON) else set()
    return (plain | ({"</s>"} if not ends.isdisjoint(_PLAIN_S) else set())) & ends


def named_ends(ids: Mapping[str, int], fim: Iterable[str] = FIM_ENDS) -> dict[str, int]:
    """Return the tokens of a vocabulary that end a generation, by their names alone.

    `fim` are the kinds of fill-in-the-middle tokens to include.
    """
    ends = {name: ids[name] for name in ENDS if name in ids}
    plain = not_ends(set(ends))
    ends |= fim_tokens(ids, fim)
    return {name: id_ for name, id_ in ends.items() if name not in plain}


def fim_tokens(ids: Mapping[str, int], kinds: Iterable[str] = FIM) -> dict[str, int]:
    """Return the fill-in-the-middle tokens of a vocabulary."""
    candidates = [[name for name in FIM[kind] if name in ids] for kind in kinds]
    return {
        name: ids[name]
        for names in candidates
        if names
        for name in [min(names, key=lambda x: ids[x])]
    }
