"""Random Hugging Face checkpoints of every supported architecture, and the reference's logits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends.weights import PackedWeight
from hetero.models import LoadedModel
from hetero.models.architectures import ARCHITECTURES

torch: Any = pytest.importorskip("torch")  # the reference; exists for Linux on x86-64
transformers: Any = pytest.importorskip("transformers")
torch.set_num_threads(1)  # these matrices are too small to share

# Standard deviations of random weights. HARD lets the blocks outweigh the embeddings, so that a
# wrong block cannot hide; DEFAULT is what `transformers` itself takes, and leaves both about as
# long, as in a trained model: formats that lose something are held to the float model there.
HARD, DEFAULT = 0.1, 0.02

TINY = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Configurations of families whose name is that of a model of text and pictures.
CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}


@dataclass(frozen=True)
class Case:
    """One architecture at one size."""

    name: str
    kind: str
    changes: dict[str, Any]
    rewritten: str = ""  # another architecture that these weights are saved as


CASES = (
    Case("llama-tied", "Llama", {"tie_word_embeddings": True}),
    Case(
        "llama3-rope",
        "Llama",
        {
            "hidden_size": 128,
            "head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    Case("llama-linear-rope", "Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    Case(
        "llama-yarn-rope",
        "Llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    Case("mistral-window", "Mistral", {"sliding_window": 24, "head_dim": 16}),
    Case(
        "qwen2-biases",
        "Qwen2",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    ),
    Case("qwen3-qk-norm", "Qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
    Case("qwen1.5", "Qwen2", {"num_key_value_heads": 8, "tie_word_embeddings": False}),
    Case("internlm2", "Llama", {"num_key_value_heads": 2, "attention_bias": True}, "internlm2"),
    Case("gemma", "Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    Case(
        "gemma2",
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # the only one that caps scores
        },
    ),
    Case("phi2", "Phi", {"num_attention_heads": 4, "num_key_value_heads": 4,
                         "partial_rotary_factor": 0.5}),
    Case("phi3-window", "Phi3", {"sliding_window": 24, "pad_token_id": 0}),
    Case("phi3-partial", "Phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    Case(
        "qwen3.5",
        "Qwen3_5",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "pad_token_id": 0,
        },
    ),
    Case(
        "lfm2",
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 4,
        },
    ),
    Case("opt", "OPT", {"ffn_dim": 172, "word_embed_proj_dim": 64}),
    Case("opt-untied", "OPT", {"ffn_dim": 172, "word_embed_proj_dim": 64, "enable_bias": False,
                               "tie_word_embeddings": False}),
)  # fmt: skip


GEMMA4 = Case(
    "gemma4",
    "Gemma4",
    {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "sliding_window": 24,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 263,
        "pad_token_id": 0,
    },
)


def make_checkpoint(
    case: Case, folder: Path, *, dtype: torch.dtype = torch.float32, spread: float = HARD
) -> Any:
    """Write a random checkpoint; returns the `transformers` model in float32.

    `spread` is the weights' standard deviation. Gemma 2 norms what a block adds, which is then as
    long as the norm's gains whatever the weights are: below HARD the gains are such that all
    blocks together add as much as the embedding.
    """
    torch.manual_seed(7)
    config = getattr(transformers, CONFIGS.get(case.kind, f"{case.kind}Config"))(
        **{**TINY, "initializer_range": spread, **case.changes}
    )
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if case.kind == "Gemma2" and ".post_" in name and spread < HARD:
                embedding = spread * config.hidden_size**0.5  # of one feature
                gain = embedding / (2 * config.num_hidden_layers) ** 0.5
                parameter.copy_((1 + parameter) * gain - 1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.6 * torch.rand_like(buffer))
    model.to(dtype).save_pretrained(folder)
    if case.rewritten:
        rewrite_as_internlm2(folder)
    write_byte_tokenizer(folder, config.vocab_size)
    return model.to(torch.float32)


def write_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer that covers the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet]
    words += [f"<extra{i}>" for i in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}', encoding="utf-8"
    )


def rewrite_as_internlm2(folder: Path) -> None:
    """Turn a Llama checkpoint into InternLM2's: the same numbers under its names and row order."""
    from safetensors.torch import load_file, save_file

    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, groups = raw["num_attention_heads"], raw["num_key_value_heads"]
    tensors = load_file(folder / "model.safetensors")
    names = {
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output",
    }  # fmt: skip
    found = {}
    for name, value in tensors.items():
        if "self_attn.k_proj" in name or "self_attn.v_proj" in name:
            continue
        if "self_attn.q_proj" in name:
            k, v = (tensors[name.replace("q_proj", x)] for x in ("k_proj", "v_proj"))
            rest = value.shape[1:]
            parts = [x.reshape(groups, -1, raw["head_dim"], *rest) for x in (value, k, v)]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = (
                torch.cat(parts, dim=1).reshape(-1, *rest).contiguous()
            )
            continue
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)  # noqa: PLW2901
        found[name] = value
    assert heads % groups == 0
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    raw |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": True}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


def load_dequantized(model: Any, loaded: LoadedModel) -> Any:
    """Put the numbers that `loaded` computes with into the reference model."""
    config = loaded.config
    named = "llama" if config.architecture == "internlm2" else config.architecture
    architecture = ARCHITECTURES[named]
    names = architecture.names
    own = model.state_dict()
    state: dict[str, torch.Tensor] = {}

    def put(weight: PackedWeight, modules: Sequence[str], prefix: str = "") -> None:
        values, start = weight.dequantize(), 0
        for module in modules:
            rows = own[f"{prefix}{module}.weight"].shape[0]
            part = values[start : start + rows].copy()
            for axis, orders in enumerate((architecture.row_order, architecture.column_order)):
                if module in orders:
                    part = np.take(part, np.argsort(orders[module](config)), axis=axis)
            state[f"{prefix}{module}.weight"] = torch.from_numpy(part)
            start += rows
        assert start == weight.n

    put(loaded.weights.embed(), [names.model_modules["embed"]])
    put(loaded.weights.lm_head(), [names.model_modules["lm_head"]])
    for i in range(config.num_layers):
        block = loaded.weights.block(i)
        for name in block.matrices:
            modules = names.matmuls[name]
            put(block.matrix(name), modules, names.block.format(i))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(
        name.endswith(
            (
                "norm.weight",
                "bias",
                "embed_positions.weight",
                "conv.conv.weight",
                "conv1d.weight",
                "A_log",
            )
        )
        for name in missing
    ), missing
    return model


def reference_logits(model: Any, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits [tokens, vocab] of the `transformers` model, float32."""
    with torch.no_grad():
        found = model(torch.tensor([list(tokens)])).logits[0]
    return np.asarray(found.float().numpy())


@dataclass
class Int8Codes:
    """What `int8_activations` saw: how near each token's codes came to rounding the other way.

    `margins` [sequences, tokens]: the least distance to a border between two codes, in codes.
    """

    margins: torch.Tensor = field(default_factory=lambda: torch.tensor(0.5))

    def rounded(self, module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> torch.Tensor:
        """The input of a matmul as `w4a8` takes it: int8 codes times one scale per 32 features."""
        (x,) = arguments  # [sequences, tokens, k], in OPT's feed-forward [sequences · tokens, k]
        k = x.shape[-1]
        blocks = torch.nn.functional.pad(x, (0, -k % 32)).unflatten(-1, (-1, 32))
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        wanted = torch.where(scales > 0, blocks / scales, 0.0)
        codes = wanted.round()
        near = 0.5 - (wanted - codes).abs().flatten(-2).amax(-1)
        seen = self.margins.shape or near.shape
        self.margins = torch.minimum(self.margins, near.reshape(seen))
        return (codes * scales).flatten(-2)[..., :k]


@contextmanager
def int8_activations(model: Any) -> Iterator[Int8Codes]:
    """The `transformers` model computes every matmul, the head included, as `w4a8` defines it."""
    seen = Int8Codes()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(seen.rounded) for module in linear]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def calm_prompt(model: Any, length: int) -> tuple[list[int], float]:
    """`length` tokens at which no code of `int8_activations` is near a border, and how near.

    Two correct computations in float32 differ in the last bits, which moves a code across a border
    now and then; one such flip is 1 % of an activation, and more flips follow. At these tokens
    nothing flips, so that they must agree as floats do. Token by token the calmest of some.
    """
    random, vocab = np.random.default_rng(5), model.config.vocab_size
    tokens: list[int] = []
    nearest = 0.5
    while len(tokens) < length:
        choice = random.choice(np.arange(3, vocab), 24, replace=False).tolist()
        with torch.no_grad(), int8_activations(model) as seen:
            model(torch.tensor([[*tokens, token] for token in choice]))
        best = int(seen.margins[:, -1].argmax())
        nearest = min(nearest, float(seen.margins[best, -1]))
        tokens.append(choice[best])
    return tokens, nearest


def relative_error(got: Any, expected: Any) -> float:
    """‖got − expected‖ / ‖expected‖ in float64."""
    wide = np.asarray(expected, dtype=np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - wide) / np.linalg.norm(wide))
