"""Authentication: bearer keys, each of one application. Files hold SHA-256 of keys, never a key."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, atomic_write, read_text
from hetero.errors import UserError

LOCAL = "local"  # the one app of a server without keys


class Keys:
    """Applications by key. A file has a line `APP SHA256` for each key; `#` begins a comment."""

    def __init__(self, apps: dict[bytes, str]) -> None:
        self._apps = dict(apps)

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read a file of keys. Raises `UserError` if others can read it, or it is malformed."""
        try:
            if os.name == "posix" and path.stat().st_mode & 0o077:
                raise UserError(f"{path}: others can read the keys: chmod 600 it")
            lines = read_text(path, LONGEST_DOCUMENT_BYTES).splitlines()
        except OSError as error:
            raise UserError(
                f"{path}: keys cannot be read ({error.strerror or error}); check the path"
            ) from error
        apps: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) != 2 or not re.fullmatch("[0-9a-fA-F]{64}", words[1]):
                raise UserError(
                    f"{path}: line {number} must be an app's name and the SHA-256 of its key in "
                    "64 hexadecimal digits (`hetero serve-key` writes such lines)"
                )
            apps[bytes.fromhex(words[1])] = words[0]
        if not apps:
            raise UserError(f"{path}: holds no key: add one with `hetero serve-key`")
        return cls(apps)

    def app(self, key: str) -> str | None:
        """Return the app of a key. Every key is compared, each in constant time."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        match = None
        for known, app in self._apps.items():
            if hmac.compare_digest(known, digest):
                match = app
        return match

    def __len__(self) -> int:
        return len(self._apps)


def add_key(path: Path, app: str) -> str:
    """Return a new key of an app, of which the file gets the SHA-256 only."""
    if not re.fullmatch(r"[^\s#]{1,100}", app):
        raise UserError(f"an app's name has up to 100 characters without spaces or #, got {app!r}")
    if path.exists():
        Keys.load(path)
    key = f"hetero-{secrets.token_urlsafe(32)}"
    line = f"{app} {hashlib.sha256(key.encode()).hexdigest()}\n"
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before and not before.endswith("\n"):
            before += "\n"
        atomic_write(path, before + line)
        path.chmod(0o600)
    except OSError as error:
        raise UserError(
            f"{path}: the key cannot be written ({error.strerror or error}): choose another file"
        ) from error
    return key
