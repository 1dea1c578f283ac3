"""`hetero eval`: perplexity, and agreement with a float reference, for each weight format."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.cli.options import (
    BudgetOption,
    ContextOption,
    DeviceChoice,
    DeviceOption,
    GpuOption,
    JsonOption,
    ModelArgument,
    NpuOption,
    ProfileOption,
    open_llm,
)
from hetero.measuring.constants import LEAST_TOKENS

if TYPE_CHECKING:
    from hetero.generation.llm import LLM


class KvWay(StrEnum):
    """How keys and values are kept."""

    EIGHT = "8"
    FOUR = "4"
    TWO = "2"
    MIXED = "mixed"
    PAPER = "paper"


FormatsOption = Annotated[
    list[CacheFormat] | None,
    typer.Option("--kv", help="Compare formats of cached keys and values with f32; repeat."),
]


BitsOption = Annotated[
    list[KvWay] | None,
    typer.Option("--kv-bits", help="Bits of what contexts keep of them; repeat to compare."),
]


RatioOption = Annotated[
    float, typer.Option("--kv-ratio", min=0.25, max=1, help="Of mixed, of the bytes at 8.")
]


SeedsOption = Annotated[
    int, typer.Option("--kv-seeds", min=0, help="Random orders of densities beside mixed.")
]


WindowOption = Annotated[
    int, typer.Option("--window", help="Tokens scored at a time; 0: 512, or what fits.")
]


StrideOption = Annotated[
    int | None,
    typer.Option("--stride", help="From window to window.", show_default="half a window"),
]


SimulateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--simulate",
        metavar="FORM",
        help="int8 activations without a kernel: naive, smooth, per-token, activations, or "
        "what --outliers of quantize takes; repeat to compare.",
    ),
]
ReferenceOption = Annotated[
    str | None,
    typer.Option("--reference", metavar="MODEL", help="Float model.", show_default="MODEL as f32"),
]


def eval_command(
    model: ModelArgument,
    text: Annotated[Path, typer.Option("--text", help="A text file in UTF-8.")],
    weights: Annotated[
        list[WeightFormat] | None, typer.Option("--weights", help="Repeat to compare.")
    ] = None,
    simulate: SimulateOption = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", help="For --simulate: another text than --text.")
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option("--calibration-tokens", min=32, help="Read this much of it.")
    ] = 4096,
    reference: ReferenceOption = None,
    no_reference: Annotated[
        bool, typer.Option("--no-reference", help="Perplexity only: half the time.")
    ] = False,
    window: WindowOption = 0,
    stride: StrideOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=LEAST_TOKENS, help="Score this much of the text."),
    ] = None,
    kv: FormatsOption = None,
    kv_bits: BitsOption = None,
    kv_ratio: RatioOption = 0.5,
    kv_seeds: SeedsOption = 0,
    device: DeviceOption = DeviceChoice.NPU,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    profile: ProfileOption = None,
    max_seq_len: ContextOption = None,
    memory_budget: BudgetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Perplexity of MODEL over a text, top-1 agreement and KL divergence from its float32 self."""
    from hetero.cli.work import evaluate as work
    from hetero.measuring.evaluation import read_tokens
    from hetero.models import default_weights

    formats = weights or []
    work.check_texts(simulate, calibrate, text)
    opened = partial(open_llm, device=device, gpu=gpu, npu=npu, plan=None, max_seq_len=max_seq_len)
    opened = partial(opened, profile=profile, memory_budget=memory_budget)
    opened = partial(opened, kv=CacheFormat.F32.value, whole_caches=bool(kv_bits))
    sizes: Any = {"limit": max_tokens, "window": window, "stride": stride}
    if kv or kv_bits:
        own = partial(opened, model, weights=(formats or [WeightFormat(default_weights(model))])[0])
        with own() as exact:
            if kv:
                caches = {x: {"kv": x.value} for x in kv}
                qualities = work.against(exact, own, caches, text, **sizes)
                work.print_qualities(qualities, as_json, "caches")
            if kv_bits:
                tokens = read_tokens(exact, text, max_tokens)
                work.print_kv(exact, tokens, kv_bits, kv_ratio, kv_seeds, window, as_json)
        return
    base: LLM | None = None
    try:
        compared = None if no_reference else work.reference_of(model, reference)
        if compared is not None:
            base = opened(compared, weights=work.REFERENCE)
        if not formats and not simulate:
            formats = [WeightFormat(default_weights(model))]
        ways = {choice: {"weights": choice} for choice in formats}
        found = work.against(base, partial(opened, model), ways, text, **sizes)
        if simulate and calibrate is not None:
            texts = calibrate, text, calibration_tokens
            found |= work.simulated(model, texts, simulate, base, **sizes)
    finally:
        if base is not None:
            base.close()
    work.print_qualities(found, as_json)
