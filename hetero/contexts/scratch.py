"""Calls that no text is kept of: embeddings, and further answers to a prompt.

They run in slots of the service, whose own text is dropped, so that they take no memory of their
own; empty slots are taken before those of texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hetero.backends.host.signals import WholeSteps
from hetero.contexts.service import Service
from hetero.contexts.slot_pool import Slot
from hetero.generation.embedding import Embedding, embedding_steps
from hetero.models.pooling import Pooling


def embeddings(
    service: Service, texts: Sequence[Sequence[int]], pooling: Pooling
) -> WholeSteps[Embedding | None]:
    """Return the steps of the embeddings of texts: a step is an embedding, or None."""
    return WholeSteps(_embeddings(service, texts, pooling))


def _embeddings(
    service: Service, texts: Sequence[Sequence[int]], pooling: Pooling
) -> Iterator[Embedding | None]:
    with _scratch(service) as slot:
        for tokens in texts:
            yield (yield from embedding_steps(service.llm.engine, slot.active, tokens, pooling))


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
