"""Opens what guesses tokens for a model: a draft model, or the model's own head."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from hetero.backends.registry import EVERY_CORE
from hetero.errors import UserError
from hetero.generation.draft_model import DraftModel
from hetero.generation.loading import LoadOptions, ModelLoader
from hetero.generation.mtp_head import MTP, MtpHead, check_head
from hetero.models import LoadedModel
from hetero.placement.device_set import DeviceMode
from hetero.runtime.engine import Engine

Draft: TypeAlias = DraftModel | MtpHead


def check_draft(
    path: str | None, device: DeviceMode, model: LoadedModel, options: LoadOptions
) -> None:
    """Raise `UserError` of a draft that cannot be opened, before any device is.

    A memory budget is one model's, and a model's own head runs on its devices.
    """
    if path is None:
        return
    if options.memory_budget is not None:
        raise UserError(
            "memory_budget bounds one model, and a draft model takes memory too: leave one out"
        )
    if path == MTP:
        if device != "auto":
            raise UserError(
                "--draft-model mtp is the model's own head, which runs on its devices: leave "
                "--draft-device out"
            )
        check_head(model, options)


def open_draft(
    path: str | None,
    device: DeviceMode,
    target: ModelLoader,
    options: LoadOptions,
    engine: Engine,
) -> Draft | None:
    """Open a draft model for an open one, with those of its options that suit both; or its head.

    Where it fails the open model's engine is closed.
    """
    if path is None:
        return None
    try:
        if path == MTP:
            return MtpHead(target, options, engine)
        every = EVERY_CORE in map(target.devices.name, target.devices.devices)
        own = replace(
            options,
            device=device,
            gpu=EVERY_CORE if every and device in ("auto", "gpu") else options.gpu,
            plan=None,
            experts=None,
            strategy=None,
            weights=None,
            prompt_lengths=(),
            first_prompt=None,
            max_seq_len=target.max_seq_len,
        )
        return DraftModel(path, target.model, own)
    except BaseException:
        engine.close()
        target.model.weights.close()
        raise
