"""The float model that a quantised directory was made from."""

from __future__ import annotations

from pathlib import Path

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.errors import ModelError
from hetero.models import DEMO_DIRECTORY, model_spec
from hetero.models.manifest import Manifest, is_quantised, read_manifest


def without_floats(model: str) -> Manifest | None:
    """Return the manifest of a quantised directory without f32; None for any other MODEL.

    Raises `ModelError` for a broken one.
    """
    path = Path(model).expanduser()
    if model == "demo" or not is_quantised(path):
        return None
    manifest = read_manifest(path)
    stored = {name.storage for name in manifest.stored}
    return None if StorageFormat.F32 in stored else manifest


def find_original(model: str, manifest: Manifest) -> str | None:
    """Return the MODEL that a quantised directory was made from, if it is here.

    It is `demo`, or a model of the name in the manifest, next to the directory or in the current
    folder, with floats and the same shapes.
    """
    if manifest.source == DEMO_DIRECTORY.name and _same_shapes(model, "demo"):
        return "demo"
    folders = (Path(model).expanduser().absolute().parent, Path.cwd())
    for path in (folder / manifest.source for folder in folders if manifest.source):
        if path.exists() and _same_shapes(model, str(path)):
            return str(path)
    return None


def _same_shapes(model: str, other: str) -> bool:
    try:
        if without_floats(other) is not None:
            return False
        specs = [model_spec(name, WeightFormat.F32.value) for name in (model, other)]
    except ModelError:  # something else of that name
        return False
    return specs[0].nodes == specs[1].nodes
