"""`hetero chat`: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero.cli.options import (
    AdaptOption,
    BiasOption,
    BudgetOption,
    CacheOption,
    ContextOption,
    DeviceChoice,
    DeviceOption,
    FrequencyOption,
    GpuOption,
    KeepOption,
    MaxTokensOption,
    MinPOption,
    ModelArgument,
    NpuOption,
    OrderChoice,
    OrderOption,
    PenaltyOption,
    PlanOption,
    PresenceOption,
    ProfileOption,
    SeedOption,
    ShareOption,
    ShiftOption,
    SpeculativeOption,
    StatsOption,
    StopOption,
    StrategyOption,
    SyncChoice,
    SyncOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WeightsOption,
    WholeOption,
    open_llm,
    parse_biases,
    parse_strategy,
    sampling_given,
)
from hetero.generation.constants import DEFAULT_MAX_TOKENS
from hetero.runtime.kv.constants import SINKS

if TYPE_CHECKING:
    from hetero.generation.options import GenerateOptions


def chat_command(
    model: ModelArgument,
    max_tokens: MaxTokensOption = DEFAULT_MAX_TOKENS,
    system: SystemOption = None,
    session: Annotated[
        Path | None,
        typer.Option("--session", help="Go on from this file, and save to it after every turn."),
    ] = None,
    stop: StopOption = None,
    max_seq_len: ContextOption = None,
    context_shift: ShiftOption = False,
    keep: KeepOption = SINKS,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: PenaltyOption = None,
    frequency_penalty: FrequencyOption = 0.0,
    presence_penalty: PresenceOption = 0.0,
    logit_bias: BiasOption = None,
    seed: SeedOption = None,
    device: DeviceOption = DeviceChoice.AUTO,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    weights: WeightsOption = None,
    plan: PlanOption = None,
    profile: ProfileOption = None,
    strategy: StrategyOption = None,
    speculative: SpeculativeOption = 0,
    sync: SyncOption = SyncChoice.FAST,
    max_gpu_share: ShareOption = 1.0,
    memory_budget: BudgetOption = None,
    adapt: AdaptOption = True,
    order: OrderOption = OrderChoice.BEST,
    kv: CacheOption = None,
    whole_caches: WholeOption = False,
    stats: StatsOption = False,
) -> None:
    """Talk with MODEL in the terminal; Ctrl-C stops an answer, Ctrl-D or /exit ends."""
    from hetero.cli.work.chat import SAMPLING, Talk, lines
    from hetero.generation.defaults import model_sampling
    from hetero.generation.options import read_options

    options: GenerateOptions = {
        "max_tokens": max_tokens,
        "stop": stop or (),
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "logit_bias": parse_biases(logit_bias),
        "seed": seed,
        "speculative": speculative,
        "context_shift": context_shift,
        "keep": keep,
    }
    given = sampling_given(temperature, top_k, top_p, min_p, repetition_penalty)
    read_options({**options, **given})
    with open_llm(
        *(model, device, gpu, npu, weights, plan, max_seq_len),
        sync=sync.value,
        strategy=None if strategy is None else parse_strategy(strategy),
        profile=profile,
        max_gpu_share=max_gpu_share,
        memory_budget=memory_budget,
        adapt=adapt,
        order=order.value,
        kv=kv,
        whole_caches=whole_caches,
    ) as llm:
        options = {**options, **(model_sampling(llm.model.source) or SAMPLING), **given}
        talk = Talk(llm, llm.conversation(system=system), options, session, stats=stats)
        talk.begin()
        for line in lines():
            if not talk.take(line):
                break
