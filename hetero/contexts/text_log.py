"""The text of one context on the disk: an append-only log.

A record is u32 length, payload (JSON), u32 CRC of both. The first describes the context; each
further one is a turn: how much of the text before it stays, and the tokens (and messages) after
that. A turn is on the disk when `append` returns, and only then may a call count as answered. A log
that ends in the middle of a record continues after the record before it: only what was never
acknowledged is lost. A damaged record with others after it is an error, as is a log of another
version.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from hetero.backends.host.files import atomic_write, sync_directory
from hetero.contexts.budget import ByteBudget
from hetero.contexts.encryption import SALT_BYTES, Box, SealError, Vault
from hetero.errors import DiskFullError, StoredFileError, UserError
from hetero.runtime.kv.context import common_prefix

VERSION: Final = 1
_U32: Final = struct.Struct("<I")
_LONGEST_RECORD: Final = 64 << 20
_WASTE_BYTES: Final = 1 << 16  # a log that is shorter is not rewritten


MakeRoom: TypeAlias = Callable[[int], bool]


def no_room(_: int) -> bool:
    """Return false: there is nothing to remove for a text."""
    return False


@dataclass
class Text:
    """The text of a context.

    `messages` are those of a chat; `created` is in seconds since 1970, `used` the logical time of
    its last call, as a chunk's; `root` is that of a text which was shifted (`CachedText`), empty
    where it never was.
    """

    system: str = ""
    chat: bool = False
    tokens: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    created: float = 0.0
    used: int = 0
    root: bytes = b""


class TextLog:
    """One context's log, used by one thread at a time.

    `make_room(bytes)` removes keys and values to make room for texts. Raises `DiskFullError` where
    the disk cannot be written, or the contexts' share of it has no room even then.
    """

    def __init__(
        self,
        path: Path,
        budget: ByteBudget,
        text: Text,
        make_room: MakeRoom,
        records: _Records,
        size: int = 0,
    ) -> None:
        self.path, self.text = path, text
        self._budget, self._size, self._make_room = budget, size, make_room
        self._records = records

    @classmethod
    def create(
        cls,
        path: Path,
        budget: ByteBudget,
        text: Text,
        make_room: MakeRoom = no_room,
        vault: Vault | None = None,
    ) -> TextLog:
        """Return a new log, written to the disk."""
        log = cls(path, budget, text, make_room, _Records(vault, path.name))
        log._rewrite()
        return log

    @classmethod
    def open(
        cls,
        path: Path,
        budget: ByteBudget,
        make_room: MakeRoom = no_room,
        vault: Vault | None = None,
    ) -> TextLog:
        """Return a log read from the disk, up to its last whole record.

        Raises `StoredFileError` if it is damaged before its end, or of another version.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoredFileError(
                f"{path}: cannot be read ({error.strerror or error}); check its permissions"
            ) from error
        records = _Records(vault, path.name)
        text, stop = records.read(data)
        if text is None or records.damaged or _is_followed(data, stop):
            raise StoredFileError(
                f"{path}: is damaged at byte {stop}, or of another version of hetero: restore it, "
                "or remove it to continue without this context"
            )
        if not budget.take(stop) and not (make_room(stop) and budget.take(stop)):
            raise DiskFullError(
                f"the texts of the contexts alone need more than the {budget.limit} bytes of "
                "context_disk: give it more"
            )
        return cls(path, budget, text, make_room, records, stop)

    def append(
        self,
        tokens: Sequence[int],
        messages: Sequence[dict[str, Any]] = (),
        *,
        used: int = 0,
        root: bytes = b"",
    ) -> None:
        """Set the text; it is on the disk when this returns."""
        keep = common_prefix(self.text.tokens, tokens)
        same = common_prefix(self.text.messages, messages)
        record = self._records.packed(
            {
                "keep": keep,
                "tokens": list(tokens[keep:]),
                "told": same,
                "messages": list(messages[same:]),
                "used": used,
                "root": root.hex(),
            }
        )
        self._take(len(record))
        try:
            with self.path.open("r+b") as file:
                file.seek(self._size)
                file.write(record)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._budget.give(len(record))
            raise _unwritable(self.path, error) from error
        self._size += len(record)
        self._records.count += 1
        self.text.tokens, self.text.messages = list(tokens), list(messages)
        self.text.used, self.text.root = used, root
        if self._size > _WASTE_BYTES + 16 * len(tokens):
            with suppress(UserError):  # the turn is on the disk; the next one tries again
                self._rewrite()

    def delete(self) -> None:
        """Delete the log; it is off the disk when this returns."""
        self.path.unlink(missing_ok=True)
        sync_directory(self.path.parent)
        self._budget.give(self._size)
        self._size = 0

    def _rewrite(self) -> None:
        """Replace all records by two with the same text."""
        text = self.text
        about = {
            "version": VERSION,
            "system": text.system,
            "chat": text.chat,
            "created": text.created,
        }
        turn = {"keep": 0, "tokens": text.tokens, "told": 0, "messages": text.messages}
        turn |= {"used": text.used, "root": text.root.hex()}
        records = _Records(self._records.vault, self.path.name)
        data = records.begun() + records.packed(about)
        records.count += 1
        data += records.packed(turn)
        self._take(len(data))
        try:
            atomic_write(self.path, data)
        except OSError as error:
            self._budget.give(len(data))
            raise _unwritable(self.path, error) from error
        self._budget.give(self._size)
        self._size = len(data)
        records.count += 1
        self._records = records

    def _take(self, nbytes: int) -> None:
        take = self._budget.take
        if not take(nbytes) and not (self._make_room(nbytes) and take(nbytes)):
            raise DiskFullError(
                f"the {self._budget.limit} bytes of context_disk are used up: delete() a context, "
                "or give more"
            )


class _Records:
    """The encoding of one log's records, of which `count` are on the disk.

    `damaged`: a complete record does not open.
    """

    def __init__(self, vault: Vault | None, name: str) -> None:
        self.vault, self._name = vault, name
        self.count, self.damaged = 0, False
        self._box: Box | None = None

    def begun(self) -> bytes:
        """Return the head of a log: a salt, if it is encrypted."""
        if self.vault is None:
            return b""
        salt = os.urandom(SALT_BYTES)
        self._box, self.count = self.vault.box("text", salt), 1
        return _framed(salt)

    def packed(self, value: dict[str, Any]) -> bytes:
        """Return the encoded next record."""
        payload = json.dumps(value, separators=(",", ":")).encode()
        return _framed(payload if self._box is None else self._box.seal(payload, self._place))

    def read(self, data: bytes) -> tuple[Text | None, int]:
        """Return the text of a log, and where its last whole record ends."""
        text: Text | None = None
        at = 0
        while at + 8 <= len(data):
            (length,) = _U32.unpack_from(data, at)
            stop = at + 8 + length
            if length > _LONGEST_RECORD or stop > len(data):
                break
            if zlib.crc32(data[at : stop - 4]) != _U32.unpack_from(data, stop - 4)[0]:
                break
            try:
                text = self._continued(text, data[at + 4 : stop - 4])
            except SealError:
                self.damaged = True
                break
            except (ValueError, TypeError, KeyError, RecursionError):
                break
            at = stop
            self.count += 1
        return text, at

    def _continued(self, text: Text | None, payload: bytes) -> Text | None:
        if self.vault is not None and self._box is None:
            self._box = self.vault.box("text", payload)
            return None
        if self._box is not None:
            payload = self._box.open(payload, self._place)
        record = json.loads(payload)
        return _begun(record) if text is None else _continued(text, record)

    @property
    def _place(self) -> bytes:
        return b"%d of %s" % (self.count, self._name.encode())


def _framed(payload: bytes) -> bytes:
    head = _U32.pack(len(payload))
    return head + payload + _U32.pack(zlib.crc32(head + payload))


def _is_followed(data: bytes, at: int) -> bool:
    """Return whether something follows the damaged record at `at`.

    A file that was extended before its bytes were written, when power was lost, has zeros there.
    """
    if at + 8 > len(data) or not any(data[at:]):
        return False
    length = int(_U32.unpack_from(data, at)[0])
    return length > _LONGEST_RECORD or at + 8 + length < len(data)


def _begun(record: dict[str, Any]) -> Text:
    if record["version"] != VERSION:
        raise ValueError("another version")
    return Text(str(record["system"]), bool(record["chat"]), created=float(record["created"]))


def _continued(text: Text, record: dict[str, Any]) -> Text:
    tokens = [*text.tokens[: record["keep"]], *map(int, record["tokens"])]
    messages = [*text.messages[: record["told"]], *record["messages"]]
    used, root = int(record.get("used", 0)), bytes.fromhex(record.get("root", ""))
    return replace(text, tokens=tokens, messages=messages, used=used, root=root)


def _unwritable(path: Path, error: OSError) -> DiskFullError:
    return DiskFullError(
        f"{path}: the text of a context cannot be written ({error.strerror or error}): make room, "
        "or choose another directory"
    )
