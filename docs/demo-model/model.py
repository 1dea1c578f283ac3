"""A Llama in plain PyTorch, with the names of Hugging Face's weights, trainable to 4 bits.

Notation: B batch, T tokens, C hidden size, H heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

GROUP_SIZE = 32
# Large, so that tokens of one class (names) stay apart while their common direction is learnt.
EMBEDDING_STD = 0.3


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of the demo model; every matmul k is a multiple of 32, every row count of 64."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_json(self) -> dict[str, object]:
        """Hugging Face's config.json for this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "use_cache": True,
            "torch_dtype": "float32",
        }


def quantise_dequantise(weight: Tensor) -> Tensor:
    """`weight` [.., k] as it reads after 4-bit storage: groups of 32 along k, signed-max symmetric.

    llama.cpp's Q4_0: d = fp16(v / -8) with v the group's element of largest magnitude;
    q = clip(floor(w / d + 8.5), 0, 15); w' = (q - 8) d.
    """
    groups = weight.float().reshape(-1, GROUP_SIZE)
    peak = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scale = (peak / -8).half().float()
    safe_scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    code = torch.clamp(torch.floor(groups / safe_scale + 8.5), 0, 15)
    return ((code - 8) * scale).reshape(weight.shape)


def straight_through(weight: Tensor) -> Tensor:
    """The 4-bit value of `weight` forward, the identity backward."""
    return weight + (quantise_dequantise(weight.detach()) - weight).detach()


class Linear(nn.Module):
    """x [.., k] -> [.., n], without bias; through 4 bits when `is_quantised`."""

    def __init__(self, k: int, n: int, *, std: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) * (k**-0.5 if std is None else std))
        self.is_quantised = False

    def used_weight(self) -> Tensor:
        """The weight that the forward pass multiplies by."""
        return straight_through(self.weight) if self.is_quantised else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """The product with the used weight."""
        return nnf.linear(x, self.used_weight())


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight."""
        return nnf.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_tables(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """cos and sin [max T, D], the two halves of D alike."""
    exponent = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angle = torch.outer(
        torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-exponent
    )
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, T, D] (Hugging Face's half-split order)."""
    left, right = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-right, left), -1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, query_size)
        self.k_proj = Linear(shape.hidden_size, kv_size)
        self.v_proj = Linear(shape.hidden_size, kv_size)
        self.o_proj = Linear(query_size, shape.hidden_size)
        self._start_as_copier()

    def _start_as_copier(self) -> None:
        # With o = v transposed a head begins by copying what it attends to (mimetic initialisation,
        # Trockman and Kolter 2023); from a random start names are copied only after a long plateau.
        v = torch.empty_like(self.v_proj.weight)
        nn.init.orthogonal_(v)
        heads = v.view(self.shape.num_key_value_heads, self.shape.head_dim, -1)
        repeats = self.shape.num_attention_heads // self.shape.num_key_value_heads
        with torch.no_grad():
            self.v_proj.weight.copy_(v)
            self.o_proj.weight.copy_(heads.repeat_interleave(repeats, 0).flatten(0, 1).T / 4)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeats = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)  # [B, H, T, D]
        out = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class Mlp(nn.Module):
    """The gated SiLU feed-forward."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        residual_std = shape.intermediate_size**-0.5 / math.sqrt(2 * shape.num_hidden_layers)
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        out: Tensor = self.down_proj(nnf.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embedding, layers and final norm (Hugging Face's `model.` prefix)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = Linear(shape.hidden_size, shape.vocab_size, std=EMBEDDING_STD)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        # The embedding is also the output matrix: keeps the first logits near a deviation of 1.
        nn.init.constant_(self.norm.weight, 1 / (EMBEDDING_STD * shape.hidden_size**0.5))


class Llama(nn.Module):
    """The demo model; the embedding is also the output matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] -> logits [B, T, vocabulary]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        embedding = self.model.embed_tokens.used_weight()
        x = nnf.embedding(tokens, embedding)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return nnf.linear(self.model.norm(x), embedding)

    def set_quantised(self, is_quantised: bool) -> None:
        """Switches every matrix between float and 4-bit weights."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.is_quantised = is_quantised

    def parameter_count(self) -> int:
        """Number of trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())
