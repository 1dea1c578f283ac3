"""Opens what guesses tokens for a model: a draft model, or a part of the model itself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from hetero.backends.registry import EVERY_CORE
from hetero.errors import UserError
from hetero.generation.draft_model import DraftModel
from hetero.generation.loading import LoadOptions, ModelLoader
from hetero.generation.mtp_head import MTP, MtpHead, check_head
from hetero.models import LoadedModel
from hetero.models.assistant_weights import AssistantWeights, assistant_path
from hetero.models.first_layers import first_layers
from hetero.placement.device_set import DeviceMode
from hetero.runtime.engine import Engine

if TYPE_CHECKING:
    from hetero.generation.assistant import Assistant

Draft: TypeAlias = "DraftModel | MtpHead | Assistant"
EARLY_EXIT: Final = "early-exit:"  # before a number of layers, as the name of a draft model


def check_draft(
    path: str | None, device: DeviceMode, model: LoadedModel, options: LoadOptions
) -> AssistantWeights | None:
    """Raise `UserError` of a draft that cannot be opened, before any device is.

    A memory budget is one model's, and a model's own head runs on its devices. Of an assistant the
    weights are returned, for `open_draft`.
    """
    if path is None:
        return None
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
    elif path.startswith(EARLY_EXIT):
        first_layers(model.config, _exit_layers(path), model.name)
    elif (assistant := assistant_path(path)) is not None:
        if device != "auto":
            raise UserError(
                f"{path} is an assistant, which the host computes from the model's caches: leave "
                "--draft-device out"
            )
        from hetero.generation.assistant import check_assistant

        return check_assistant(assistant, model, options)
    return None


def open_draft(
    path: str | None,
    device: DeviceMode,
    target: ModelLoader,
    options: LoadOptions,
    engine: Engine,
    assistant: AssistantWeights | None = None,
) -> Draft | None:
    """Open what guesses for an open model: a draft model has those options that suit both.

    Where it fails the open model's engine is closed.
    """
    if path is None:
        return None
    try:
        if path == MTP:
            return MtpHead(target, options, engine)
        if assistant is not None:
            from hetero.generation.assistant import Assistant

            return Assistant(assistant, target.model)
        layers = _exit_layers(path) if path.startswith(EARLY_EXIT) else 0
        every = EVERY_CORE in map(target.devices.name, target.devices.devices)
        own = replace(
            options,
            device=device,
            gpu=EVERY_CORE if every and device in ("auto", "gpu") else options.gpu,
            plan=None,
            experts=None,
            strategy=None,
            weights=options.weights if layers else None,
            prompt_lengths=(),
            first_prompt=None,
            max_seq_len=target.max_seq_len,
        )
        return DraftModel(target.path if layers else path, target.model, own, layers)
    except BaseException:
        engine.close()
        target.model.weights.close()
        raise


def _exit_layers(path: str) -> int:
    """Return N of `early-exit:N`. Raises `UserError`."""
    layers = path.removeprefix(EARLY_EXIT)
    if not re.fullmatch("[0-9]{1,4}", layers):
        raise UserError(
            f"--draft-model early-exit:N names the number of layers that guess, got {path!r}: give "
            "a number, as in early-exit:4"
        )
    return int(layers)
