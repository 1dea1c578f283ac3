"""The Hexagon NPU through QNN (`onnxruntime-qnn`); `hetero.backends.qnn.opening` opens it.

Importing this package loads none of the libraries, so that `hexagon` and `npu_driver` can look at a
machine that has none.
"""

from __future__ import annotations

import os

# As in `ort_cpu`: read when the library is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
