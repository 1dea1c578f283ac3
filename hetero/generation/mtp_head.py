"""A model's head for multi-token prediction (MTP), which guesses what the model says next.

The head is one block of attention with the embeddings and the output head of the model. From the
model's hidden state of a token, behind its final norm, and from the token after that, it predicts
the one after both (`hetero.models.graph`). Its caches have a row for every token of the text but
the first. The states of prompts are kept until a guess reads them: the last ones until a few
guesses were right, so that a head that loses costs little behind a long prompt, then all. A guess
further ahead goes on from the head's own hidden state; what it leaves in the caches is dropped
again, since the model's states follow.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from hetero.backends.host.closing import Closing
from hetero.backends.protocol import Device
from hetero.errors import FallbackWarning, ModelError, UserError
from hetero.generation.draft_model import TimedDrafter, likeliest
from hetero.generation.loading import LoadOptions, ModelLoader
from hetero.generation.speculative import Drafter
from hetero.models import LoadedModel
from hetero.models.graph import model_graph
from hetero.models.model_weights import ModelWeights
from hetero.models.row_tables import GivenRows
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context, Rows, common_prefix
from hetero.runtime.sizes import LONGEST_VERIFIED
from hetero.solver.handmade import single_device

MTP: Final = "mtp"  # as the name of a draft model
TRIAL: Final = 128  # tokens that the head reads at first
TRUSTED: Final = 4  # right guesses after which it reads everything


def check_head(model: LoadedModel, options: LoadOptions) -> None:
    """Raise `ModelError` of a model without a head, `UserError` where it cannot be used.

    Embeddings and output head are kept for both: to be called before the model's kernels are made.
    """
    head = _head_of(model)
    if options.sync == "copy":
        raise UserError(
            "--sync copy keeps hidden states from the host, which --draft-model mtp reads: choose "
            "another --sync"
        )
    head.embed()
    head.lm_head()


def _head_of(model: LoadedModel) -> ModelWeights:
    if model.weights.mtp is None:
        raise ModelError(
            f"{model.name}: has no head for multi-token prediction (Qwen3.5 has one, which `hetero "
            "quantize` leaves out): open the original with --draft-model mtp, or name a smaller "
            "model of the same vocabulary"
        )
    return model.weights.mtp


class MtpHead(Closing):
    """An open model's head, for any number of answers at once.

    It has an engine of its own on the device that computes attention in the model's decode steps,
    which both share. Its steps run under the model's, so its lock orders nothing more.
    """

    def __init__(self, target: ModelLoader, options: LoadOptions, engine: Engine) -> None:
        head = _head_of(target.model)
        self._target = engine
        self._kind = kind = engine.placement.non_matmul("decode")
        self._device: Device | None = engine.devices[kind]
        graph = model_graph(head.config, head.weight_format, target.model.name)
        self._engine = Engine(
            head,
            single_device(graph, kind),
            {kind: engine.devices[kind]},
            max_seq_len=target.max_seq_len,
            control_core=target.devices.control_core,
            sync=options.sync,
            max_gpu_share=options.max_gpu_share,
            kv=target.kv,
        )
        self._texts: WeakKeyDictionary[Context, _HeadText] = WeakKeyDictionary()
        with self._engine.new_context() as context:  # so that no answer waits for a compiler
            for rows in range(1, LONGEST_VERIFIED + 1):
                self._engine.steps.step(context, "decode", rows, rows)

    def drafter(self, context: Context, tokens: Sequence[int]) -> Drafter:
        """Return what guesses on from the text of a context, and receives its hidden states.

        What it has read of the context's text before is not read again.
        """
        text = self._texts.get(context)
        if text is None:
            own = self._engine.new_context()
            text = self._texts[context] = _HeadText(own, self._engine.deployment.hidden)
        text.begin(tokens)
        context.on_states = text.receive
        return TimedDrafter(partial(self.guess, text), partial(text.end, context))

    def guess(self, read: _HeadText, text: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return tokens that may follow a text, and how many steps they took beyond its own."""
        engine = self._engine
        if self._is_lost() or len(text) + most > engine.max_seq_len:
            return [], 0
        engine.lock.check()
        with engine.lock:
            missing = read.go_on(text)
            if not missing:
                return [], 0
            guesses = likeliest(engine, read.context, missing, most, engine.config.vocab_size)
            read.went_on(len(text), guesses[0])
        return guesses

    def close(self) -> None:
        """Close its device, which is the model's; idempotent."""
        with self._engine.lock:
            self._engine.close()

    def _is_lost(self) -> bool:
        """Return whether the model has lost the head's device; the first time with a warning."""
        if self._device is None:
            return True
        lost = self._target.devices.get(self._kind) is not self._device
        if lost:
            self._device = None
            warnings.warn(
                "no more tokens are guessed, because the head for multi-token prediction was on "
                f"the {self._kind}, which failed",
                FallbackWarning,
                stacklevel=2,
            )
        return lost


class _HeadText:
    """The head's context of a model's context, and the model's states that are still to read.

    Row i of the head's `context` is of the state of token `first` + i and of the token after that.
    The first `_sure` rows are of the model's states, those behind them of guesses. States are known
    from token `_at` on. Of the tokens guessed so far `_right` were right.
    """

    def __init__(self, context: Context, hidden: GivenRows) -> None:
        self.context, self._hidden = context, hidden
        self._first = self._sure = self._at = 0
        self._states: list[Rows] = []
        self._last_text: Sequence[int] = ()  # the text at the end of the last answer
        self._guesses: Sequence[int] = ()
        self._guessed_at = self._right = 0
        context.on_states = self._receive_own

    def begin(self, tokens: Sequence[int]) -> None:
        """Go on with another text: keep what is known of the tokens that it shares."""
        same = common_prefix(self._last_text, tokens)
        self._sure = max(min(self._sure, same - 1 - self._first), 0)
        del self._states[max(same - self._at, 0) :]
        self._guesses = ()

    def end(self, context: Context) -> None:
        """Receive no more of a context, whose answer is complete."""
        self._last_text, context.on_states = context.tokens, None

    def receive(self, at: int, states: Rows) -> None:
        """Keep the model's states of tokens from `at` on, in place of what was known of them."""
        if not self._at <= at <= self._at + len(self._states):
            self._states, self._at = [], at
        del self._states[at - self._at :]
        self._states += list(states)

    def _receive_own(self, _at: int, states: Rows) -> None:
        """Let a guess go on from the head's own state."""
        if not len(self._hidden):
            self._hidden.give(states[-1:])

    def go_on(self, text: Sequence[int]) -> Sequence[int]:
        """Return the tokens to read next, whose states are given to the head.

        None where these are not known. Where they are known from a later token alone (the context
        had a text before) the head reads what is behind that.
        """
        states = len(text) - 1
        self._right += common_prefix(self._guesses, text[self._guessed_at :])
        self._guesses = ()
        self.context.rewind(self._sure)
        self._sure = self.context.cached  # fewer after an interruption
        start = self._first + self._sure
        trusted, last = self._right >= TRUSTED, states - TRIAL
        again = self._at if trusted and self._first > self._at else start
        again = max(self._at, again, 0 if trusted else last)
        if again != start:
            self.context.rewind(0)
            self._first, self._sure, start = again, 0, again
        given = self._states[start - self._at : states - self._at]
        if start >= states or len(given) < states - start:
            return ()
        self._hidden.give(np.stack(given))
        return text[start + 1 :]

    def went_on(self, tokens: int, guesses: Sequence[int]) -> None:
        """Note what it guessed behind so many tokens; drop their states if all were read."""
        self._sure = tokens - 1 - self._first
        self._guesses, self._guessed_at = guesses, tokens
        if self._first <= self._at:
            del self._states[: tokens - 1 - self._at]
            self._at = tokens - 1
