"""Prepares everything that a model needs at its first start, for `hetero.generation.late_plan`.

Kernels are compiled and self-tested, a shipped profile's times are scaled to this machine, devices
are chosen and weights are packed, each into hetero's cache, where the parent finds them. Runs as a
script, with the model and the options of `LLM` on standard input.
"""

from __future__ import annotations

import json
import sys
import warnings

from hetero.backends.errors import DeviceError
from hetero.errors import FallbackWarning, UserError, one_sentence
from hetero.generation.llm import LLM


def main() -> None:
    """Open the model, wait for its plan, and close it; one sentence where that fails."""
    question = json.load(sys.stdin)
    warnings.simplefilter("ignore", FallbackWarning)  # the parent meets the same
    try:
        with LLM(question["model"], **{**question["options"], "wait_for_plan": True}):
            pass
    except (UserError, DeviceError, OSError, MemoryError) as error:
        print(one_sentence(str(error) or type(error).__name__), file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
