"""The calibration in a manifest: static activation scales, their origin, and what each costs."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hetero.errors import UserError
from hetero.models.config import ModelConfig
from hetero.models.layout import MatrixShape, block_matrices

Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class OutlierChoice(NamedTuple):
    """The choice of `--outliers`: the part of the matmuls that keep a shadow, 0 to 1, and its kind.

    `paper`: no channel leaves the integers, as in mllm-NPU (section 3.3); otherwise hot channels do
    and are multiplied in floating point.
    """

    kept: float
    paper: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `15%`, `none`, `all` or `paper` (15 % and the paper's form). Raises `UserError`."""
        match text:
            case "none":
                return cls(0.0)
            case "all":
                return cls(1.0)
            case "paper":
                return cls(0.15, paper=True)
        match = re.fullmatch(r"([0-9]{1,3})%", text)
        percent = -1 if match is None else int(match[1])
        if not 0 <= percent <= 100:
            raise UserError(
                f"outliers are 15% (of the matmuls), none, all or paper, got {text!r}; choose one"
            )
        return cls(percent / 100)


class MatMulCalibration(BaseModel):
    """The static scale of one matmul's input.

    x_scale      step of the int8 codes
    percentile   of |x| that the largest code stands for; of the cold channels if some are hot
    importance   largest |x| / step of the codes that a shadow needs (127: no outlier at all)
    hot          channels that the shadow multiplies in floating point
    pruned       no shadow: what exceeds the codes is cut off, or the scale wide enough for all
    error        ‖y - exact‖² / ‖exact‖² of the matmul's output on calibration tokens
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    x_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    percentile: Annotated[float, Field(gt=0, le=100)]
    importance: Finite
    hot: Annotated[int, Field(ge=0)]
    pruned: bool
    error: Finite

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.pruned and self.hot:
            raise ValueError("a pruned matmul has no hot channels")
        return self


class Calibration(BaseModel):
    """Scales of every matmul by name (`blocks.3.down`, `lm_head`), and the text they come from.

    `outliers` is the option that chose the shadows, `tokens` how much of the text was read;
    `excess`: shadows also add what the codes cut off.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    text_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tokens: Annotated[int, Field(ge=1)]
    outliers: str
    excess: bool = False
    matmuls: dict[str, MatMulCalibration]

    @model_validator(mode="before")
    @classmethod
    def _excess_of_the_paper(cls, fields: Any) -> Any:
        """Read what was written before `excess` was stored."""
        if isinstance(fields, dict) and fields.get("outliers") == "paper":
            return {"excess": True, **fields}
        return fields

    @model_validator(mode="after")
    def _known_choice(self) -> Self:
        OutlierChoice.parse(self.outliers)
        head = self.matmuls.get("lm_head")
        if head is not None and not head.pruned:
            raise ValueError("the output head keeps no shadow")
        return self

    @property
    def shadowed(self) -> list[str]:
        """Return the names of the matmuls whose shadow adds something."""
        return [name for name, x in self.matmuls.items() if x.hot or (self.excess and not x.pruned)]

    def hot(self, name: str) -> int:
        """Return the number of a matmul's hot channels."""
        return self.matmuls[name].hot


def matmul_shapes(config: ModelConfig) -> dict[str, MatrixShape]:
    """Return the shapes of a model's matmuls by their names in a `Calibration`."""
    shapes = {
        f"blocks.{i}.{x.name}": x
        for i in range(config.num_layers)
        for x in block_matrices(config, i)
    }
    return shapes | {"lm_head": MatrixShape("lm_head", config.vocab_size, config.hidden_size)}


def hot_bytes(config: ModelConfig, calibration: Calibration | None) -> int:
    """Return the bytes of hot channels' numbers (int32) and weights (float16)."""
    if calibration is None:
        return 0
    shapes = matmul_shapes(config)
    return sum(x.hot * (4 + 2 * shapes[name].n) for name, x in calibration.matmuls.items())
