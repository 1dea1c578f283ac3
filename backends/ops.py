"""Operation records: what a kernel computes, as plain data.

Notation, used everywhere:

    m   tokens of this call            k   input features       n   output features (weight rows)
    H   query heads                    G   key/value heads      D   head size
    C   capacity of a KV cache, tokens d   hidden size          f   feed-forward size
    L   taps of a short convolution

Every record lists its ports: the tensors that `Kernel.bind` takes by name. Tensors are float32 and
row-major [tokens, features] unless a record says otherwise. Inputs and outputs never overlap; the
KV caches and the states (`STATE_PORTS`) are the only tensors that are updated in place. Weights are
passed to `Device.prepare` by the names in `weight_names`.

A state has one size whatever the context: it is what the tokens before a call leave to it. Calls of
one context run in the order of their positions, with their true number of tokens; a call at
position 0 starts from zeros and does not read the state, which may hold anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal, TypeAlias

from hetero.backends.extensible import Extensible, later
from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.frequency_scaling import RopeScaling

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu"]
ExpertActivation: TypeAlias = Activation | Literal["swiglu_oai"]
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
RouterScores: TypeAlias = Literal["softmax", "softmax_chosen", "sigmoid"]
ROWS_OF_EXPERT = 16  # the rows of an expert's matrices are a multiple of this
PASS_TOKENS = 512  # whose experts are computed together at most: bounds the memory of their rows
L2_EPS: Final = 1e-6  # of the norms of queries and keys in `GatedDelta`
OperandOrder: TypeAlias = Literal["plain", "transposed"]


@dataclass(frozen=True, kw_only=True)
class MatMul:
    """`y[m, n] = x[m, k] · W[n, k]ᵀ (+ bias[n])`.

    Then, with `softcap` > 0, the soft cap softcap · tanh(y / softcap).

    Ports: `x` [m, k], `y` [m, n]. Weights: `weight` (PackedWeight of n × k), `bias` [n] float32 if
    `bias`, `x_scale` [1] float32 if the format's activations are static: their codes are then
    rint(x / x_scale), halves to even, from -128 to 127, and y = float32(exact sum of the products
    of codes) · (x_scale · scale of the row) + bias (on QNN y is rounded to 8 bits). `order` is the
    NPU's operand order (paper section 4, layer-level optimisation): it changes speed, never the
    result or the layout of x and y.
    """

    n: int
    k: int
    weight_format: WeightFormat
    order: OperandOrder = "plain"
    bias: bool = False
    softcap: float = 0.0
    ports: ClassVar[tuple[str, ...]] = ("x", "y")

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise ValueError(f"a matmul needs n >= 1 and k >= 1, got n={self.n}, k={self.k}")

    def flops(self, m: int) -> int:
        """Return multiply-adds counted twice, for m tokens."""
        return 2 * m * self.n * self.k


@dataclass(frozen=True, kw_only=True, repr=False)
class Embed(Extensible):
    """`y[t] = scale · W[tokens[t]]`. Ports: `tokens` int32 [m], `y` [m, d].

    Weights: `weight` (PackedWeight of vocab × d; activations do not matter here). Token ids outside
    [0, vocab) are undefined behaviour: the caller checks them. Where the table is `mapped` no
    device computes it: the control thread reads the rows from the model's file.
    """

    vocab: int
    d: int
    weight_format: WeightFormat
    scale: float = 1.0
    mapped: bool = later(False)
    ports: ClassVar[tuple[str, ...]] = ("tokens", "y")


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """`y = x / sqrt(mean(x²) + eps) · weight`, per token.

    Ports: `x` [m, d], `y` [m, d]; with `add` also `residual` [m, d] and `sum` [m, d]: the input of
    the norm is `sum = x + residual`, which is written out. Weights: `weight` [d] float32.
    """

    d: int
    eps: float
    add: bool = False

    @property
    def ports(self) -> tuple[str, ...]:
        """Return the tensor names that `bind` takes."""
        return ("x", "residual", "sum", "y") if self.add else ("x", "y")


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """`y = (x - mean) / sqrt(var + eps) · weight + bias`. Ports and `add` as in `RMSNorm`.

    Weights: `weight` [d], `bias` [d] float32.
    """

    d: int
    eps: float
    add: bool = False

    @property
    def ports(self) -> tuple[str, ...]:
        """Return the tensor names that `bind` takes."""
        return ("x", "residual", "sum", "y") if self.add else ("x", "y")


@dataclass(frozen=True, kw_only=True, repr=False)
class Rope(Extensible):
    """Rotate queries and keys by their positions ("rotate half", as Hugging Face stores weights).

    Ports: `qkv` [m, (H + 2G)·D] (queries, keys, values of a token side by side), `position` int32
    [1] (position of the call's first token), `out` (like `qkv`; values are copied). With `qk_norm`,
    each head of q and k first goes through RMSNorm with weights `q_norm` [D], `k_norm` [D] and
    that eps; with `qk_norm_row` all heads of q, and all of k, together (weights [H·D] and [G·D]);
    with `qk_norm_after` after they are rotated. With `v_norm_eps` each head of v goes through
    RMSNorm without a weight. `max_position` bounds position + m. `rotary_dim` ≤
    D dimensions are rotated. With `gated`, `qkv` has H·D gates of the output between queries and
    keys, which are not read here. With G = 0 there are queries only, and no `k_norm`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    max_position: int
    rotary_dim: int = 0
    scaling: RopeScaling = RopeScaling()  # noqa: RUF009
    qk_norm_eps: float | None = None
    qk_norm_row: bool = later(False)
    qk_norm_after: bool = later(False)
    v_norm_eps: float | None = later(None)
    gated: bool = later(False)
    ports: ClassVar[tuple[str, ...]] = ("qkv", "position", "out")

    def __post_init__(self) -> None:
        whole = self.rotated == self.head_dim
        if self.qk_norm_after and not whole:
            raise ValueError(f"whole heads are rotated before a norm, got {self.rotary_dim}")
        if self.scales_queries and not (whole and self.scaling.original_max_position):
            raise ValueError(
                "queries are scaled by position where whole heads are rotated and the scaling has "
                f"original_max_position, got rotary_dim={self.rotary_dim} and "
                f"original_max_position={self.scaling.original_max_position}"
            )

    @property
    def scales_queries(self) -> bool:
        """Return whether queries are scaled by their positions."""
        return self.scaling.llama_4_scaling_beta != 0

    def norm_width(self, name: str) -> int:
        """Return the elements of the weight `q_norm` or `k_norm`."""
        heads = self.heads if name == "q_norm" else self.kv_heads
        return heads * self.head_dim if self.qk_norm_row else self.head_dim

    @property
    def width(self) -> int:
        """Return the features of one token of `out`."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def gates(self) -> int:
        """Return the features of one token of `qkv` that are gates."""
        return self.heads * self.head_dim if self.gated else 0

    @property
    def rotated(self) -> int:
        """Return the dimensions of each head that are rotated."""
        return self.rotary_dim or self.head_dim


@dataclass(frozen=True, kw_only=True, repr=False)
class Attention(Extensible):
    """Append this call's keys and values to the caches, then attend causally.

    Positions are rows of the caches: a caller that omits tokens that no window reaches counts
    from the first row.

    Ports: `qkv` [m, (H + 2G)·D] (after `Rope`), `position` int32 [1], `k_cache` and `v_cache` of
    the shape `kv.shape(G, C, D)` (updated in place at positions position … position + m - 1), `out`
    [m, H·D]. Caches hold floats, rounded to nearest, or codes with scales (`kv_rows`), whose
    channels they have themselves. This call's own keys and values are read back from the caches.
    Token t attends to positions p ≤ position + t and, with `window` > 0, p > position + t - window.
    `scale` (default D^-0.5) multiplies the scores; with `softcap` > 0 they then become
    softcap · tanh(score / softcap). Cache contents beyond position + m are never read. With `reads`
    the caches are another layer's, which has appended this call's keys and values: nothing is
    appended, and `qkv` has queries only, [m, H·D].

    With `sinks` each head h has one more score, the weight `sinks[h]` ([H] float32), without a
    value: the softmax is over the scores and the sink, whose share is dropped (gpt-oss; Xiao et
    al., arXiv 2309.17453). The sink is neither scaled nor soft-capped.
    """

    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    kv: CacheFormat = CacheFormat.F32
    sinks: bool = later(False)
    reads: bool = later(False)
    ports: ClassVar[tuple[str, ...]] = ("qkv", "position", "k_cache", "v_cache", "out")

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"query heads must be a multiple of key/value heads, got {self.heads} and "
                f"{self.kv_heads}"
            )

    @property
    def width(self) -> int:
        """Return the features of one token of `qkv`."""
        return (self.heads + (0 if self.reads else 2 * self.kv_heads)) * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Return factor on the scores before the softmax."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, kw_only=True)
class AttentionHeads:
    """Key/value heads first … first + count - 1 of `attention`, with their query heads.

    Two devices share an attention when each has some of its heads.

    Ports: those of `attention`, whole. Of `qkv` its heads' columns are read; of the caches and of
    `out` its heads are all that is touched, so that others may be computed at the same time.
    Weights: `sinks` of all heads, if the attention has some.
    """

    attention: Attention
    first: int
    count: int
    ports: ClassVar[tuple[str, ...]] = Attention.ports

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.first + self.count <= self.attention.kv_heads:
            raise ValueError(
                f"heads are some of {self.attention.kv_heads} key/value heads, got {self.count} "
                f"from {self.first} on"
            )

    @property
    def alone(self) -> Attention:
        """Return the attention that has these heads and no others."""
        group = self.attention.heads // self.attention.kv_heads
        return replace(self.attention, heads=self.count * group, kv_heads=self.count)

    @property
    def columns(self) -> tuple[int, int]:
        """Return the columns of `out`, which are those of the queries in `qkv`, too."""
        of = self.attention
        width = of.heads // of.kv_heads * of.head_dim
        return self.first * width, (self.first + self.count) * width

    @property
    def queries(self) -> slice:
        """Return the query heads among those of `attention`."""
        group = self.attention.heads // self.attention.kv_heads
        return slice(self.first * group, (self.first + self.count) * group)


@dataclass(frozen=True, kw_only=True)
class SumScores:
    """Sums of the weights that attention's sampled rows give to each column (LLMS, equation 1).

    Rows are the tokens t of the call for which position + t + 1 is a multiple of `every`:
    `score_sums[g, c] += sum over them and over the H/G query heads of g of A[row, c] / H`, A
    being the probabilities of `attention`. It has no sinks: probabilities are among tokens.

    Ports: those of `attention` without its values and its output, which ran before (`k_cache` has
    the call's own keys), and `score_sums` [G, C] float32, updated in place at columns below
    position + m.
    """

    attention: Attention
    every: int
    ports: ClassVar[tuple[str, ...]] = ("qkv", "position", "k_cache", "score_sums")

    def __post_init__(self) -> None:
        if self.attention.sinks:
            raise ValueError("scores are summed of attention without sinks")


@dataclass(frozen=True, kw_only=True)
class DecodeChunks:
    """Codes of m chunks of keys and values of one layer, written into the caches (LLMS, 3.2).

    A chunk is `tokens` tokens T, stored in `codes` as n = 2·G·T·D codes, keys before values, each
    [G, T, D]. With 16 bits they are float16. With 8 to 2 fp16 amplitudes come first: one for each
    head of the keys (`keys_by_token`: for each of its tokens), then one for each head of the values
    (`by_token`: likewise). Then come the upper two bits of all codes, four in a byte, the first in
    the lowest bits (n/4 bytes); with 4 bits and more the next two in the same way; with 8 the lower
    four, two in a byte (n/2 bytes). "3" are 4 of keys (n/8 bytes) and 2 of values, "6" are 8 of
    keys (n/4 bytes) and 4 of values. A code c of b bits stands for

        (c + 1/2 - 2^(b-1)) · s,  s = amplitude · 2^(1-b) (· channels[g, d], for keys)

    where s and the product are rounded to float32, then to the caches' format: caches of codes
    round it with the scales of channels that they have. Where these are `channels`, codes of 8 bits
    go into such caches as they are, c - 128 with the step amplitude / 128.

    Ports: `codes` uint8 [room]; `table` int32 [m, 4]: first position, bits (0: no chunk), first
    byte, which is even, and a mask of the heads that the chunk has (0: all); `k_cache` and
    `v_cache` [G, C, D] in the format `kv`, where only the chunks' positions and heads are touched.
    Weights: `channels` [G·D] float32. What is beyond the tensors, and other bits, are undefined.
    """

    kv_heads: int
    head_dim: int
    capacity: int
    room: int
    tokens: int = 16
    by_token: bool = False
    keys_by_token: bool = False
    kv: CacheFormat = CacheFormat.F32
    ports: ClassVar[tuple[str, ...]] = ("codes", "table", "k_cache", "v_cache")

    def __post_init__(self) -> None:
        if self.head_dim * self.tokens % 4:
            raise ValueError(
                f"{self.tokens} tokens of {self.head_dim} values do not fill bytes of four codes"
            )

    @property
    def values(self) -> int:
        """Return the values of a chunk: keys and values."""
        return 2 * self.kv_heads * self.tokens * self.head_dim

    @property
    def amplitudes(self) -> int:
        """Return the amplitudes of a chunk."""
        return self.kv_heads * sum(self.amplitude_rows)

    @property
    def amplitude_rows(self) -> tuple[int, int]:
        """Return the amplitudes of a head's keys and of its values."""
        return self.tokens if self.keys_by_token else 1, self.tokens if self.by_token else 1

    def chunk_bytes(self, bits: int, heads: int | None = None) -> int:
        """Return what a chunk of so many heads (None: all) takes in `codes`."""
        each = bits * self.values // 8 + (0 if bits > 8 else 2 * self.amplitudes)
        return each if heads is None else heads * each // self.kv_heads


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """Depthwise causal convolution of L taps over tokens: each feature by itself.

        c[t] = bias + Σ_j taps[j] ⊙ u[t - L + 1 + j],  0 ≤ j < L;  y = act(c)

    where u is x; `gated` x is B | C | X side by side, u = B ⊙ X and y = C ⊙ act(c) (LFM2). Without
    `activation` act(c) = c.

    Ports: `x` [m, max(width, d)], gated [m, max(width, 3d)], of which the first d or 3d columns are
    read; `position` int32 [1]; `conv_state` [L - 1, d]: the rows of u before the call's first,
    replaced by those up to its last; `y` [m, d]. Weights: `taps` [L · d], all features of the tap
    of the oldest row first; `bias` [d] if `bias`.
    """

    d: int
    taps: int
    gated: bool = False
    activation: Activation | None = None
    bias: bool = False
    width: int = 0
    ports: ClassVar[tuple[str, ...]] = ("x", "position", "conv_state", "y")

    def __post_init__(self) -> None:
        if self.d < 1 or self.taps < 2:
            raise ValueError(
                f"a short convolution needs d >= 1 and taps >= 2, got {self.d} and {self.taps}"
            )

    @property
    def columns(self) -> int:
        """Return the columns of `x` that are read."""
        return 3 * self.d if self.gated else self.d


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated delta rule over tokens, then a gated norm (Qwen3-Next, Qwen3.5; arXiv 2412.06464).

    A value head j has a state S [dk, dv] and uses the key head j mod k_heads. For each token, with
    q and k divided by sqrt(Σ x² + 1e-6), q also by sqrt(dk), beta = sigmoid(b) and
    g = decay · softplus(a + dt_bias), which is not positive,

        S ← exp(g) · S;  u = beta · (v - Sᵀ k);  S ← S + k uᵀ;  o = Sᵀ q
        y = o / sqrt(mean(o²) + eps) · norm · silu(z)

    Ports: `x` [m, 2·k_heads·dk + v_heads·dv]: all q, all k, all v; `gates` [m, max(width, v_heads ·
    (dv + 2))], whose last columns are z [v_heads · dv], b and a [v_heads each]; `position` int32
    [1]; `delta_state` [v_heads, dk, dv]; `y` [m, v_heads · dv]. Weights: `decay` and `dt_bias`
    [v_heads], `norm` [dv].
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    eps: float
    width: int = 0
    ports: ClassVar[tuple[str, ...]] = ("x", "gates", "position", "delta_state", "y")

    def __post_init__(self) -> None:
        if self.v_heads % self.k_heads:
            raise ValueError(
                f"value heads must be a multiple of key heads, got {self.v_heads} and "
                f"{self.k_heads}"
            )

    @property
    def columns(self) -> int:
        """Return the columns of `x`."""
        return 2 * self.k_heads * self.k_dim + self.values

    @property
    def values(self) -> int:
        """Return the columns of the values, of z and of `y`."""
        return self.v_heads * self.v_dim

    @property
    def gates_width(self) -> int:
        """Return the columns of `gates`."""
        return max(self.width, self.values + 2 * self.v_heads)


@dataclass(frozen=True, kw_only=True)
class GatedAct:
    """`y = act(x[:, :f]) · x[:, f:]`. Ports: `x` [m, 2f] (gate, then up), `y` [m, f]."""

    f: int
    activation: Activation = "silu"
    ports: ClassVar[tuple[str, ...]] = ("x", "y")


def _check_columns(op: SigmoidGate | GatedInput, what: str) -> None:
    if not 0 <= op.first <= op.width - op.d:
        first = f"from column {op.first} on"
        raise ValueError(f"{op.d} {what} {first} are not in {op.width} columns")


@dataclass(frozen=True, kw_only=True)
class SigmoidGate:
    """`y = x · sigmoid(gates[:, first : first + d])`: the output gate of attention (Qwen3.5).

    Ports: `x` and `y` [m, d], `gates` [m, width].
    """

    d: int
    first: int
    width: int
    ports: ClassVar[tuple[str, ...]] = ("x", "gates", "y")

    def __post_init__(self) -> None:
        _check_columns(self, "gates")


@dataclass(frozen=True, kw_only=True)
class GatedInput:
    """`y = act(x) · (residual + inputs[:, first : first + d])`: a layer's own inputs (Gemma 4).

    Ports: `x`, `residual` and `y` [m, d], `inputs` [m, width].
    """

    d: int
    first: int
    width: int
    activation: Activation = "gelu_tanh"
    ports: ClassVar[tuple[str, ...]] = ("x", "residual", "inputs", "y")

    def __post_init__(self) -> None:
        _check_columns(self, "inputs")


@dataclass(frozen=True, kw_only=True)
class Act:
    """`y = act(x)`. Ports: `x`, `y`, both [m, f]."""

    f: int
    activation: Activation
    ports: ClassVar[tuple[str, ...]] = ("x", "y")


@dataclass(frozen=True, kw_only=True)
class AddPositions:
    """`y[t] = x[t] + table[min(position + t + offset, rows - 1)]`: learned positions.

    Ports: `x` [m, d], `position` int32 [1], `y` [m, d]. Weights: `table` [rows · d] float32, row
    after row. (Rows after the table's end are only met by padded tokens, which are not read.)
    """

    d: int
    rows: int
    offset: int = 0
    ports: ClassVar[tuple[str, ...]] = ("x", "position", "y")


@dataclass(frozen=True, kw_only=True, repr=False)
class Add(Extensible):
    """`y = x + residual`; with `scaled` y = (x + residual) · weight.

    Ports: `x`, `residual`, `y`, all [m, d]. Weights: with `scaled` `weight` [1] float32.
    """

    d: int
    scaled: bool = later(False)
    ports: ClassVar[tuple[str, ...]] = ("x", "residual", "y")


@dataclass(frozen=True, kw_only=True)
class GatedAdd:
    """`y = residual + sigmoid(gates · weight) · x`: one gate of a token for all features.

    It adds a shared expert to the chosen ones (Qwen1.5-MoE, Qwen3.5-MoE).

    Ports: `x`, `gates`, `residual` and `y` [m, d]. Weights: `weight` [d] float32.
    """

    d: int
    ports: ClassVar[tuple[str, ...]] = ("x", "gates", "residual", "y")


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """Outlying activations of a matmul of 8-bit codes, added to the residual stream.

    The mllm-NPU paper, section 3.3, while the matmul runs: `y = residual + x[:, hot] · W_hotᵀ +
    excess(x) · Wᵀ`.

    `hot` features, 0 or more, have zero codes in the matmul's weight and are multiplied in floating
    point here. With `excess`, what the codes of the other features cannot hold is added:
    excess(x) = (q - min(max(q, -128), 127)) · x_scale of q = rint(x / x_scale).

    Ports: `x` [m, k], `residual` [m, n], `y` [m, n]. Weights: `hot` int32 [hot], rising, and
    `hot_weight` (PackedWeight f16 of n × hot) if `hot`; `weight` (PackedWeight q8r of n × k, that
    of the matmul) and its `x_scale` [1] if `excess`.
    """

    n: int
    k: int
    hot: int = 0
    excess: bool = False
    ports: ClassVar[tuple[str, ...]] = ("x", "residual", "y")

    def __post_init__(self) -> None:
        if not 0 <= self.hot <= self.k or not (self.hot or self.excess):
            raise ValueError(
                f"outliers are of 0 to k={self.k} hot features, of the excess, or of both, got "
                f"hot={self.hot}"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class Router(Extensible):
    """Choose K of E experts for each token, and the weight of each.

    Logits are z = x · Wᵀ (+ bias). With scores `softmax`, s = softmax(z) over all experts, with
    `sigmoid` s = σ(z), with `softmax_chosen` s = z. The experts of the K largest s (with
    `choice_bias`, of s + choice bias) are chosen, of equal ones the first. Their weights are s,
    divided by (their sum + `eps`) if `renormalised`, or their softmax (`softmax_chosen`); then they
    are multiplied by `scale`, and with `expert_scale` by a factor of each expert (Gemma 4).
    (Mixtral, arXiv 2401.04088, section 2.1, has `softmax_chosen`;
    DeepSeek-V3, arXiv 2412.19437, equations 14 to 16, `sigmoid` with a choice bias.)

    Ports: `x` [m, d], `y` [m, 2K]: numbers of the chosen experts, as floats, the largest score
    first, then their weights. Weights, all float32: `router` [E · d], row after row; `router_bias`
    [E] if `bias`; `choice_bias` [E] if `choice_bias`; `expert_scale` [E] if `expert_scale`.
    """

    experts: int
    chosen: int
    d: int
    scores: RouterScores = "softmax"
    bias: bool = False
    choice_bias: bool = False
    renormalised: bool = True
    eps: float = 0.0
    scale: float = 1.0
    expert_scale: bool = later(False)
    ports: ClassVar[tuple[str, ...]] = ("x", "y")

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(
                f"a router chooses 1 to all of its {self.experts} experts, got {self.chosen}"
            )


@dataclass(frozen=True, kw_only=True)
class Experts:
    """`y[t] = Σ_j weight_j · (down_e · (act(gate_e · x[t]) ⊙ up_e · x[t]))`, e the j-th chosen.

    With `bias` each of the three products has its own. The activation `swiglu_oai` is that of
    gpt-oss: with gate g at most 7 and up u within ±7, (u + 1) · g · σ(1.702 · g).

    Ports: `x` [m, d], `routes` [m, 2K] (`Router`'s output), `y` [m, d]. Weights: `experts_gate` and
    `experts_up` (PackedWeight of E·f × d, expert after expert) and `experts_down` (PackedWeight of
    E·d × f), each of one part; with `bias` `experts_gate_bias` and `experts_up_bias` [E·f],
    `experts_down_bias` [E·d] float32. d and f are multiples of 16, so that an expert begins at a
    block of rows. The sum is over a `subset` of experts (rising; empty: all): the rest is another
    device's.
    """

    experts: int
    chosen: int
    d: int
    f: int
    weight_format: WeightFormat
    activation: ExpertActivation = "silu"
    bias: bool = False
    subset: tuple[int, ...] = later(())
    ports: ClassVar[tuple[str, ...]] = ("x", "routes", "y")

    def __post_init__(self) -> None:
        if list(self.subset) != sorted({*self.subset} & {*range(self.experts)}):
            raise ValueError(f"a subset is of rising numbers below {self.experts}: {self.subset}")
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"{self.chosen} of {self.experts} experts cannot be chosen")
        if self.d % ROWS_OF_EXPERT or self.f % ROWS_OF_EXPERT:
            raise ValueError(
                f"experts have multiples of {ROWS_OF_EXPERT} features, got {self.d} and {self.f}"
            )

    @property
    def own(self) -> tuple[int, ...]:
        """Return the numbers of the experts that it computes."""
        return self.subset or tuple(range(self.experts))

    @property
    def matmuls(self) -> dict[str, MatMul]:
        """Return one expert's matmuls by the names of their weights."""
        up = MatMul(n=self.f, k=self.d, weight_format=self.weight_format, bias=self.bias)
        return {
            "experts_gate": up,
            "experts_up": up,
            "experts_down": replace(up, n=self.d, k=self.f),
        }

    def row_bytes(self, m: int) -> int:
        """Return the bytes of a GPU's rows for m tokens, at most.

        A row is a pair of a token and an expert: its input, packed as well, and its products. Of
        each expert up to 7 rows are padding.
        """
        pairs = min(m, PASS_TOKENS) * self.chosen
        rows = pairs + 7 * min(self.experts, pairs)
        widest = max(self.d, self.f)
        words = widest + max(self.d, 2 * self.f) + 33 * (widest // 32 + 1) + 2
        return 4 * (rows * words + pairs + 2 * self.experts + 64)

    def distinct(self, m: int) -> float:
        """Return how many of its experts m tokens are expected to need, equally likely."""
        return len(self.own) * (1 - (1 - self.chosen / self.experts) ** m)


Op: TypeAlias = (
    MatMul
    | Embed
    | RMSNorm
    | LayerNorm
    | Rope
    | Attention
    | AttentionHeads
    | SumScores
    | DecodeChunks
    | ShortConv
    | GatedDelta
    | GatedAct
    | SigmoidGate
    | GatedInput
    | Act
    | AddPositions
    | Add
    | GatedAdd
    | Outliers
    | Router
    | Experts
)


# Ports that a call writes and does not read. (Attention also updates its caches in place.)
OUTPUT_PORTS = frozenset({"y", "sum", "out"})
# Ports that a call adds to.
ADDED_PORTS = frozenset({"score_sums"})
# Ports of float32 that a call reads, unless it is at position 0, and replaces.
STATE_PORTS = ("conv_state", "delta_state")


def has_sinks(op: Op) -> bool:
    """Return whether an operation is attention with sinks."""
    whole = op.attention if isinstance(op, AttentionHeads) else op
    return isinstance(whole, Attention) and whole.sinks


def has_state(op: Op) -> bool:
    """Return whether a call replaces a state, for which its tokens must not be padded."""
    return not set(STATE_PORTS).isdisjoint(op.ports)


def weight_names(op: Op) -> tuple[str, ...]:  # noqa: PLR0911, PLR0912
    """Return the names of the weights that `Device.prepare` takes for `op`."""
    match op:
        case MatMul():
            static = op.weight_format.activations.static
            return ("weight", *["bias"] * op.bias, *["x_scale"] * static)
        case Embed() | RMSNorm() | GatedAdd():
            return ("weight",)
        case LayerNorm():
            return ("weight", "bias")
        case Rope():
            names = ("q_norm", "k_norm") if op.kv_heads else ("q_norm",)
            return names if op.qk_norm_eps is not None else ()
        case Add():
            return ("weight",) if op.scaled else ()
        case Attention() | AttentionHeads():
            return ("sinks",) if has_sinks(op) else ()
        case AddPositions():
            return ("table",)
        case DecodeChunks():
            return ("channels",)
        case GatedDelta():
            return ("decay", "dt_bias", "norm")
        case ShortConv():
            return ("taps", "bias") if op.bias else ("taps",)
        case Outliers():
            slab = ("hot", "hot_weight") if op.hot else ()
            return (*slab, *(("weight", "x_scale") if op.excess else ()))
        case Router():
            given = {"router_bias": op.bias, "choice_bias": op.choice_bias}
            given["expert_scale"] = op.expert_scale
            return ("router", *(name for name, present in given.items() if present))
        case Experts():
            matrices = tuple(op.matmuls)
            return matrices + tuple(f"{name}_bias" for name in matrices) * op.bias
        case _:
            return ()


def describe(op: Op) -> str:  # noqa: PLR0911, PLR0912
    """Return short name for messages and traces, such as `MatMul(n=2048, k=8192, w4a16)`."""
    match op:
        case MatMul():
            return f"MatMul(n={op.n}, k={op.k}, {op.weight_format})"
        case Embed():
            return f"Embed(vocab={op.vocab}, d={op.d}, {op.weight_format})"
        case AttentionHeads():
            stop = op.first + op.count
            return f"AttentionHeads({op.first} to {stop} of {describe(op.attention)})"
        case SumScores():
            return f"SumScores({describe(op.attention)}, every={op.every})"
        case DecodeChunks():
            return f"DecodeChunks(kv_heads={op.kv_heads}, head_dim={op.head_dim}, {op.kv})"
        case Rope() | Attention():
            kind = type(op).__name__
            return f"{kind}(heads={op.heads}, kv_heads={op.kv_heads}, head_dim={op.head_dim})"
        case GatedDelta():
            sizes = f"k_heads={op.k_heads}, v_heads={op.v_heads}, k_dim={op.k_dim}"
            return f"GatedDelta({sizes}, v_dim={op.v_dim})"
        case ShortConv():
            gated = ", gated" if op.gated else ""
            return f"ShortConv(d={op.d}, taps={op.taps}{gated})"
        case Outliers():
            excess = ", excess" if op.excess else ""
            return f"Outliers(n={op.n}, k={op.k}, hot={op.hot}{excess})"
        case GatedAct() | Act():
            return f"{type(op).__name__}(f={op.f}, {op.activation})"
        case Router():
            return f"Router({op.chosen} of {op.experts}, d={op.d}, {op.scores})"
        case Experts():
            sizes = f"{op.chosen} of {op.experts}, d={op.d}, f={op.f}"
            return f"Experts({sizes}, {op.weight_format})"
        case _:
            return f"{type(op).__name__}(d={op.d})"


def is_mapped(op: Op) -> bool:
    """Return whether the control thread computes an operation, from the model's file."""
    return isinstance(op, Embed) and op.mapped
