"""The engine process with a sampler that says given texts; everything else is the engine's own.

The folder `HETERO_SCRIPT` has `answers.json`, the texts of the next answers or of prompts that have
given words, and gets `prompts.jsonl`, the text of each prompt. Started by `scripted_server` in the
engine's place.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.generation.sampling import Constraint
from hetero.serving import engine_process
from hetero.serving.engine_process import ServingEngine
from hetero.serving.messages import GenerateRequest

FOLDER: Final = Path(os.environ["HETERO_SCRIPT"])


class Script:
    """A constraint that allows one token after the other, as far as the request's own does."""

    def __init__(self, tokens: list[int], own: Constraint | None, vocabulary: int) -> None:
        self._tokens, self._own, self._vocabulary = tokens, own, vocabulary

    def allowed(self) -> npt.NDArray[np.bool_]:
        own = None if self._own is None else self._own.allowed()
        if own is not None and not own[self._tokens[0]]:
            raise ValueError(f"the grammar does not allow the script's rest: {self._tokens}")
        mask = np.zeros(self._vocabulary, np.bool_)
        mask[self._tokens[0]] = True
        return mask

    def accept(self, token: int) -> None:
        assert token == self._tokens.pop(0)
        if self._own is not None:
            self._own.accept(token)


def answer_to(prompt: str) -> str:
    """The next text; or that of the first words that a prompt has."""
    path = FOLDER / "answers.json"
    answers = json.loads(path.read_text())
    if isinstance(answers, dict):
        return next(text for words, text in answers.items() if words in prompt)
    path.write_text(json.dumps(answers[1:]))
    return str(answers[0])


class ScriptedEngine(ServingEngine):
    def _options(self, request: GenerateRequest, choice: int) -> dict[str, Any]:
        options = super()._options(request, choice)
        model = self.service.llm.model
        prompt = model.tokenizer.decode(request.tokens, skip_special_tokens=False)
        with (FOLDER / "prompts.jsonl").open("a") as file:
            file.write(json.dumps(prompt) + "\n")
        tokens = model.tokenizer.encode(answer_to(prompt), add_special_tokens=False)
        script = [*tokens, model.eos_ids[0]]
        size = model.config.vocab_size
        return {**options, "constraint": Script(script, options.get("constraint"), size)}


if __name__ == "__main__":
    engine_process.ServingEngine = ScriptedEngine  # type: ignore[misc]
    engine_process.main()
