"""The GGUF file that was opened last, which threads share."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from hetero import LLM
from hetero.models.gguf import GgufFile
from tests.models.gguf_files import write_tiny


def test_threads_that_open_two_files_have_their_own(tmp_path: Path) -> None:
    paths = [write_tiny(tmp_path / f"{name}.gguf") for name in "ab"]
    wrong: list[Path] = []

    def work(path: Path) -> None:
        wrong.extend(path for _ in range(300) if GgufFile.opened(path).path != path)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(path,)) for path in paths * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(before)
    assert not wrong


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_closed_models_file_is_not_mapped(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a.gguf")

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    llm = LLM(str(path), device="npu")
    assert llm.generate([1, 2], max_tokens=2).tokens
    assert mapped()
    llm.close()
    del llm
    gc.collect()
    assert not mapped()
