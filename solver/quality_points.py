"""Records of what a budget of quality buys: those of `hetero plan --quality`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=1, lt=2**63)]
Tokens = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[float, Field(ge=1e-30, le=1e30)]
Nats = Annotated[float, Field(ge=0, le=1e30)]


class _Record(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)


class QualityPoint(_Record):
    """Types of a model's tensors: what they cost, and their KL divergence in nats a token.

    `types` counts tensors of matmuls and embeddings; `inputs` of matmuls with at most 6 bits a
    weight are floats or rounded to int8. Times are predicted, on the fastest `devices`; `kl` is
    `measured`, or predicted from what was.
    """

    name: str
    types: dict[str, Size]
    inputs: Literal["float", "int8"] = "float"
    weight_bytes: Size
    kl: Nats
    measured: bool
    prompt_s: Seconds
    prompt_devices: tuple[str, ...]
    decode_s: Seconds
    decode_devices: tuple[str, ...]


class Quality(_Record):
    """The `choices` within a budget of nats a token, and a `frontier` of others.

    Uniform types are part of it. A prompt has `prompt_tokens`; a decode step comes after `context`.
    """

    budget: Annotated[float, Field(gt=0, le=1e30)]
    prompt_tokens: Tokens
    context: Tokens
    choices: Annotated[tuple[QualityPoint, ...], Field(min_length=1, max_length=8)]
    frontier: Annotated[tuple[QualityPoint, ...], Field(max_length=256)] = ()
