"""What every fuzz target is: a loader, its seeds, and the errors that it may raise."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

from hetero.backends.errors import DeviceError
from hetero.errors import UserError
from hetero.profiler.errors import ProfileError
from hetero.solver.errors import PlanError
from tests.fuzz.json_edits import edited

# What the command line says as one sentence; a device's error names its own remedy.
SENTENCES: Final = (UserError, PlanError, ProfileError, DeviceError)
LONGEST_SENTENCE = 2000
SEPARATOR = b"\n--8<--\n"


class Target(ABC):
    """A loader. `folder` is for its files.

    The file is JSON up to `SEPARATOR` (`json`), with 8 bytes that count it in front
    (`length_prefix`): mutations know that (`mutated`).
    """

    name: ClassVar[str]
    length_prefix: ClassVar[bool] = False
    json: ClassVar[bool] = True
    dictionary: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Valid files."""

    @abstractmethod
    def use(self, data: bytes) -> None:
        """Open and use a file of these bytes."""

    def __call__(self, data: bytes) -> None:
        """Like `use`; an error that the user can mend is what is wanted."""
        try:
            self.use(data)
        except SENTENCES as error:
            if len(str(error)) > LONGEST_SENTENCE:
                raise AssertionError("not a sentence: it repeats the file") from error

    def mutated(self, data: bytes, chance: random.Random) -> bytes | None:
        """`data` with edits inside its JSON, None where that is not possible."""
        if not self.json:
            return None
        if self.length_prefix:
            length = int.from_bytes(data[:8], "little")
            header = edited(data[8 : 8 + length], chance, self.dictionary)
            return header and len(header).to_bytes(8, "little") + header + data[8 + length :]
        parts = data.split(SEPARATOR)
        index = chance.randrange(len(parts))
        part = edited(parts[index], chance, self.dictionary)
        return part and SEPARATOR.join([*parts[:index], part, *parts[index + 1 :]])

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Free what is open."""
