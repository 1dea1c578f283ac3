"""The tensors of a model's packed weights, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetero.backends.formats import StorageFormat
from hetero.backends.memory import PAGE_BYTES
from hetero.backends.weights import packed_bytes, padded
from hetero.models.config import ModelConfig


@dataclass(frozen=True)
class MatrixShape:
    """A packed weight of n rows and k features."""

    name: str
    n: int
    k: int

    def nbytes(self, storage: StorageFormat) -> int:
        """Return the bytes of data and scales, without page padding."""
        return packed_bytes(storage, self.n, self.k)


@dataclass(frozen=True)
class VectorShape:
    """A float32 vector of n elements: a norm's weight or a bias.

    One of `width` elements a row is a matrix in files: the router's weight, a shared expert's gate.
    """

    name: str
    n: int
    width: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in files."""
        return (self.n // self.width, self.width) if self.width else (self.n,)


PARALLEL_NORMS: Final = ("router_norm", "experts_norm", "chosen_norm", "plain_norm")
EXPERTS: Final = ("experts_gate", "experts_up", "experts_down")


def block_matrices(config: ModelConfig, layer: int) -> tuple[MatrixShape, ...]:
    """Return the packed weights of one block."""
    own = tuple(MatrixShape(x.name, x.n, x.k) for x in config.block_matmuls(layer))
    return own + expert_matrices(config, layer)


def expert_matrices(config: ModelConfig, layer: int) -> tuple[MatrixShape, ...]:
    """Return the matrices of a block's routed experts, each with the rows of all experts."""
    experts = config.routed(layer)
    if experts is None:
        return ()
    rows = experts.count * experts.width, experts.count * config.hidden_size
    sizes = (rows[0], config.hidden_size), (rows[0], config.hidden_size), (rows[1], experts.width)
    return tuple(MatrixShape(name, *size) for name, size in zip(EXPERTS, sizes, strict=True))


def block_vectors(
    config: ModelConfig, storage: StorageFormat, layer: int
) -> tuple[VectorShape, ...]:
    """Return the float32 vectors of one block.

    Norms come first, then the taps of a convolution, then the biases that the model has, then the
    scales of the matmuls' inputs (`scaled_inputs`).
    """
    attends = config.mixers[layer] == "attention"
    names = ["input_norm"] if config.parallel else ["input_norm", "post_norm"]
    names = names if config.in_norms else []
    names += ["o_norm", "down_norm"] if config.out_norms else []
    norms = _norms(config, names)
    if attends and config.qk_norm:
        own = config.at(layer)
        heads = (own.heads, own.kv_heads) if config.qk_norm_row else (1, 1)
        names = ["q_norm"] if config.reads(layer) else ["q_norm", "k_norm"]
        sizes = zip(names, heads, strict=False)
        norms += [VectorShape(name, count * own.head_dim) for name, count in sizes]
    if config.mixers[layer] == "delta":
        norms += _delta_vectors(config)
    if config.mixers[layer] == "conv":
        norms += [VectorShape("conv_taps", config.conv_taps * config.hidden_size)]
        norms += [VectorShape("conv_bias", config.hidden_size)] if config.conv_bias else []
    if attends and config.sinks:
        norms += [VectorShape("sinks", config.heads)]
    norms += _router_vectors(config, layer)
    if config.layer_inputs:
        norms += [VectorShape("input_in_norm", config.layer_inputs)]
        norms += [VectorShape("input_out_norm", config.hidden_size)]
    norms += [VectorShape("layer_scale", 1)] if config.layer_scale else []
    biases = [x for x in config.block_matmuls(layer) if x.bias]
    scales = [VectorShape(f"{x.name}_x_scale", 1) for x in block_matrices(config, layer)]
    return (
        *norms,
        *(VectorShape(f"{x.name}_bias", x.n) for x in biases),
        *(scales if scaled_inputs(storage) else ()),
    )


def _delta_vectors(config: ModelConfig) -> list[VectorShape]:
    assert config.delta is not None
    heads = config.delta.v_heads
    return [
        VectorShape("conv_taps", config.conv_taps * config.delta.channels),
        VectorShape("delta_decay", heads),
        VectorShape("delta_dt_bias", heads),
        VectorShape("delta_norm", config.delta.v_dim),
    ]


def scaled_inputs(storage: StorageFormat) -> bool:
    """Return whether weights of this storage have a static scale of each matmul's input.

    Weights with one scale a row do: they are multiplied with integers alone.
    """
    return storage.scales == "row"


def model_vectors(config: ModelConfig, storage: StorageFormat) -> tuple[VectorShape, ...]:
    """Return the float32 vectors outside of the blocks; the table of positions row after row."""
    vectors = _norms(config, ["final_norm", *(MTP_NORMS if config.mtp else ())])
    if config.head_bias:
        vectors.append(VectorShape("lm_head_bias", config.vocab_size))
    if config.positions:
        vectors.append(VectorShape("positions", config.positions * config.hidden_size))
    if scaled_inputs(storage):
        vectors.append(VectorShape("lm_head_x_scale", 1))
    return tuple(vectors)


def _norms(config: ModelConfig, names: list[str]) -> list[VectorShape]:
    shapes = [VectorShape(name, config.hidden_size) for name in names]
    if config.norm == "layer":
        shapes += [VectorShape(f"{name}_bias", config.hidden_size) for name in names]
    return shapes


def _router_vectors(config: ModelConfig, layer: int) -> list[VectorShape]:
    """Return the router's weight, row after row, its biases, and what else experts have."""
    experts = config.routed(layer)
    if experts is None:
        return []
    weight = VectorShape("router", experts.count * config.hidden_size, config.hidden_size)
    given = {
        "router_bias": experts.router_bias,
        "choice_bias": experts.choice_bias,
        "expert_scale": experts.parallel,
    }
    vectors = [weight] + [VectorShape(name, experts.count) for name, has in given.items() if has]
    if experts.shared:
        vectors += [VectorShape("shared_gate", config.hidden_size, config.hidden_size)]
    if experts.parallel:
        vectors += [VectorShape(name, config.hidden_size) for name in PARALLEL_NORMS]
    matrices = expert_matrices(config, layer) if experts.bias else ()
    return vectors + [VectorShape(f"{x.name}_bias", x.n) for x in matrices]


MAPPED: Final = ("embed_inputs",)  # whose rows are read from the file, one by one
# Of a head for multi-token prediction: the left and right half of one weight [d, 2d], and norms.
MTP_HALVES: Final = ("mtp_embed", "mtp_hidden")
MTP_NORMS: Final = ("mtp_embed_norm", "mtp_hidden_norm")


def embedding_matrices(config: ModelConfig) -> tuple[MatrixShape, ...]:
    """Return the matrices outside of the blocks.

    They are the embeddings, also those of the layers' inputs, the output head unless tied, and what
    a head for multi-token prediction begins with.
    """
    embed = MatrixShape("embed", config.vocab_size, config.hidden_size)
    shapes = [embed]
    if config.layer_inputs:
        width = config.num_layers * config.layer_inputs
        shapes.append(MatrixShape("embed_inputs", config.vocab_size, width))
    if not config.tie_word_embeddings:
        shapes.append(MatrixShape("lm_head", config.vocab_size, config.hidden_size))
    if config.mtp:
        d = config.hidden_size
        shapes += [MatrixShape(name, d, d) for name in MTP_HALVES]
    return tuple(shapes)


def stored_shape(matrix: MatrixShape) -> tuple[int, int]:
    """Return the shape of the tensor of a matrix outside of the blocks, or of two halves."""
    return matrix.n, matrix.k * (2 if matrix.name in MTP_HALVES else 1)


def total_bytes(config: ModelConfig, storage: StorageFormat) -> int:
    """Return the bytes of all packed weights and vectors of a model, without page padding."""
    layers = range(config.num_layers)
    blocks = sum(x.nbytes(storage) for i in layers for x in block_matrices(config, i))
    blocks += sum(4 * x.n for i in layers for x in block_vectors(config, storage, i))
    outside = sum(x.nbytes(storage) for x in embedding_matrices(config))
    outside += sum(4 * x.n for x in model_vectors(config, storage))
    return blocks + outside


def page_padded(nbytes: int) -> int:
    """Return bytes rounded up to whole pages of 4096 (the file format's page, on every machine)."""
    return padded(nbytes, FILE_PAGE_BYTES)


FILE_PAGE_BYTES = 4096
assert PAGE_BYTES % FILE_PAGE_BYTES == 0


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
