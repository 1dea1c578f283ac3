"""`hetero generate`: one prompt, one answer."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING

from hetero.cli.options import (
    AdaptOption,
    BiasOption,
    BudgetOption,
    CacheOption,
    ChatOption,
    ContextOption,
    DeviceChoice,
    DeviceOption,
    EchoOption,
    FileOption,
    FrequencyOption,
    GpuOption,
    JsonOption,
    KeepOption,
    LogprobsOption,
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
    PromptArgument,
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
    TraceOption,
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


def generate_command(
    model: ModelArgument,
    prompt: PromptArgument = None,
    file: FileOption = None,
    system: SystemOption = None,
    chat: ChatOption = None,
    max_tokens: MaxTokensOption = DEFAULT_MAX_TOKENS,
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
    echo: EchoOption = False,
    logprobs: LogprobsOption = None,
    kv: CacheOption = None,
    whole_caches: WholeOption = False,
    trace: TraceOption = None,
    stats: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer PROMPT; the text streams to stdout."""
    from hetero.cli.work import generate as work

    options: GenerateOptions = {
        "max_tokens": max_tokens,
        "stop": stop or (),
        "echo": echo,
        "logprobs": logprobs,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "logit_bias": parse_biases(logit_bias),
        "seed": seed,
        "speculative": speculative,
        "context_shift": context_shift,
        "keep": keep,
    }
    given = sampling_given(temperature, top_k, top_p, min_p, repetition_penalty)
    text = work.checked_prompt(prompt, file, {**options, **given}, as_json=as_json)
    with (
        open_llm(
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
            first_prompt=text,
        ) as llm,
        llm.trace(trace) if trace is not None else nullcontext(),
    ):
        asked, options = work.question(llm, text, system, chat, options, given)
        result = work.answered(llm, asked, options, quiet=as_json, stats=stats, prompt_text=text)
        if as_json:
            print(json.dumps(work.document(llm, result, options)), flush=True)
    work.tell_of_trace(trace)
