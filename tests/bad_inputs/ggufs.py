"""GGUF: headers that lie, metadata of other types, tensors, tokenizers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tests.bad_inputs.case import (
    OPEN_GGUF,
    BadInput,
    Change,
    array,
    cut,
    entry,
    gguf_tensor,
    raw_gguf,
    replaced,
    tensor_info,
    text,
)
from tests.support import tiny_files

FILE = "model.gguf"
U8, U32, F32, STRING, ARRAY = 0, 4, 6, 8, 9
ARCHITECTURE = entry("general.architecture", STRING, text("llama"))


def with_entries(**changes: Any) -> Change:
    """The good file with other metadata (`__` for a dot, None: left out)."""

    def change(work: Path) -> None:
        tiny_files.write_gguf(work / FILE, **changes)

    return change


def tokens(**changes: Any) -> Change:
    """Entries of the tokenizer."""
    return with_entries(**{f"tokenizer__ggml__{name}": value for name, value in changes.items()})


def sizes(**changes: Any) -> Change:
    """Sizes of the model."""
    return with_entries(**{f"llama__{name}": value for name, value in changes.items()})


def version(number: int) -> Change:
    return raw_gguf([ARCHITECTURE], version=number)


def one(value: bytes, kind: int = ARRAY) -> Change:
    """A file with one entry `x` more."""
    return raw_gguf([ARCHITECTURE, entry("x", kind, value)])


def tensor(*infos: bytes, body: int = 64, alignment: bytes = b"") -> Change:
    extra = [entry("general.alignment", U32, alignment)] if alignment else []
    return raw_gguf([ARCHITECTURE, *extra], infos, body=body)


def nested(depth: int) -> bytes:
    value = array(U8, 1, b"\0")
    for _ in range(depth):
        value = array(ARRAY, 1, value)
    return value


WORDS = tiny_files.WORDS
HEADERS: tuple[tuple[str, Change, str], ...] = (
    ("no bytes", replaced(FILE, b""), "a GGUF file has at least 24 bytes, got 0"),
    ("only magic", replaced(FILE, b"GGUF"), "at least 24 bytes, got 4"),
    ("a safetensors file", replaced(FILE, struct.pack("<Q", 64) + b"{}" * 32),
     "does not begin with GGUF"),
    ("of old", raw_gguf(magic=b"ggml"), "does not begin with GGUF"),
    ("version 0", version(0), "has version 0, supported are 2 and 3"),
    ("version 1", version(1), "has version 1, supported are 2 and 3"),
    ("other byte order", version(3 << 24), "GGUF file is big-endian, only"),
    ("2^63 entries", raw_gguf(entry_count=2**63), "names 9223372036854775808 metadata entries"),
    ("2^64-1 tensors", raw_gguf(tensor_count=2**64 - 1), "tensors, more than its"),
    ("an entry too few", raw_gguf([ARCHITECTURE], entry_count=3), "GGUF file"),
    ("a name of 2^63 bytes", raw_gguf([text(b"x", 2**63)], entry_count=1), "beyond the file's end"),
    ("a name of 70000 bytes", raw_gguf([entry("x" * 70_000, U8, b"\0")]), "or the rule"),
    ("a name without UTF-8", raw_gguf([entry("", U8, b"\0"), text(b"\xff\xfe") + bytes(5)]),
     "is not UTF-8 text"),
    ("a text of 2^64-1 bytes", one(text("x", 2**64 - 1), STRING), "beyond the file's end"),
    ("an architecture without UTF-8",
     raw_gguf([entry("general.architecture", STRING, text(b"llam\xff"))]), "is not supported in"),
    ("a tensor's name without UTF-8", tensor(text(b"\xff\xfe") + bytes(40)), "is not UTF-8 text"),
    ("an entry twice", raw_gguf([ARCHITECTURE, ARCHITECTURE]), "occurs twice"),
    ("a value of type 99", one(b"", 99), "has the unknown type 99"),
    ("an array of type 99", one(array(99, 1, bytes(8))), "unknown type 99"),
    ("2^60 numbers", one(array(F32, 2**60)), "names 1152921504606846976 x, more than"),
    ("2^63 texts", one(array(STRING, 2**63)), "names 9223372036854775808 x, more than"),
    ("texts beyond the end", one(array(STRING, 2, text("x", 2**40) + bytes(8))), "beyond the file"),
    ("2^60 arrays", one(array(ARRAY, 2**60)), "names 1152921504606846976 x, more than"),
    ("arrays nested deep", one(nested(3000)), "nests arrays deeper than 4"),
    ("cut after 40 bytes", cut(FILE, 40), "GGUF file"),
    ("cut in the metadata", cut(FILE, 2000), "GGUF file"),
    ("cut in the tensors", cut(FILE, -500), "lies at bytes"),
    ("a tensor of no dimension", tensor(tensor_info("x", ())), "1 to 4 dimensions, got 0"),
    ("a tensor of 5 dimensions", tensor(tensor_info("x", (1,) * 5)), "1 to 4 dimensions, got 5"),
    ("a tensor of 2^31 dimensions", tensor(text("x") + struct.pack("<I", 2**31) + bytes(40)),
     "1 to 4 dimensions, got 2147483648"),
    ("a tensor of size 0", tensor(tensor_info("x", (0,))), "must have rows of whole blocks"),
    ("a tensor of 2^63", tensor(tensor_info("x", (2**63, 2**63))), "lies at bytes"),
    ("a tensor of an unknown type", tensor(tensor_info("x", (8,), 200)), "the unknown type 200"),
    ("a removed type", tensor(tensor_info("x", (32,), 4)), "has the unknown type 4"),
    ("rows of half a block", tensor(tensor_info("x", (33,), 2)), "rows of whole blocks of 32"),
    ("a tensor twice", tensor(tensor_info("x", (8,)), tensor_info("x", (8,))), "x occurs twice"),
    ("tensors that overlap", tensor(tensor_info("x", (16,)), tensor_info("y", (8,), 0, 32)),
     "overlaps the one before it"),
    ("an offset of 2^63", tensor(tensor_info("x", (8,), 0, 2**63)), "lies at bytes"),
    ("an offset between", tensor(tensor_info("x", (8,), 0, 4)), "lies at bytes"),
    ("alignment 0", tensor(alignment=struct.pack("<I", 0)), "must be a power of two, got 0"),
    ("alignment 3", tensor(alignment=struct.pack("<I", 3)), "must be a power of two, got 3"),
    ("alignment 2^31", tensor(alignment=struct.pack("<I", 2**31)), "must be a power of two"),
    ("no architecture", raw_gguf(), "architecture None is not supported in GGUF files"),
)  # fmt: skip
METADATA: tuple[tuple[str, Change, str], ...] = (
    ("architecture a number", raw_gguf([entry("general.architecture", U32, bytes(4))]),
     "architecture 0 is not supported"),
    ("architecture lama", raw_gguf([entry("general.architecture", STRING, text("lama"))]),
     "the nearest supported one is 'llama'"),
    ("architecture clip", raw_gguf([entry("general.architecture", STRING, text("clip"))]),
     "architecture 'clip' is not supported in GGUF files"),
    ("only the architecture", raw_gguf([ARCHITECTURE]), "but it is missing"),
    ("no layers", sizes(block_count=0), "num_hidden_layers must be a positive integer, got 0"),
    ("2^31 layers", sizes(block_count=2**31), "num_hidden_layers must be at most 4096"),
    ("5 layers", sizes(block_count=5), "is missing (and"),
    ("no width", sizes(embedding_length=None), "hidden_size must be a positive integer, but"),
    ("a width as text", sizes(embedding_length="8"), "hidden_size must be a positive integer"),
    ("a width of 2^32-1", sizes(embedding_length=2**32 - 1), "hidden_size must be at most"),
    ("3 heads", sizes(attention__head_count=3), "must have the shape"),
    ("2^31 heads", sizes(attention__head_count=2**31), "num_attention_heads must be at most"),
    ("heads per layer", sizes(block_count=2, attention__head_count=[2, 1]), "differs from layer"),
    ("eps 0", sizes(attention__layer_norm_rms_epsilon=0.0), "rms_norm_eps must be a positive"),
    ("eps nan", sizes(attention__layer_norm_rms_epsilon=float("nan")), "must be a positive number"),
    ("theta -1", sizes(rope__freq_base=-1.0), "rope_theta must be a positive number"),
    ("scaling unknown", sizes(rope__scaling__type="stretch"), "must be one of none, lin"),
    ("scaling by -1", sizes(rope__scaling__factor=-1.0), "factor must be a positive number"),
    ("heads of 3 layers", sizes(attention__head_count=[2, 2, 2]), "or a list of 1, one for each"),
    ("context 0", sizes(context_length=0), "max_position_embeddings must be a positive integer"),
    ("another vocabulary", sizes(vocab_size=9), "must have the shape [9, 8]"),
    ("another feed-forward", sizes(feed_forward_length=13), "must have the shape [13, 8]"),
    ("bos a text", tokens(bos_token_id="x"), "bos_token_id must be a token id"),
)  # fmt: skip
VALUES: tuple[tuple[str, Change, str], ...] = (
    ("nan in a matrix", gguf_tensor("blk.0.attn_q.weight", float("nan")), "is not finite"),
    ("inf in the embeddings", gguf_tensor("token_embd.weight", float("inf")), "is not finite"),
    ("nan in a norm", gguf_tensor("blk.0.attn_norm.weight", float("nan")), "is not finite"),
    ("a value beyond 4 bits", gguf_tensor("blk.0.ffn_up.weight", 1e30), "beyond what this weight"),
)
TOKENIZERS: tuple[tuple[str, Change, str], ...] = (
    ("no tokens", with_entries(tokenizer__ggml__tokens=None, llama__vocab_size=len(WORDS)),
     "carries no vocabulary"),
    ("tokens of numbers", tokens(tokens=list(range(len(WORDS)))), "GGUF"),
    ("a token twice", tokens(tokens=[*WORDS[:-1], WORDS[0]]), "a vocabulary with a token twice"),
    ("no kind", tokens(model=None), "a tokenizer of the kind None, supported are llama, gpt2 and"),
    ("an unknown kind", tokens(model="bert"), "a tokenizer of the kind 'bert'"),
    ("an unknown split", tokens(pre="bloom"), "splits text in the way 'bloom'"),
    ("a split that is a number", tokens(pre=5), "splits text in the way 5"),
    ("no merges", tokens(merges=None), "carries no merges"),
    ("merges of numbers", tokens(merges=[1, 2]), "merges"),
    ("merges without a space", tokens(merges=["th"]), "a merge that is not two tokens, 'th'"),
    ("merges of three", tokens(merges=["t h e"]), "a merge that is not two tokens"),
    ("merges of unknown tokens", tokens(merges=["q9 z7"]), "merges that do not fit its vocabulary"),
    ("types too few", tokens(token_type=[1, 1]), "must give a type to every token"),
    ("types as texts", tokens(token_type=["1"] * len(WORDS)), "type to every token"),
    ("types a number", tokens(token_type=3), "must give a type to every token"),
    ("no scores", tokens(model="llama"), "must give a score to every token"),
    ("scores too few", tokens(model="llama", scores=[0.5]), "must give a score to every token"),
    ("scores as texts", tokens(model="llama", scores=["a"] * len(WORDS)), "score to every token"),
    ("scores a number", tokens(model="llama", scores=0.5), "must give a score to every token"),
)  # fmt: skip

CASES = [
    *(BadInput(f"gguf: {n}", s, OPEN_GGUF, c)
      for n, c, s in (*HEADERS, *METADATA, *VALUES, *TOKENIZERS)),
    BadInput("gguf: another context", "max_seq_len must be in [1, 64]",
             (*OPEN_GGUF, "--max-seq-len", "65")),
]  # fmt: skip
