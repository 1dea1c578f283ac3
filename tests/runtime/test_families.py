"""Every family in random tiny configurations: the logits of `transformers`, also as GGUF."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hetero import LLM
from hetero.models import open_model
from tests.models.gguf_files import convert
from tests.models.test_gguf import check_same_weights
from tests.support.checkpoints import Case, make_checkpoint, reference_logits, relative_error
from tests.support.families import FAMILIES, in_files
from tests.support.selection import examples

TOLERANCE = 2e-5
DECODED = 4
LENGTHS = st.sampled_from([1, 2, 31, 33, 70])
QUICK: Any = {  # shrinking would write hundreds of checkpoints
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.too_slow],
}
NO_GGUF: tuple[str, ...] = ()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(4), **QUICK)
@given(data=st.data())
def test_logits_are_those_of_transformers(
    family: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Prefill and token by token, on each device and on both."""
    changes = data.draw(FAMILIES[family])
    length = data.draw(LENGTHS)
    folder = tmp_path_factory.mktemp(family)
    model = make_checkpoint(Case(family, family, changes), folder)
    tokens = np.random.default_rng(length).integers(3, 263, length + DECODED).tolist()
    expected = reference_logits(model, tokens)
    for device in ("gpu", "npu", "hetero"):
        with LLM(str(folder), device=device, weights="f32", kv="f32") as llm:
            context = llm.context
            got = [llm.engine.prefill(context, tokens[:length]).copy()]
            got += [llm.engine.decode(context, token).copy() for token in tokens[length:]]
        error = relative_error(np.stack(got), expected[length - 1 :])
        assert error <= TOLERANCE, f"{device}: off by {error:.2g}"


@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in NO_GGUF])
@settings(max_examples=examples(8), **QUICK)
@given(data=st.data())
def test_a_gguf_file_is_the_same_model(
    family: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    changes = data.draw(FAMILIES[family])
    changes |= in_files(family, changes)
    folder = tmp_path_factory.mktemp(family)
    make_checkpoint(Case(family, family, changes), folder)
    convert(folder, folder / "model.gguf")
    ours, theirs = (open_model(x, weights="f32") for x in (folder / "model.gguf", folder))
    config = replace(theirs.config, dtype=None, bos_id=ours.config.bos_id)
    assert ours.config == config, changes
    check_same_weights(ours, theirs)
