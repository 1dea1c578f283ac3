"""Random tiny configurations of families, with every field that changes numbers.

Sizes are those of `TINY` wherever a family allows it, so that all share the kernels of matmuls.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from hypothesis import strategies as st

Changes: TypeAlias = dict[str, Any]

LAYERS = 3
MAX_POSITION = 512
NO_PADDING = {"pad_token_id": 0}
ORIGINAL = 24  # tokens of the first training, of scaled rotary embeddings
KINDS = st.lists(
    st.sampled_from(["full_attention", "sliding_attention"]), min_size=LAYERS, max_size=LAYERS
)
THETA = st.sampled_from([100.0, 1e4, 1e6])
LINEAR = st.builds(lambda x: {"rope_type": "linear", "factor": x}, st.sampled_from([2.0, 8.0]))
YARN = st.fixed_dictionaries(
    {
        "rope_type": st.just("yarn"),
        "factor": st.sampled_from([4.0, 16.0]),
        "original_max_position_embeddings": st.just(ORIGINAL),
    }
)
PLAIN = st.just({"rope_type": "default"})


def with_theta(ropes: st.SearchStrategy[Changes]) -> st.SearchStrategy[Changes]:
    """Rotary embeddings with a base period."""
    return st.builds(lambda rope, theta: rope | {"rope_theta": theta}, ropes, THETA)


# By class name of the family in `transformers`: the changes of a configuration.
FAMILIES: dict[str, st.SearchStrategy[Changes]] = {
    "Gemma3": st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([8, 16]),
            "sliding_window": st.sampled_from([5, 24]),
            "layer_types": KINDS,
            "query_pre_attn_scalar": st.sampled_from([8, 16, 29]),
            "final_logit_softcapping": st.sampled_from([None, 3.0]),
            "rope_parameters": st.fixed_dictionaries(
                {
                    "full_attention": with_theta(PLAIN | LINEAR),
                    "sliding_attention": with_theta(PLAIN),
                }
            ),
            "tie_word_embeddings": st.booleans(),
            **{key: st.just(x) for key, x in NO_PADDING.items()},
        }
    ),
}


def in_files(family: str, changes: Changes) -> Changes:
    """What GGUF files fix: they have no entry for it."""
    match family:
        case "Gemma3":
            return {"query_pre_attn_scalar": changes["head_dim"]}
        case _:
            return {}
