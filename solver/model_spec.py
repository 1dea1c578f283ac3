"""The model's document by its old name, for benches."""

from __future__ import annotations

from hetero.profiler.model_graph import ModelGraph

ModelSpec = ModelGraph
