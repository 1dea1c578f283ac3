"""`hetero serve` and `hetero serve-key`."""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hetero.cli.options import (
    AdaptOption,
    BudgetOption,
    CacheOption,
    ContextOption,
    DeviceChoice,
    DeviceOption,
    GpuOption,
    ModelArgument,
    NpuOption,
    OrderChoice,
    OrderOption,
    PlanOption,
    ProfileOption,
    ShareOption,
    StrategyOption,
    SyncChoice,
    SyncOption,
    WeightsOption,
    parse_strategy,
)
from hetero.errors import UserError


class KvBitsChoice(StrEnum):
    """Values of --kv-bits."""

    RAW = "raw"
    EIGHT = "8"
    FOUR = "4"
    TWO = "2"
    MIXED = "mixed"


DirectoryOption = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        metavar="DIR",
        help="Where contexts are kept.",
        show_default="one for MODEL among the user's data",
    ),
]


MemoryOption = Annotated[
    str,
    typer.Option("--context-memory", metavar="SIZE", help="For keys and values in memory."),
]
DiskOption = Annotated[
    str, typer.Option("--context-disk", metavar="SIZE", help="For contexts on the disk.")
]
AliasOption = Annotated[
    list[str] | None, typer.Option("--alias", help="Another name of MODEL; `*`: any.")
]
HostsOption = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="Another name of this machine that clients may use."),
]
KeyOption = Annotated[
    Path | None, typer.Option("--encryption-key", help="File of the key of the directory.")
]


def serve_command(
    model: ModelArgument,
    host: Annotated[str, typer.Option("--host", help="Address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port.")] = 8080,
    keys: Annotated[
        Path | None, typer.Option("--keys", help="Applications' keys (`hetero serve-key`).")
    ] = None,
    alias: AliasOption = None,
    allow_host: HostsOption = None,
    directory: DirectoryOption = None,
    context_memory: MemoryOption = "256MiB",
    context_disk: DiskOption = "4GiB",
    encryption_key: KeyOption = None,
    contexts_per_app: Annotated[
        int, typer.Option("--contexts-per-app", min=1, help="Conversations that an app may have.")
    ] = 8,
    kv_bits: Annotated[
        KvBitsChoice, typer.Option("--kv-bits", help="Of kept keys and values; few are lossy.")
    ] = KvBitsChoice.EIGHT,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, max=64, help="Answers made at the same time.")
    ] = 8,
    slots: Annotated[
        int, typer.Option("--slots", min=1, max=64, help="Recent texts kept for each app.")
    ] = 8,
    queue: Annotated[int, typer.Option("--queue", min=1, help="Answers made or waited for.")] = 64,
    device: DeviceOption = DeviceChoice.AUTO,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    weights: WeightsOption = None,
    plan: PlanOption = None,
    profile: ProfileOption = None,
    strategy: StrategyOption = None,
    max_seq_len: ContextOption = None,
    sync: SyncOption = SyncChoice.FAST,
    max_gpu_share: ShareOption = 1.0,
    memory_budget: BudgetOption = None,
    adapt: AdaptOption = True,
    order: OrderOption = OrderChoice.BEST,
    kv: CacheOption = None,
) -> None:
    """Serve MODEL over HTTP: OpenAI's and Anthropic's APIs, contexts that persist."""
    if any(importlib.util.find_spec(x) is None for x in ("fastapi", "uvicorn", "llguidance")):
        raise UserError("hetero serve needs more packages: pip install 'hetero[serve]'")
    from hetero.serving.server import serve

    engine: dict[str, Any] = {
        "model": model,
        "directory": str(directory or _default_directory(model)),
        "slots": slots,
        "parallel": parallel,
        "context_memory": context_memory,
        "context_disk": context_disk,
        "contexts_per_app": contexts_per_app,
        "encryption_key": None if encryption_key is None else str(encryption_key.absolute()),
        "kv_bits": kv_bits.value,
        "kv": kv,
        "device": device.value,
        "gpu": gpu,
        "npu": npu,
        "plan": None if plan is None else str(plan),
        "profile": profile,
        "strategy": None if strategy is None else parse_strategy(strategy),
        "max_seq_len": max_seq_len,
        "sync": sync.value,
        "max_gpu_share": max_gpu_share,
        "memory_budget": memory_budget,
        "adapt": adapt,
        "order": order.value,
    }
    serve(
        host=host,
        port=port,
        keys=keys,
        hosts=allow_host or [],
        names=alias or [],
        queue=queue,
        weights=None if weights is None else weights.value,
        engine=engine,
    )


def serve_key_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The server's --keys.")],
    app: Annotated[str, typer.Argument(metavar="APP", help="Whose key it is.")],
) -> None:
    """Make a key of APP: it is printed once, and FILE gets only its SHA-256."""
    from hetero.serving.keys import add_key

    print(add_key(file, app))


def _default_directory(model: str) -> Path:
    from hetero.backends.host.folders import data_is_temporary
    from hetero.serving.server import default_directory
    from hetero.terminal.notices import notify

    folder = default_directory(model)
    if data_is_temporary():
        notify(f"contexts are kept in {folder}, which the system may empty: name a --directory")
    return folder
