"""Trains the byte-pair tokenizer and turns the corpus into token ids.

Writes to the work directory: tokenizer.json; documents.npz, single documents for the first phase of
the training; train.npy and held_out.npy, rows of 513 ids (512 inputs and, one further, 512 targets)
in which several documents follow each other, for the last phase and for the perplexity.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from corpus import USER_PREFIX, Split, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SEED = 20261121
VOCAB_SIZE = 2048
ROW_LENGTH = 513
TOKENIZER_DOCUMENTS = 20_000
BOS, EOS, UNK = "<s>", "</s>", "<unk>"

Rows = npt.NDArray[np.uint16]


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE, so that any UTF-8 text survives a round trip; encode() adds `<s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, UNK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(documents(seed), TOKENIZER_DOCUMENTS), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token."""
    return int(tokenizer.encode(token, add_special_tokens=False).ids[0])


def pack_rows(tokenizer: Tokenizer, source: Iterator[str]) -> Iterator[list[int]]:
    """Rows of ROW_LENGTH ids, each starting at the start of a document; the last one is cut.

    A chat turn that follows a chat turn continues the conversation: no second `<s>`.
    """
    eos, row, was_chat = token_id(tokenizer, EOS), list[int](), False
    for document in source:
        is_chat = document.startswith(USER_PREFIX)
        ids = tokenizer.encode(document).ids
        row += [*(ids[1:] if row and was_chat and is_chat else ids), eos]
        was_chat = is_chat
        if len(row) >= ROW_LENGTH:
            yield row[:ROW_LENGTH]
            row = []


def pack_documents(tokenizer: Tokenizer, seed: int, count: int) -> tuple[Rows, Rows]:
    """`count` documents one after the other [ids], and each one's length [count]."""
    eos = token_id(tokenizer, EOS)
    encoded = tokenizer.encode_batch(list(itertools.islice(documents(seed), count)))
    ids = [[*document.ids, eos] for document in encoded]
    lengths = [len(document) for document in ids]
    flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.uint16, count=sum(lengths))
    return flat, np.array(lengths, dtype=np.uint16)


def rows_of(tokenizer: Tokenizer, seed: int, split: Split, count: int) -> Rows:
    """The first `count` rows of a split: [count, ROW_LENGTH]."""
    rows = itertools.islice(pack_rows(tokenizer, documents(seed, split)), count)
    return np.array(list(rows), dtype=np.uint16)


def main() -> None:
    """Command line: prepare.py WORK_DIR [--rows N]."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--documents", type=int, default=60_000)
    parser.add_argument("--held-out-rows", type=int, default=200)
    arguments = parser.parse_args()
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(SEED)
    tokenizer.save(str(arguments.work_dir / "tokenizer.json"))
    train = rows_of(tokenizer, SEED, "train", arguments.rows)
    np.save(arguments.work_dir / "train.npy", train)
    ids, lengths = pack_documents(tokenizer, SEED + 1, arguments.documents)
    np.savez(arguments.work_dir / "documents.npz", ids=ids, lengths=lengths)
    held_out = rows_of(tokenizer, SEED, "held_out", arguments.held_out_rows)
    np.save(arguments.work_dir / "held_out.npy", held_out)
    print(f"{ids.size} ids in documents, {train.size} in rows, {held_out.size} held out")


if __name__ == "__main__":
    main()
