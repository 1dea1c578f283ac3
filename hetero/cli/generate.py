"""`hetero generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.cli.options import (
    OUTPUT,
    AnswerFlags,
    EngineFlags,
    JsonOption,
    ModelArgument,
    SpeculationFlags,
    StatsOption,
    SystemOption,
    WaitOption,
    WholeOption,
    expanded,
    finish_preparing,
    open_llm,
    shown,
    stderr,
)
from hetero.errors import UserError
from hetero.terminal import answer_text

if TYPE_CHECKING:
    from rich.table import Table

    from hetero.generation.answer_stats import Stats
    from hetero.generation.llm import LLM
    from hetero.generation.loop import GenerationResult
    from hetero.generation.options import GenerateOptions, SamplingOptions
    from hetero.runtime.memory_estimate import MemoryEstimate


@expanded
def generate_command(
    model: ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="What to answer; - or nothing: standard input."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    system: SystemOption = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer as a chat, or go on from the text.",
            show_default="chat, if MODEL can",
        ),
    ] = None,
    *,
    answer: AnswerFlags,
    engine: EngineFlags,
    speculation: SpeculationFlags,
    wait_for_plan: WaitOption = False,
    whole_caches: WholeOption = False,
    echo: Annotated[
        bool,
        typer.Option("--echo", help="Print the prompt, and go on from it.", rich_help_panel=OUTPUT),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="With --json: this many alternatives.", rich_help_panel=OUTPUT),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a Chrome/Perfetto trace.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    stats: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer PROMPT; the text streams to stdout."""
    options = answer.arguments()
    options |= {"echo": echo, "logprobs": logprobs, "speculative": speculation.speculative}
    given = answer.sampling()
    text = checked_prompt(prompt, file, {**options, **given}, as_json=as_json)
    opening = {**engine.arguments(), **speculation.arguments(), "whole_caches": whole_caches}
    # What is complete before anything of it is read, or is to be repeated, is the plan's.
    opening["wait_for_plan"] = (
        wait_for_plan or as_json or trace is not None or answer.seed is not None
    )
    opened = open_llm(model, **opening, first_prompt=text)
    with opened as llm, llm.trace(trace) if trace is not None else nullcontext():
        prompt_ids, options = question(llm, text, system, chat, options, given)
        result = answered(llm, prompt_ids, options, quiet=as_json, stats=stats, prompt_text=text)
        if as_json:
            print(json.dumps(document(llm, result, options)), flush=True)
        finish_preparing(llm)
    report_trace(trace)


def report_trace(trace: Path | None) -> None:
    if trace is not None:
        print(f"hetero: {trace} is written: open it at ui.perfetto.dev", file=sys.stderr)


def question(
    llm: LLM,
    text: str,
    system: str | None,
    chat: bool | None,
    options: GenerateOptions,
    given: SamplingOptions,
) -> tuple[str | list[int], GenerateOptions]:
    """Return the prompt, and the options with the model's own defaults in a chat.

    Options that are `given` stay; a raw text is continued greedily.
    """
    from hetero.generation.defaults import model_sampling

    uses = _uses_template(llm, chat, echo=options["echo"], system=system)
    options = {**options, "chat": uses}
    if uses:
        options = {**options, **model_sampling(llm.model.source)}
    options = {**options, **given}
    if system is None:
        return text, options
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return llm.encode_chat(messages), options


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from its option, file or stdin, without a newline at the end of a file."""
    if file is not None:
        if prompt is not None:
            raise UserError("there are two prompts: give PROMPT or --file, not both")
        try:
            return _without_newline(file.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is no text in UTF-8: convert it, or name another") from error
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise UserError("the prompt is missing: give PROMPT, --file FILE, or a text on stdin")
    return _without_newline(sys.stdin.read().removeprefix("\ufeff"))


def checked_prompt(
    prompt: str | None, file: Path | None, options: GenerateOptions, *, as_json: bool
) -> str:
    """Return the prompt.

    One that no model can answer is refused before a model is opened, which may take long.
    """
    text = _prompt_text(prompt, file)
    _check_early(text, options, as_json=as_json)
    return text


def _without_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _uses_template(llm: LLM, templated: bool | None, *, echo: bool, system: str | None) -> bool:
    """Return whether a prompt is a chat message.

    It is one if the model has a chat template, unless the answer is to continue the prompt itself.
    """
    if templated is False and system is not None:
        raise UserError("--system is part of a chat template: leave out --raw, or --system")
    if templated is not None or system is not None:
        return bool(templated) or system is not None
    return not echo and llm.model.tokenizer.chat_template is not None


def answered(
    llm: LLM,
    prompt: str | list[int],
    options: GenerateOptions,
    *,
    quiet: bool,
    stats: bool,
    prompt_text: str,
) -> GenerationResult:
    """Return the answer, printed as it comes unless `quiet`; its statistics also after Ctrl-C."""
    echoed = prompt_text if options["echo"] else ""
    answer = llm.stream(prompt, **options)
    begins = options["chat"]  # an answer of its own: the space before its first word is none
    try:
        for delta in answer:
            text = delta.text.lstrip() if begins else echoed + delta.text
            if not quiet:
                print(answer_text(text), end="", flush=True)
            echoed, begins = "", begins and not text
        if not quiet:
            print(flush=True)
    except KeyboardInterrupt:
        answer.close()
        if stats:
            print(file=sys.stderr)
            print_stats(llm, answer.result())
        raise
    result = answer.result()
    if result.finish_reason == "context":
        print(
            f"hetero: the answer ends here because prompt and answer fill the context of "
            f"{llm.max_seq_len} tokens (--max-seq-len; {llm.model.name} has up to "
            f"{llm.model.config.max_position}; --context-shift continues)",
            file=sys.stderr,
        )
    if stats:
        print_stats(llm, result)
    return result


def _check_early(prompt: str, options: GenerateOptions, *, as_json: bool) -> None:
    """Raise `UserError` for impossible options before a model is opened, which may take long."""
    from hetero.generation.options import read_options

    if options["logprobs"] is not None and not as_json:
        raise UserError("--logprobs are shown in the JSON only: add --json")
    read_options(options)
    if not prompt:
        raise UserError("the prompt is empty: give some text to go on from")


def document(llm: LLM, result: GenerationResult, options: GenerateOptions) -> dict[str, Any]:
    from hetero.backends.host.peak_memory import peak_rss_bytes
    from hetero.generation.answer_stats import DeviceShare

    stats = result.stats
    record = {
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
        "parts": [asdict(part) for part in stats.parts],
        "chat": options["chat"],
        "device": llm.devices.mode,
        "choice": stats.choice,
        "phases": [x.document() for x in llm.phases],
        "notes": list(llm.choice.notes),
        "gpu_share": stats.gpu_share,
        "npu_idle_share": stats.npu_idle_share,
        "prefill_mode": stats.prefill_mode,
        "prompt_form": stats.prefill_mode,  # its old name, for one release
        "adaptations": list(stats.adaptations),
        "shifted_tokens": stats.shifted_tokens,
        "gpu": llm.devices.name("gpu"),
        "npu": llm.devices.name("npu"),
        "cpu": llm.devices.name("cpu"),
        "kv": llm.kv.value,
        "weights": ",".join((llm.model.weights.weight_format, *llm.model.weights.also)),
        "plan_id": llm.plan.plan_id,
        "numbers": llm.devices.numbers,
        "weight_bytes": llm.engine.memory.weight_bytes,
        "copied_weight_bytes": llm.engine.memory.copied_bytes,
        "context_bytes": llm.engine.memory.context_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if result.logprobs:
        record["logprobs"] = [asdict(x) for x in result.logprobs]
        record["prompt_logprobs"] = [asdict(x) for x in result.prompt_logprobs]
    return record


def print_stats(llm: LLM, result: GenerationResult) -> None:
    from rich.table import Table

    from hetero.backends.host.peak_memory import peak_rss_bytes
    from hetero.generation.answer_stats import DeviceShare
    from hetero.placement.phase_choice import described
    from hetero.solver.report.units import size

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
    if len(stats.parts) > 1:
        table.add_row("parts", "; then ".join(map(str, stats.parts)))
    _work_rows(table, stats)
    rows = [("adapted", reason) for reason in stats.adaptations]
    rows.insert(0, ("devices", described(llm.phases)))
    rows.insert(0, ("attention", _heads(llm, stats.prompt_tokens)))
    for what, text in [("prompt's calls", stats.prefill_mode), *rows, ("chosen", stats.choice)]:
        if text:
            table.add_row(what, shown(text))
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
    table.add_row("weights", _weights(llm.engine.memory))
    table.add_row("keys and values", f"up to {size(llm.engine.memory.context_bytes)} a context")
    table.add_row("peak memory", f"{peak_rss_bytes() / 2**20:.0f} MiB")
    stderr().print(table)


def _weights(memory: MemoryEstimate) -> str:
    """Return the bytes of the weights on all devices, and the devices that have copies."""
    from hetero.solver.report.units import size

    copied = f", {size(memory.copied_bytes)} of these a second time" if memory.copied_bytes else ""
    return f"{size(memory.weight_bytes)}{copied}"


def _heads(llm: LLM, tokens: int) -> str:
    """Return which device computes which attention heads in a prompt's first call, if shared."""
    placement = llm.engine.placement
    m = placement.plan.steps(tokens)[0]
    runs = {x.kind: x for x in placement.heads("prefill", m)}
    if not runs:
        return ""
    npu, gpu = (runs[kind].stop - runs[kind].first for kind in ("npu", "gpu"))
    return f"in calls of {m} tokens cut in order {npu} of {npu + gpu} heads are the NPU's"


def _work_rows(table: Table, stats: Stats) -> None:
    if stats.gpu_share is not None:
        table.add_row("GPU busy", f"{stats.gpu_share:.1%} of the time")
    if stats.npu_idle_share is not None:
        table.add_row("NPU idle", f"{stats.npu_idle_share:.1%} of the prefill")
    if stats.shifted_tokens:
        table.add_row("forgotten", f"{stats.shifted_tokens} tokens, the context was full")
