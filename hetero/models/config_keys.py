"""Fields of a config.json that change numbers in other families of models.

The decoder uses none of them, so any value but the neutral one is an error. Fields that no family
computes with (dropout, initialisation, a library's notes) are harmless, whatever they say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hetero.models.architectures.base import Decoder, kinds_of
from hetero.models.fields import Fields
from hetero.terminal.notices import notify_once

# Values that change nothing; so do null, false, 0 and what is empty.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    # scales of embeddings, residuals, scores and logits
    "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,),
    "logit_scale": (1,), "lm_head_multiplier": (1,), "key_multiplier": (1,),
    "attention_in_multiplier": (1,), "attention_out_multiplier": (1,), "mlp_multipliers": (),
    "scale_emb": (1,), "scale_depth": (), "embed_scale": (1,), "normalize_embedding": (),
    "attn_temperature_tuning": (), "use_logn_attn": (), "clip_qkv": (), "norm_head": (),
    # norms of queries and keys
    "qk_norm": (), "use_qk_norm": (), "qk_layernorm": (), "use_qk_layernorm": (),
    # experts and latent attention
    "num_experts": (), "num_local_experts": (), "n_routed_experts": (), "moe_num_experts": (),
    "q_lora_rank": (), "kv_lora_rank": (),
    # which positions a layer sees, and how it knows them
    "alibi": (), "use_alibi": (), "attention_chunk_size": (), "sliding_window_pattern": (),
    "use_bidirectional_attention": (), "rope_interleaved": (), "rope_interleave": (),
    "rope_local_base_freq": (), "rope_ratio": (1,), "no_rope_layer_interval": (),
    # what a block is made of
    "parallel_attn": (), "use_parallel_residual": (), "parallel_residual": (),
    "is_encoder_decoder": (), "add_cross_attention": (), "pruned_heads": (),
    "attention_value_scale": (1,), "hybrid_override_pattern": (), "cross_attention_layers": (),
}  # fmt: skip
# Behind `rope_scaling` or `rope_parameters`.
NEUTRAL_ROPE: Final[Mapping[str, tuple[object, ...]]] = {
    "alpha": (), "llama_4_scaling_beta": (), "attn_factor": (1,), "extrapolation_factor": (1,),
}  # fmt: skip
# Used by one family only; elsewhere the value must be the one that the decoder has anyway.
SAME: Final[Mapping[str, Callable[[Decoder], object]]] = {
    "layer_types": lambda config: kinds_of(config.windows),
    "attention_multiplier": lambda config: config.attention_scale or config.head_dim**-0.5,
    "query_pre_attn_scalar": lambda config: (
        config.attention_scale**-2 if config.attention_scale else config.head_dim
    ),
    "attn_logit_softcapping": lambda config: config.attention_softcap,
    "final_logit_softcapping": lambda config: config.logit_softcap,
    "no_rope_layers": lambda config: [int(x) for x in config.rotates],
}


def refuse_unused(source: Fields, config: Decoder, used: Sequence[str]) -> None:
    """Raise `ModelError` for a field that changes numbers but that the decoder does not use.

    `used` are fields that its family uses, and most others do not.
    """
    _refuse_others(source, {name: x for name, x in NEUTRAL.items() if name not in used})
    for name in ("rope_scaling", "rope_parameters"):
        neutral = {key: x for key, x in NEUTRAL_ROPE.items() if key not in used}
        _refuse_others(Fields(source.object(name), f"{source.where}: {name}"), neutral)
    for name, own in SAME.items():
        if name in used:
            continue
        value, wanted = source.raw.get(name), own(config)
        if value and not _is_same(value, wanted):
            raise source.error(
                name, f"must be {wanted!r} with the other fields", "choose another model"
            )


def _refuse_others(source: Fields, neutral: Mapping[str, tuple[object, ...]]) -> None:
    for name in neutral:
        value = source.raw.get(name)
        if value and not (isinstance(value, int | float) and value in neutral[name]):
            rule = f"other than {neutral[name][0]} " if neutral[name] else ""
            raise source.error(name, f"{rule}is not supported", "choose another model")


def _is_same(value: Any, wanted: object) -> bool:
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return abs(value - wanted) <= 1e-6 * abs(wanted)
    return bool(value == wanted)


# Fields of a generation_config.json that change which tokens `transformers` draws, and that are not
# read: with these values, or without one, they change nothing.
UNREAD: Final[Mapping[str, tuple[object, ...]]] = {
    "bad_words_ids": (), "suppress_tokens": (), "begin_suppress_tokens": (), "sequence_bias": (),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "force_words_ids": (), "constraints": (),
    "stop_strings": (), "no_repeat_ngram_size": (), "min_length": (), "min_new_tokens": (),
    "exponential_decay_length_penalty": (), "typical_p": (1,), "top_h": (1,), "epsilon_cutoff": (),
    "eta_cutoff": (), "guidance_scale": (1,), "penalty_alpha": (), "num_beams": (1,),
    "dola_layers": (), "watermarking_config": (),
}  # fmt: skip


def notice_unread(generation: Mapping[str, Any], where: str) -> None:
    """Give one notice of the fields of a generation_config.json that are not used."""
    names = [
        name
        for name, neutral in UNREAD.items()
        if generation.get(name) and generation[name] not in neutral
    ]
    if names:
        notify_once(
            f"{where}: {', '.join(names)} {'is' if len(names) == 1 else 'are'} not read: answers "
            "may differ from those of transformers"
        )
