"""The database of what clients received: responses, conversations with items, saved slots. SQLite.

Every method is one transaction, on the disk when it returns; what is deleted is overwritten. Each
row has its app, and no query is without one. With a key (`hetero.contexts.encryption`) everything
that users wrote or were answered is sealed, each value for its app and column; names of apps,
random ids and times are not.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from hetero.contexts.encryption import SALT_BYTES, Box, SealError, Vault, check_key
from hetero.errors import UserError
from hetero.serving.errors import ApiError

VERSION: Final = 1
SEALED: Final = 2  # the version of one that is encrypted
BYTES_PER_APP: Final = 256 << 20
TITLE: Final = 60  # characters
_SCHEMA: Final = """
create table responses (id text primary key, app text not null, conversation text,
    previous text, body text not null, input text not null, tokens text not null);
create table conversations (id text primary key, app text not null, created integer not null,
    metadata text not null, tokens text not null);
create table items (position integer primary key autoincrement, id text not null unique,
    app text not null, conversation text not null, body text not null);
create table slots (app text not null, name text not null, context text not null,
    primary key (app, name));
create index items_of on items (conversation, position);
create index responses_of on responses (app);
create index conversations_of on conversations (app);
"""
# Of this connection: bytes of each app, which triggers keep, so that no request adds all up.
_RESPONSE: Final = "length({0}.body) + length({0}.input) + length({0}.tokens)"
_ITEM: Final = "length({0}.body)"
_USED: Final = f"""
create temp table used (app text primary key, bytes integer not null);
insert into used select app, sum(bytes) from (
    select app, {_RESPONSE.format("responses")} as bytes from responses
    union all select app, {_ITEM.format("items")} from items) group by app;
""" + "".join(
    f"""
create temp trigger {table}_in after insert on main.{table} begin
    insert into used select new.app, 0 where new.app not in (select app from used);
    update used set bytes = bytes + {size.format("new")} where app = new.app;
end;
create temp trigger {table}_out after delete on main.{table} begin
    update used set bytes = bytes - ({size.format("old")}) where app = old.app;
end;
"""
    for table, size in (("responses", _RESPONSE), ("items", _ITEM))
)
_SEAL: Final = "create table seal (key text not null, salt blob not null);"
Item = dict[str, Any]
StoredTokens = list[int] | dict[str, Any]  # ids of the model `model` in `ids`, or of the only one
Value = str | bytes  # of a column: JSON, or that sealed


@dataclass
class StoredResponse:
    """A stored response.

    `input` are the items that it answers, `tokens` the whole text up to its end (empty where that
    is unknown).
    """

    body: dict[str, Any]
    input: list[Item]
    previous: str | None = None
    conversation: str | None = None
    tokens: StoredTokens = field(default_factory=list)


def item_id(kind: str, response: str, index: int) -> str:
    """Return the id of an item of a response's output; `response_of` finds the response by it."""
    return f"{kind}_{response.removeprefix('resp_')}{index:04x}"


def response_of(item: str) -> str:
    """Return the id of the response whose output has an item of this id."""
    return f"resp_{item.partition('_')[2][:-4]}"


class Records:
    """An open database, used by one thread at a time.

    Raises `UserError` if it cannot be used, or is encrypted with another key than `vault`'s.
    """

    def __init__(
        self, path: Path, bytes_per_app: int = BYTES_PER_APP, vault: Vault | None = None
    ) -> None:
        self._max_bytes = bytes_per_app
        self._lock = threading.Lock()
        self._box: Box | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            for pragma in ("journal_mode=truncate", "synchronous=extra", "secure_delete=on"):
                self._db.execute(f"pragma {pragma}")
            self._open(path, vault)
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"{path}: responses cannot be stored here ({error}): restore it, or choose another "
                "directory"
            ) from error

    def _open(self, path: Path, vault: Vault | None) -> None:
        version = _version(self._db, vault)
        if version not in (VERSION, SEALED):
            raise UserError(
                f"{path}: was written by another version of hetero: choose another directory"
            )
        key, salt = "", b""
        if version == SEALED:
            key, salt = self._db.execute("select key, salt from seal").fetchone()
        check_key(path, key, vault)
        if vault is not None:
            self._box = vault.box("responses", salt)
        self._db.execute("pragma temp_store=memory")
        self._db.executescript(_USED)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    # --- responses --------------------------------------------------------------------------

    def keep_response(
        self,
        app: str,
        stored: StoredResponse,
        items: Sequence[Item] = (),
    ) -> bool:
        """Store a response; one of a conversation together with the items that it adds.

        Return false, with nothing stored, where its conversation does not exist. Raises `ApiError`
        where the app has no room.
        """
        put = partial(self._put, app)
        row = (
            stored.body["id"],
            app,
            stored.conversation,
            stored.previous,
            *map(put, (stored.body, stored.input, stored.tokens)),
        )
        with self._change() as db:
            self._check_room(app, sum(len(x) for x in row if x) + sum(map(_length, items)))
            if stored.conversation is not None:
                done = db.execute(
                    "update conversations set tokens=? where id=? and app=?",
                    (row[-1], stored.conversation, app),
                )
                if not done.rowcount:
                    return False
                self._insert(app, stored.conversation, items)
            db.execute("insert into responses values (?,?,?,?,?,?,?)", row)
            return True

    def response(self, app: str, name: str) -> StoredResponse | None:
        """Return one of an app's responses."""
        row = self._db.execute(
            "select body, input, previous, conversation, tokens from responses"
            " where id=? and app=?",
            (name, app),
        ).fetchone()
        if row is None:
            return None
        get = partial(self._get, app)
        return StoredResponse(get(row[0]), get(row[1]), row[2], row[3], get(row[4]))

    def item(self, app: str, name: str) -> Item | None:
        """Return an item of one of an app's conversations, or of a response's output."""
        row = self._db.execute(
            "select body from items where id=? and app=?", (name, app)
        ).fetchone()
        if row is not None:
            return cast(Item, self._get(app, row[0]))
        stored = self.response(app, response_of(name))
        output = [] if stored is None else stored.body["output"]
        return next((item for item in output if item["id"] == name), None)

    def delete_response(self, app: str, name: str) -> bool:
        """Delete it; return whether it existed. Later responses keep their copies."""
        with self._change() as db:
            done = db.execute("delete from responses where id=? and app=?", (name, app))
            return done.rowcount > 0

    # --- conversations ----------------------------------------------------------------------

    def new_conversation(
        self, app: str, name: str, metadata: dict[str, str], items: Sequence[Item], limit: int
    ) -> int:
        """Create a conversation, of at most `limit`; return its time in seconds since 1970."""
        created = int(time.time())
        with self._change() as db:
            (count,) = db.execute(
                "select count(*) from conversations where app=?", (app,)
            ).fetchone()
            if count >= limit:
                raise ApiError(
                    429,
                    f"this app has {count} conversations, which is all that --contexts-per-app "
                    "allows: delete one",
                    code="too_many_conversations",
                )
            self._check_room(app, len(json.dumps(metadata)) + sum(map(_length, items)))
            db.execute(
                "insert into conversations values (?,?,?,?,?)",
                (name, app, created, self._put(app, metadata), self._put(app, [])),
            )
            self._insert(app, name, items)
        return created

    def conversation(self, app: str, name: str) -> tuple[int, dict[str, str], StoredTokens] | None:
        """Return a conversation's time, its metadata, and the known tokens of its text."""
        row = self._db.execute(
            "select created, metadata, tokens from conversations where id=? and app=?", (name, app)
        ).fetchone()
        return None if row is None else (row[0], self._get(app, row[1]), self._get(app, row[2]))

    def conversations(self, app: str) -> list[tuple[str, str]]:
        """Return id and title of an app's conversations, the oldest first.

        A title is that of the metadata, else the beginning of the first text of the user.
        """
        rows = self._db.execute(
            "select id, metadata, (select body from items where conversation=conversations.id and "
            "app=conversations.app order by position limit 1), (select body from items where "
            "conversation=conversations.id and app=conversations.app order by position limit 1 "
            "offset 1) from conversations where app=? order by created, id",
            (app,),
        ).fetchall()
        return [(name, self._title(app, *parts)) for name, *parts in rows]

    def _title(self, app: str, metadata: Value, *first: Value | None) -> str:
        given: dict[str, str] = self._get(app, metadata)
        if given.get("title"):
            return given["title"]
        for item in (self._get(app, body) for body in first if body is not None):
            if item.get("role") == "user":
                text = " ".join(part["text"] for part in item["content"])
                return " ".join(text.split())[:TITLE]
        return ""

    def set_metadata(self, app: str, name: str, metadata: dict[str, str]) -> bool:
        """Set a conversation's metadata; return whether it exists."""
        with self._change() as db:
            done = db.execute(
                "update conversations set metadata=? where id=? and app=?",
                (self._put(app, metadata), name, app),
            )
            return done.rowcount > 0

    def delete_conversation(self, app: str, name: str) -> bool:
        """Delete a conversation with its items and responses; return whether it existed."""
        with self._change() as db:
            done = db.execute("delete from conversations where id=? and app=?", (name, app))
            db.execute("delete from items where conversation=? and app=?", (name, app))
            db.execute("delete from responses where conversation=? and app=?", (name, app))
            return done.rowcount > 0

    def items(self, app: str, conversation: str) -> list[Item]:
        """Return all items of a conversation, in order."""
        rows = self._db.execute(
            "select body from items where conversation=? and app=? order by position",
            (conversation, app),
        )
        return [self._get(app, body) for (body,) in rows]

    def add_items(self, app: str, conversation: str, items: Sequence[Item]) -> bool:
        """Append items to a conversation; return whether it exists.

        The tokens of a text with an answer that is not the model's own are unknown.
        """
        with self._change() as db:
            there = db.execute(
                "select 1 from conversations where id=? and app=?", (conversation, app)
            ).fetchone()
            if there is None:
                return False
            self._check_room(app, sum(map(_length, items)))
            self._insert(app, conversation, items)
            if any(item.get("role") != "user" for item in items):
                self._forget_tokens(db, app, conversation)
            return True

    def delete_item(self, app: str, conversation: str, name: str) -> bool:
        """Delete an item; return whether it existed. The tokens of the text are then unknown."""
        with self._change() as db:
            done = db.execute(
                "delete from items where id=? and conversation=? and app=?",
                (name, conversation, app),
            )
            if done.rowcount:
                self._forget_tokens(db, app, conversation)
            return done.rowcount > 0

    def _forget_tokens(self, db: sqlite3.Connection, app: str, conversation: str) -> None:
        db.execute(
            "update conversations set tokens=? where id=? and app=?",
            (self._put(app, []), conversation, app),
        )

    # --- slots ------------------------------------------------------------------------------

    def keep_slot(self, app: str, name: str, context: str) -> None:
        """Store the name of a saved slot."""
        with self._change() as db:
            self._check_room(app, len(name))
            row = app, self._hidden(app, name), context
            db.execute("insert or replace into slots values (?,?,?)", row)

    def slot(self, app: str, name: str) -> str | None:
        """Return the context that a slot was saved to."""
        row = self._db.execute(
            "select context from slots where app=? and name=?", (app, self._hidden(app, name))
        ).fetchone()
        return None if row is None else str(row[0])

    def delete_slot(self, app: str, name: str) -> None:
        """Delete the name of a saved slot."""
        with self._change() as db:
            db.execute("delete from slots where app=? and name=?", (app, self._hidden(app, name)))

    # --- inside -----------------------------------------------------------------------------

    def _put(self, app: str, value: Any) -> Value:
        """Return a value as its column stores it."""
        text = json.dumps(value)
        return text if self._box is None else self._box.seal(text.encode(), app.encode())

    def _get(self, app: str, value: Value) -> Any:
        """Return the value of a column. Raises `ApiError` if it was tampered with."""
        if self._box is None or isinstance(value, str):
            return json.loads(value)
        try:
            return json.loads(self._box.open(value, app.encode()))
        except SealError as error:
            raise ApiError(500, "what was kept here is damaged: delete it") from error

    def _hidden(self, app: str, name: str) -> str:
        """Return a user's name as a column stores it: always the same."""
        return name if self._box is None else self._box.digest(f"{app} {name}".encode())

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("begin immediate")
                yield self._db
                self._db.execute("commit")
            except BaseException as error:
                if self._db.in_transaction:  # SQLite has undone some by itself: of a full disk
                    self._db.execute("rollback")
                if isinstance(error, sqlite3.Error) and _is_of_disk(error):
                    raise ApiError(
                        507,
                        f"the disk cannot store this ({error}): make room",
                        code="storage_full",
                    ) from error
                raise

    def _insert(self, app: str, conversation: str, items: Sequence[Item]) -> None:
        self._db.executemany(
            "insert into items (id, app, conversation, body) values (?,?,?,?)",
            [(item["id"], app, conversation, self._put(app, item)) for item in items],
        )

    def _check_room(self, app: str, more: int) -> None:
        row = self._db.execute("select bytes from used where app=?", (app,)).fetchone()
        used = 0 if row is None else int(row[0])
        if used + more > self._max_bytes:
            raise ApiError(
                507,
                f"this app's responses and conversations have {used} of {self._max_bytes} "
                "bytes: delete some, or ask with `store: false`",
                code="storage_full",
            )


def _version(db: sqlite3.Connection, vault: Vault | None) -> int:
    """Return the version of a database, whose tables are made if there are none."""
    (version,) = db.execute("pragma user_version").fetchone()
    if version:
        return int(version)
    made, seal = (VERSION, "") if vault is None else (SEALED, _SEAL)
    db.executescript(f"begin; {_SCHEMA} {seal} pragma user_version={made};")
    if vault is not None:
        salt = os.urandom(SALT_BYTES)
        db.execute("insert into seal values (?,?)", (vault.key_id, salt))
    db.execute("commit")
    return made


def _is_of_disk(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without what only describes it further
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _length(item: Item) -> int:
    return len(json.dumps(item))
