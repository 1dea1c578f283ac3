"""Small configurations, random checkpoints and tokenizers for the tests of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Rope
from hetero.models.checkpoint import expected_tensors
from hetero.models.config import ModelConfig
from hetero.models.graph import rope_of

# Formats that any checkpoint has; the others need a calibration text or a GGUF file.
UNCALIBRATED = [x for x in WeightFormat if not x.activations.static and not x.of_file]

CORPUS = [
    "Once upon a time there was a little café, and the naïve fox said: “hello 😀 world”.",
    "def main():\n    print('tabs\tand  spaces')\n\n多言語のテキスト。 Привет, мир! 👩‍👩‍👧",
] * 4


def small_config(**changes: Any) -> ModelConfig:
    """A llama of odd sizes: k and vocabulary are no multiples of the packing's blocks."""
    sizes: dict[str, Any] = {
        "architecture": "llama",
        "hidden_size": 24,
        "intermediate_size": 43,
        "num_layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "vocab_size": 301,
        "max_position": 64,
    }
    return ModelConfig(**(sizes | changes))


def first_rope(config: ModelConfig) -> Rope:
    """The rotary embedding of the first layer."""
    rope = rope_of(config, 0)
    assert rope is not None
    return rope


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """A checkpoint's tensors, normally distributed."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, dtype=np.float32)
        for name, shape in expected_tensors(config).items()
    }


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: BPE over bytes, no spaces added."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """Like Llama 2 and Mistral: words start with ▁, unknown characters become byte tokens."""
    words = ["▁", *"etaoinshrdlucmfwypvbgkjqxz", "th", "▁th", "▁the", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{x:02X}>" for x in range(256)), *words]
    model = models.BPE(
        {token: index for index, token in enumerate(tokens)},
        [("t", "h"), ("▁", "th"), ("▁th", "e")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer
