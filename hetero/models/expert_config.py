"""`ExpertConfig`: routed experts as `config.json` describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetero.backends.extensible import Extensible, later
from hetero.backends.ops import ROWS_OF_EXPERT, ExpertActivation, RouterScores
from hetero.models.fields import Fields


@dataclass(frozen=True, kw_only=True, repr=False)
class ExpertConfig(Extensible):
    """The routed feed-forwards of a model (`hetero.backends.ops.Router`, `Experts`).

    count, chosen      of experts, and how many a token has
    width              features of an expert's feed-forward
    scores, renormalised, scale, eps, router_bias, choice_bias    as in `Router`
    bias               experts' matmuls have biases
    shared             each token also has a plain feed-forward, the shared expert, times a gate
    parallel           experts and the layer's plain feed-forward see the same stream, each in norms
                       of its own, the router in another; every expert has a factor (Gemma 4)
    activation         that of the experts, None for the model's
    dense              layers whose feed-forward is a plain one
    """

    count: int
    chosen: int
    width: int
    scores: RouterScores = "softmax"
    renormalised: bool = True
    scale: float = 1.0
    eps: float = 0.0
    router_bias: bool = False
    choice_bias: bool = False
    bias: bool = False
    dense: tuple[int, ...] = ()
    shared: bool = later(False)
    parallel: bool = later(False)
    activation: ExpertActivation | None = later(None)  # noqa: RUF009

    @property
    def plain(self) -> bool:
        """Return whether layers with experts have a plain feed-forward as well."""
        return self.shared or self.parallel

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the weights of a layer that a token is multiplied with."""
        return hidden_size * (self.count + 3 * self.chosen * self.width)


def read_experts(
    source: Fields, *, count: tuple[str, ...], chosen: str, width: str, **rest: Any
) -> ExpertConfig:
    """Return the experts of a configuration whose fields have these names.

    `count` are the spellings of the number of experts, the usual one first. Raises `ModelError`.
    """
    name = next((x for x in count if x in source.raw), count[0])
    experts = ExpertConfig(
        count=source.positive_int(name),
        chosen=source.positive_int(chosen),
        width=source.positive_int(width),
        **rest,
    )
    if experts.chosen > experts.count:
        raise source.error(
            chosen, f"must be at most the {experts.count} of {name}", "correct the file"
        )
    for field in (width, "hidden_size"):
        if source.positive_int(field) % ROWS_OF_EXPERT:
            raise source.error(
                field,
                f"must be a multiple of {ROWS_OF_EXPERT} with routed experts",
                "choose another model",
            )
    return experts
