"""`random:NAME`: the shapes of known models with seeded random weights, for benchmarks.

Weights are drawn in packed form. Their scale is about 1 / sqrt(k), so that activations stay near 1
from layer to layer. Every block has memory of its own.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import GROUP_SIZE, INT8_STATIC, StorageFormat, WeightFormat
from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.weights import ROW_BLOCK, Float32Array, PackedWeight
from hetero.errors import ModelError
from hetero.models.architectures import ARCHITECTURES
from hetero.models.config import ModelConfig, mtp_head
from hetero.models.expert_config import ExpertConfig
from hetero.models.layout import block_matrices, embedding_matrices, model_vectors
from hetero.models.model_weights import BlockWeights, ModelWeights
from hetero.models.packing import empty_packed
from hetero.models.published import PUBLISHED

GENERATOR_VERSION = 1  # part of the fingerprint: raise it when the numbers change
MAX_POSITION = 8192  # tokens; longer tables and caches would only cost memory

_POOL_WORDS = 1 << 21  # 16 MiB of random bits that every weight is cut from
_RANGE_WORDS = 1 << 17
_Q4_RMS = 21.5**0.5  # of the values -8 … 7
_Q8_RMS = (127 * 128 / 3) ** 0.5  # of the values -127 … 127


def _config(
    architecture: str,
    sizes: tuple[int, int, int, int, int, int, int],
    max_position: int,
    theta: float,
    eps: float,
    **rest: Any,
) -> ModelConfig:
    d, f, layers, heads, kv_heads, head_dim, vocab = sizes
    return ModelConfig(
        architecture=architecture,
        hidden_size=d,
        intermediate_size=f,
        num_layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position=max_position,
        rope_theta=theta,
        rms_norm_eps=eps,
        **rest,
    )


def _llama32(sizes: tuple[int, int, int, int, int, int, int]) -> ModelConfig:
    scaling = RopeScaling(
        kind="llama3",
        factor=32.0,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    return _config(
        "llama", sizes, 131072, 5e5, 1e-5, rope_scaling=scaling, tie_word_embeddings=True
    )


def _qwen25(sizes: tuple[int, int, int, int, int, int, int], max_position: int) -> ModelConfig:
    return _config("qwen2", sizes, max_position, 1e6, 1e-6, qkv_bias=True, tie_word_embeddings=True)


def _qwen3_moe(
    sizes: tuple[int, int, int, int, int, int, int], experts: int, width: int
) -> ModelConfig:
    routed = ExpertConfig(count=experts, chosen=8, width=width)
    return _config("qwen3_moe", sizes, 40960, 1e6, 1e-6, qk_norm=True, experts=routed)


def _lfm2(
    sizes: tuple[int, int, int, int, int, int, int], attending: Collection[int]
) -> ModelConfig:
    """Return a model whose other layers are short convolutions."""
    return _config(
        "lfm2",
        sizes,
        128000,
        1e6,
        1e-5,
        qk_norm=True,
        mixers=tuple("attention" if i in attending else "conv" for i in range(sizes[2])),
        conv_taps=3,
        tie_word_embeddings=True,
    )


# d, f, layers, H, G, D, vocabulary; from each model's published config.json
KNOWN_MODELS: dict[str, ModelConfig] = {
    "llama-3.2-1b": _llama32((2048, 8192, 16, 32, 8, 64, 128256)),
    "llama-3.2-3b": _llama32((3072, 8192, 28, 24, 8, 128, 128256)),
    "llama-3-8b": _config("llama", (4096, 14336, 32, 32, 8, 128, 128256), 8192, 5e5, 1e-5),
    "llama-2-7b": _config("llama", (4096, 11008, 32, 32, 32, 128, 32000), 4096, 1e4, 1e-5),
    "tinyllama-1.1b": _config("llama", (2048, 5632, 22, 32, 4, 64, 32000), 2048, 1e4, 1e-5),
    "internlm2-1.8b": _config("internlm2", (2048, 8192, 24, 16, 8, 128, 92544), 32768, 1e6, 1e-5),
    "qwen1.5-1.8b": _config(
        "qwen2", (2048, 5504, 24, 16, 16, 128, 151936), 32768, 1e6, 1e-6, qkv_bias=True
    ),
    "qwen2.5-0.5b": _qwen25((896, 4864, 24, 14, 2, 64, 151936), 32768),
    "qwen2.5-1.5b": _qwen25((1536, 8960, 28, 12, 2, 128, 151936), 131072),
    "qwen3-0.6b": _config(
        "qwen3",
        (1024, 3072, 28, 16, 8, 128, 151936),
        40960,
        1e6,
        1e-6,
        qk_norm=True,
        tie_word_embeddings=True,
    ),
    "qwen3-30b-a3b": _qwen3_moe((2048, 6144, 48, 32, 4, 128, 151936), 128, 768),
    # No published one: what a laptop of 8 GB holds, with 8 of 64 experts.
    "qwen3-moe-3b": _qwen3_moe((1024, 3072, 24, 16, 4, 64, 151936), 64, 512),
    "mistral-7b": _config(
        "mistral", (4096, 14336, 32, 32, 8, 128, 32000), 32768, 1e4, 1e-5, windows=(4096,) * 32
    ),
    "gemma-2b": _config(
        "gemma",
        (2048, 16384, 18, 8, 1, 256, 256000),
        8192,
        1e4,
        1e-6,
        activation="gelu_tanh",
        embed_scale=2048**0.5,
        tie_word_embeddings=True,
    ),
    "gemma-2-2b": _config(
        "gemma2",
        (2304, 9216, 26, 8, 4, 256, 256000),
        8192,
        1e4,
        1e-6,
        activation="gelu_tanh",
        embed_scale=2304**0.5,
        tie_word_embeddings=True,
        windows=(4096, 0) * 13,
        out_norms=True,
        attention_scale=256**-0.5,
        attention_softcap=50.0,
        logit_softcap=30.0,
    ),
    "phi-2": _config(
        "phi",
        (2560, 10240, 32, 32, 32, 80, 51200),
        2048,
        1e4,
        1e-5,
        rotary_dim=32,
        activation="gelu_tanh",
        norm="layer",
        parallel=True,
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
    ),
    "phi-3-mini": _config(
        "phi3", (3072, 8192, 32, 32, 32, 96, 32064), 4096, 1e4, 1e-5, windows=(2047,) * 32
    ),
    "opt-1.3b": _config(
        "opt",
        (2048, 8192, 24, 32, 32, 64, 50272),
        2048,
        1e4,
        1e-5,
        positions=2050,
        position_offset=2,
        activation="relu",
        norm="layer",
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "lfm2-1.2b": _lfm2((2048, 8192, 16, 32, 8, 64, 65536), (2, 5, 8, 10, 12, 14)),
}
KNOWN_MODELS |= {name: ModelConfig.from_dict(raw, where=name) for name, raw in PUBLISHED.items()}


def known_config(name: str) -> ModelConfig:
    """Return the configuration of a known model. Raises `ModelError` with the nearest name."""
    key = name.lower()
    if key not in KNOWN_MODELS:
        near = difflib.get_close_matches(key, KNOWN_MODELS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ModelError(
            f"{name!r} is not a known model; {hint}choose one of: {', '.join(KNOWN_MODELS)}"
        )
    return KNOWN_MODELS[key]


def limited(config: ModelConfig) -> ModelConfig:
    """Return the configuration with at most `MAX_POSITION` tokens of context."""
    return replace(config, max_position=min(config.max_position, MAX_POSITION))


class RandomWeights(ModelWeights):
    """Seeded random weights; the same numbers for the same configuration, format and seed."""

    def __init__(self, config: ModelConfig, weight_format: WeightFormat, seed: int = 0) -> None:
        super().__init__(config, weight_format)
        self.seed = seed
        bits = np.random.SFC64(np.random.SeedSequence([seed, GENERATOR_VERSION]))
        self._pool: npt.NDArray[np.uint64] = bits.random_raw(_POOL_WORDS)
        if ARCHITECTURES[config.architecture].mtp and not config.mtp:
            head = RandomWeights(mtp_head(config), weight_format, seed + 1)
            self.mtp, head.trunk = head, self

    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks; the final norm's weight is 1 (`logit_scale`)."""
        shapes = model_vectors(self.config, self.weight_format.storage)
        shape = next(x for x in shapes if x.name == name)
        if name == "final_norm":
            return self._with_logit_scale(name, np.ones(shape.n, dtype=np.float32))
        return self._vector(name, shape.n)

    def _load_block(self, index: int) -> BlockWeights:
        storage = self.weight_format.storage
        packed = {
            shape.name: self._draw(f"{index}.{shape.name}", storage, shape.n, shape.k)
            for shape in block_matrices(self.config, index)
        }
        vectors = {
            shape.name: self._vector(f"{index}.{shape.name}", shape.n)
            for shape in self.vectors(index)
        }
        return BlockWeights(packed, vectors)

    def _load_matrix(self, name: str) -> PackedWeight:
        shape = next(x for x in embedding_matrices(self.config) if x.name == name)
        return self._draw(name, self.weight_format.storage, shape.n, shape.k)

    def _generator(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(name.encode()).digest()
        key = [self.seed, GENERATOR_VERSION, int.from_bytes(digest[:8], "little")]
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))

    def _vector(self, name: str, n: int) -> Float32Array:
        """Return norm weights near 1, biases near 0, and scales for inputs up to four times 1.

        Norms and activations keep the inputs of matmuls near 1 in size.
        """
        if name.endswith("_x_scale"):
            return np.full(n, 4 / INT8_STATIC.largest, dtype=np.float32)
        values = self._generator(name).uniform(-0.1, 0.1, n).astype(np.float32)
        if name.endswith(".delta_decay"):  # negative, or states would grow from token to token
            return 5 * values - 1
        return values + np.float32(name.endswith("_norm"))

    def _draw(self, name: str, storage: StorageFormat, n: int, k: int) -> PackedWeight:
        packed = empty_packed(storage, n, k)
        generator = self._generator(name)
        if not storage.quantised:
            _fill_floats(generator, packed)
        else:
            self._fill_bits(generator, packed.data)
            _fill_scales(generator, packed)
        _clear_padding(packed)
        return packed

    def _fill_bits(self, generator: np.random.Generator, data: npt.NDArray[Any]) -> None:
        """Fill memory with random bytes: ranges of a pool, each under a random mask.

        Drawing every word would cost 2 seconds per GB; blocks differ as they should either way.
        """
        words = data.reshape(-1).view(np.uint64)
        starts = range(0, words.size, _RANGE_WORDS)
        masks = generator.integers(0, 1 << 64, len(starts), dtype=np.uint64)
        places = generator.integers(0, _POOL_WORDS - _RANGE_WORDS, len(starts))
        for start, mask, place in zip(starts, masks, places, strict=True):
            target = words[start : start + _RANGE_WORDS]
            np.bitwise_xor(self._pool[place : place + target.size], mask, out=target)
        if data.dtype == np.int8:
            np.maximum(data, -127, out=data)


def _fill_scales(generator: np.random.Generator, packed: PackedWeight) -> None:
    """Fill scales of both signs (as q4 has them), within a factor of 1.5 of each other."""
    assert packed.scales is not None
    rms = _Q4_RMS if packed.storage is StorageFormat.Q4 else _Q8_RMS
    typical = 1.0 / (rms * packed.k**0.5)
    scales = generator.random(packed.scales.shape, dtype=np.float32)
    scales *= np.float32(0.5 * typical)
    scales += np.float32(0.75 * typical)
    if packed.storage is StorageFormat.Q4:
        signs = generator.integers(0, 2, packed.scales.shape, dtype=np.int8)
        np.negative(scales, out=scales, where=signs.astype(bool))
    packed.scales[...] = scales


def _fill_floats(generator: np.random.Generator, packed: PackedWeight) -> None:
    """Fill uniform values of standard deviation 1 / sqrt(k), a few rows at a time."""
    width = np.float32(2 * 3**0.5 / packed.k**0.5)
    for block in packed.data:
        block[...] = (generator.random(block.shape, dtype=np.float32) - np.float32(0.5)) * width


def _clear_padding(packed: PackedWeight) -> None:
    """Zero padded rows and features, as `hetero.backends.weights` requires."""
    rows, features = packed.n % ROW_BLOCK, packed.k % GROUP_SIZE
    if packed.scales is None:
        if rows:
            packed.data[-1, :, rows:] = 0
        return
    is_q4 = packed.storage is StorageFormat.Q4
    if rows:
        packed.scales[-1, ..., rows:] = 0
        if is_q4:
            packed.data[-1, :, :, rows:] = np.uint32(0x88888888)
        else:
            packed.data[-1, :, :, rows:] = 0
    if features and is_q4:
        _clear_nibbles(packed.data[:, -1], features)
    elif features:
        for feature in range(features, GROUP_SIZE):
            packed.data[:, -1, feature // 4, :, feature % 4] = 0


def _clear_nibbles(words: npt.NDArray[np.uint32], features: int) -> None:
    """Set nibbles `features` … 31 of the words [N/16, 4, 16] of the last group to 8."""
    for feature in range(features, GROUP_SIZE):
        shift = np.uint32(4 * (feature % 8))
        column = words[:, feature // 8]
        column &= ~np.uint32(15 << shift)
        column |= np.uint32(8 << shift)
