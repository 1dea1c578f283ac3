"""`hetero serve` and `hetero serve-key`."""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hetero.cli.options import MODEL_HELP, EngineFlags, WaitOption, expanded
from hetero.errors import UserError


class KvBitsChoice(StrEnum):
    """Values of --kv-bits."""

    RAW = "raw"
    EIGHT = "8"
    FOUR = "4"
    TWO = "2"
    MIXED = "mixed"


class EvictionChoice(StrEnum):
    """Values of --eviction."""

    LCTRU = "lctru"
    PAPER = "lctru-paper"
    LRU = "lru"
    CONTEXT = "context"


class PoolingChoice(StrEnum):
    """Values of --pooling."""

    LAST = "last"
    MEAN = "mean"


@expanded
def serve_command(
    model: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help=f"{MODEL_HELP} Several: loaded when asked for."),
    ],
    host: Annotated[str, typer.Option(help="Address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port.")] = 8080,
    keys: Annotated[
        Path | None, typer.Option(help="Keys of applications (`hetero serve-key`).")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="Another name of the first MODEL; `*`: any.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name of this machine that clients may use.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Of pages elsewhere that may use it; `*`: all."),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where contexts are kept.",
            show_default="of MODEL, in the user's data",
        ),
    ] = None,
    context_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="For keys and values in memory.")
    ] = "256MiB",
    context_disk: Annotated[
        str, typer.Option(metavar="SIZE", help="For contexts on the disk.")
    ] = "4GiB",
    encryption_key: Annotated[
        Path | None, typer.Option(help="File of the key of the directory.")
    ] = None,
    contexts_per_app: Annotated[
        int, typer.Option(min=1, help="Conversations that an app may have.")
    ] = 8,
    kv_bits: Annotated[
        KvBitsChoice,
        typer.Option(
            help="Of kept keys and values; few are lossy; mixed: by layer, measured first."
        ),
    ] = KvBitsChoice.EIGHT,
    kv_ratio: Annotated[
        float,
        typer.Option(min=0.25, max=1, help="mixed: the bytes, as a share of those of 8 bits."),
    ] = 0.5,
    eviction: Annotated[
        EvictionChoice, typer.Option(help="Which contexts leave the memory first.")
    ] = EvictionChoice.LCTRU,
    parallel: Annotated[
        int, typer.Option(min=1, max=64, help="Answers made at the same time.")
    ] = 8,
    slots: Annotated[int, typer.Option(min=1, max=64, help="Recent texts kept for each app.")] = 8,
    queue: Annotated[int, typer.Option(min=1, help="Answers made or waited for.")] = 64,
    models_max: Annotated[int, typer.Option(min=0, help="Models in memory at a time; 0: all.")] = 4,
    models_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For models in memory, such as 8GiB.")
    ] = None,
    sleep_idle_seconds: Annotated[
        float,
        typer.Option(metavar="N", min=-1, help="Unload a MODEL that is idle so long; -1: never."),
    ] = -1,
    reasoning_budget: Annotated[
        int, typer.Option(min=-1, help="Most tokens of a thought; -1: no limit.")
    ] = -1,
    pooling: Annotated[
        PoolingChoice | None,
        typer.Option(help="How embeddings are pooled.", show_default="MODEL's, else last"),
    ] = None,
    *,
    engine: EngineFlags,
    wait_for_plan: WaitOption = False,
) -> None:
    """Serve MODEL over HTTP: OpenAI's and Anthropic's APIs, contexts that persist."""
    if any(importlib.util.find_spec(x) is None for x in ("fastapi", "uvicorn", "llguidance")):
        raise UserError("hetero serve needs more packages: pip install 'hetero[serve]'")
    from hetero.serving.server import serve

    opening = engine.arguments()
    weights = opening.pop("weights")
    serve(
        model,
        host=host,
        port=port,
        keys=keys,
        hosts=allow_host or [],
        origins=allow_origin or [],
        aliases=alias or [],
        queue=queue,
        models_max=models_max,
        models_memory=models_memory,
        sleep_idle_s=sleep_idle_seconds,
        reasoning_budget=reasoning_budget,
        pooling=None if pooling is None else pooling.value,
        weights=weights,
        directory=directory or _default_directory(*model),
        engine={
            **opening,
            "wait_for_plan": wait_for_plan,
            "slots": slots,
            "parallel": parallel,
            "context_memory": context_memory,
            "context_disk": context_disk,
            "contexts_per_app": contexts_per_app,
            "encryption_key": None if encryption_key is None else str(encryption_key.absolute()),
            "kv_bits": kv_bits.value,
            "kv_ratio": kv_ratio,
            "eviction": eviction.value,
        },
    )


def serve_key_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The server's --keys.")],
    app: Annotated[str, typer.Argument(metavar="APP", help="Whose key it is.")],
) -> None:
    """Make a key of APP: it is printed once, and FILE gets only its SHA-256."""
    from hetero.serving.keys import add_key

    print(add_key(file, app))


def _default_directory(*models: str) -> Path:
    from hetero.backends.host.folders import data_is_temporary
    from hetero.serving.server import default_directory
    from hetero.terminal.notices import notify

    folder = default_directory(*models)
    if data_is_temporary():
        notify(f"contexts are kept in {folder}, which the system may empty: name a --directory")
    return folder
