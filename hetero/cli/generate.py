"""`hetero generate` and `hetero chat`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hetero.cli.options import (
    AdaptOption,
    BiasOption,
    BudgetOption,
    CacheChoice,
    CacheOption,
    ContextOption,
    DeviceOption,
    FrequencyOption,
    GpuOption,
    JsonOption,
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
    SeedOption,
    ShareOption,
    SpeculativeOption,
    StatsOption,
    StopOption,
    StrategyOption,
    SyncChoice,
    SyncOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    TraceOption,
    WeightsOption,
    open_llm,
    parse_biases,
    parse_strategy,
    shown,
    stderr,
)
from hetero.contexts.conversation import Conversation
from hetero.errors import UserError
from hetero.generation.llm import LLM
from hetero.generation.loop import DeviceShare, GenerationResult
from hetero.generation.options import DEFAULT_MAX_TOKENS, GenerateOptions, read_options
from hetero.measuring.benchmark import peak_rss_bytes
from hetero.terminal import answer_text


def generate_command(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT")],
    max_tokens: MaxTokensOption = DEFAULT_MAX_TOKENS,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    frequency_penalty: FrequencyOption = 0.0,
    presence_penalty: PresenceOption = 0.0,
    logit_bias: BiasOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt too.")] = False,
    logprobs: LogprobsOption = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template.")] = False,
    device: DeviceOption = None,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    weights: WeightsOption = None,
    plan: PlanOption = None,
    max_seq_len: ContextOption = None,
    speculative: SpeculativeOption = 0,
    strategy: StrategyOption = None,
    profile: ProfileOption = None,
    sync: SyncOption = SyncChoice.FAST,
    max_gpu_share: ShareOption = 1.0,
    memory_budget: BudgetOption = None,
    adapt: AdaptOption = True,
    order: OrderOption = OrderChoice.BEST,
    kv: CacheOption = CacheChoice.F32,
    trace: TraceOption = None,
    stats: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on from PROMPT; the text streams to stdout."""
    options: GenerateOptions = {
        "max_tokens": max_tokens,
        "stop": stop or (),
        "chat": chat,
        "echo": echo,
        "logprobs": logprobs,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "logit_bias": parse_biases(logit_bias),
        "seed": seed,
        "speculative": speculative,
    }
    _check_early(prompt, options, as_json=as_json)
    with (
        open_llm(
            model,
            device,
            gpu,
            npu,
            weights,
            plan,
            max_seq_len,
            sync=sync.value,
            strategy=None if strategy is None else parse_strategy(strategy),
            profile=profile,
            max_gpu_share=max_gpu_share,
            memory_budget=memory_budget,
            adapt=adapt,
            order=order.value,
            kv=kv.value,
            first_prompt=prompt,
        ) as llm,
        llm.trace(trace) if trace is not None else nullcontext(),
    ):
        _tell(llm, _answer(llm, prompt, options, quiet=as_json), stats=stats, as_json=as_json)


def _tell(llm: LLM, result: GenerationResult, *, stats: bool, as_json: bool) -> None:
    """What was asked for beside the text."""
    if stats:
        _print_stats(llm, result)
    if as_json:
        print(json.dumps(_result_json(llm, result)), flush=True)


def _answer(llm: LLM, prompt: str, options: GenerateOptions, *, quiet: bool) -> GenerationResult:
    """The answer, printed as it comes unless `quiet`."""
    echoed = prompt if options["echo"] else ""
    answer = llm.stream(prompt, **options)
    for piece in answer:
        if not quiet:
            print(answer_text(echoed + piece.text), end="", flush=True)
            echoed = ""
    if not quiet:
        print(flush=True)
    return answer.result()


def chat_command(
    model: ModelArgument,
    max_tokens: MaxTokensOption = DEFAULT_MAX_TOKENS,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 40,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    seed: SeedOption = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    session: Annotated[
        Path | None, typer.Option("--session", help="Go on from this file; saved at the end.")
    ] = None,
    device: DeviceOption = None,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    weights: WeightsOption = None,
    profile: ProfileOption = None,
    max_seq_len: ContextOption = None,
) -> None:
    """Talk with MODEL in the terminal. End with an empty line, Ctrl-D or `/exit`."""
    options: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    read_options(options)
    with open_llm(model, device, gpu, npu, weights, None, max_seq_len, profile=profile) as llm:
        conversation = llm.conversation(system=system)
        if session is not None and session.exists():
            conversation.load(session)
        stderr.print("Type a message; an empty line, Ctrl-D or /exit ends.", style="dim")
        for line in _typed_lines():
            _print_answer(conversation, line, options)
        if session is not None and conversation.messages:
            conversation.save(session)


def _check_early(prompt: str, options: GenerateOptions, *, as_json: bool) -> None:
    """Refuse what no model can do before one is opened, which may take long."""
    if options["logprobs"] is not None and not as_json:
        raise UserError("--logprobs are shown in the JSON only: add --json")
    read_options(options)
    if not prompt:
        raise UserError("the prompt is empty: give some text to go on from")


def _typed_lines() -> Iterator[str]:
    while True:
        stderr.print("> ", end="", style="bold")
        line = sys.stdin.readline().strip() if sys.stdin else ""  # None: started without one
        if not line or line == "/exit":
            return
        yield line


def _print_answer(conversation: Conversation, line: str, options: GenerateOptions) -> None:
    """One turn. A message that is too long is said so, and the conversation goes on."""
    dropped = conversation.dropped
    try:
        for piece in conversation.stream(line, **options):
            print(answer_text(piece.text), end="", flush=True)
    except UserError as error:
        stderr.print(Text(f"hetero: {error}"), soft_wrap=True)
        return
    print(flush=True)
    if conversation.dropped > dropped:
        stderr.print("(the context is full: the oldest messages are left out)", style="dim")


def _result_json(llm: LLM, result: GenerationResult) -> dict[str, Any]:
    stats = result.stats
    found = {
        "text": result.text,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "finish_reason": result.finish_reason,
        "ttft_s": stats.ttft_s,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "placement": {
            kind: {"ops": share.ops, "busy_s": share.busy_s}
            if isinstance(share, DeviceShare)
            else share
            for kind, share in stats.placement.items()
        },
        "device": llm.devices.mode,
        "choice": stats.choice,
        "notes": list(llm.choice.notes),
        "gpu_share": stats.gpu_share,
        "npu_idle_share": stats.npu_idle_share,
        "adaptations": list(stats.adaptations),
        "gpu": llm.devices.name("gpu"),
        "npu": llm.devices.name("npu"),
        "kv": llm.kv.value,
        "plan_id": llm.plan.plan_id,
        "numbers": llm.devices.numbers,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if result.logprobs:
        found["logprobs"] = [asdict(x) for x in result.logprobs]
        found["prompt_logprobs"] = [asdict(x) for x in result.prompt_logprobs]
    return found


def _print_stats(llm: LLM, result: GenerationResult) -> None:
    stats = result.stats
    title = "measured on this machine"
    if llm.devices.numbers == "emulated":
        title = "emulated: times of the emulator, not the chip's speed"
    table = Table(title=title, show_header=False)
    table.add_row("prompt", f"{stats.prompt_tokens} tokens")
    table.add_row("answer", f"{stats.completion_tokens} tokens, {result.finish_reason}")
    table.add_row("time to first token", f"{stats.ttft_s * 1e3:.1f} ms")
    table.add_row("prefill", f"{stats.prefill_tokens_per_s:.1f} tokens/s")
    table.add_row("decode", f"{stats.decode_tokens_per_s:.1f} tokens/s")
    for kind, share in stats.placement.items():
        if isinstance(share, DeviceShare):
            table.add_row(kind, f"{share.ops} operations, busy {share.busy_s * 1e3:.1f} ms")
        else:
            table.add_row(kind, shown(share))
    if stats.gpu_share is not None:
        table.add_row("GPU busy", f"{stats.gpu_share:.1%} of the time")
    if stats.npu_idle_share is not None:
        table.add_row("NPU idle", f"{stats.npu_idle_share:.1%} of the prefill")
    for reason in stats.adaptations:
        table.add_row("adapted", shown(reason))
    if stats.choice:
        table.add_row("chosen", shown(stats.choice))
    for note in llm.choice.notes:
        if note != stats.choice:
            table.add_row("note", shown(note))
    if stats.speculation is not None:
        table.add_row(
            "speculation",
            f"{stats.speculation.accepted} of {stats.speculation.drafted} guesses right, "
            f"{stats.speculation.calls} calls",
        )
    for kind, error in llm.model.weights.requantised().items():
        table.add_row(shown(f"{kind} quantised again"), f"relative error {error:.3f}")
    table.add_row("peak memory", f"{peak_rss_bytes() / 2**20:.0f} MiB")
    stderr.print(table)
