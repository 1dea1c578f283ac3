"""Calls that no text is kept of: embeddings, and further answers to a prompt.

They run in slots of the service, whose own text is dropped, so that they take no memory of their
own; empty slots are taken before those of texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from hetero.backends.host.signals import WholeSteps
from hetero.contexts.service import Service
from hetero.contexts.slot_pool import Slot
from hetero.generation.embedding import Embedding, batches, embedding_steps
from hetero.generation.loop import Delta, Generation, GenerationResult, Pending
from hetero.generation.options import GenerateOptions, read_options
from hetero.models.pooling import Pooling


def embeddings(
    service: Service, texts: Sequence[Sequence[int]], pooling: Pooling
) -> WholeSteps[tuple[int, Embedding] | None]:
    """Return the steps of the embeddings of texts: a step is one with its text's place, or None."""
    return WholeSteps(_embeddings(service, texts, pooling))


def _embeddings(
    service: Service, texts: Sequence[Sequence[int]], pooling: Pooling
) -> Iterator[tuple[int, Embedding] | None]:
    engine = service.llm.engine
    with _scratch(service) as slot:
        for places, length in batches(engine, texts):
            part = [texts[place] for place in places]
            embeddings = yield from embedding_steps(engine, slot.active, part, length, pooling)
            yield from zip(places, embeddings, strict=True)


@dataclass
class SharedPrompt:
    """A prompt that several answers continue: the option `prompt` of the first answer's stream.

    `answer` is that one, as long as it runs.
    """

    answer: Generation | None = None

    @contextmanager
    def read_by(self, answer: Generation) -> Iterator[None]:
        """Let other answers continue the prompt of an answer that begins, inside the block."""
        answer.keeps_prompt = True
        self.answer = answer
        try:
            yield
        finally:
            self.answer = None


def another_answer(
    service: Service,
    prompt: SharedPrompt,
    results: list[GenerationResult],
    options: dict[str, Any],
) -> WholeSteps[Delta | Pending | None]:
    """Return the steps of another answer to a prompt, whose first answer has begun and not ended.

    The prompt is not read again. The result is added to `results`. Of the options, which are those
    of the first answer otherwise, sampling and constraint may differ.
    """
    return WholeSteps(_another(service, prompt, results, options))


def _another(
    service: Service,
    prompt: SharedPrompt,
    results: list[GenerationResult],
    options: dict[str, Any],
) -> Iterator[Delta | Pending | None]:
    given = {name: value for name, value in options.items() if name != "ahead"}
    config, first = read_options(cast("GenerateOptions", given)), prompt.answer
    assert first is not None, "the first answer has ended"
    with _scratch(service) as slot:
        with first.fork(config.sampling, config.constraint, slot.active) as answer:
            slot.answer = answer
            yield from service._advanced(answer, ahead=bool(options.get("ahead")))
        results.append(answer.result())


@contextmanager
def _scratch(service: Service) -> Iterator[Slot]:
    """Lend an emptied slot, which is empty again afterwards."""
    with service._lock.taken(), service._slots.taken(b"", (0,)) as slot:
        slot.working.forget()
        scores, slot.active.score_stats = slot.active.score_stats, None
        try:
            yield slot
        finally:
            slot.answer, slot.active.score_stats = None, scores
            slot.working.forget()
