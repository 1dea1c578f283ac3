"""What is fuzzed: each target takes the bytes of one file and may raise nothing but a sentence.

A target opens the file as a user's command does and then uses what it opened: blocks are packed,
texts encoded, sessions loaded. Seeds are small valid files.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from hetero import LLM, Service
from hetero.models import LoadedModel, model_spec, open_model
from hetero.models.tokenizer import HfTokenizer
from tests.fuzz.documents import Bundle, Journal, Manifest, Plan, Profile
from tests.fuzz.target import SEPARATOR, Target
from tests.support import tiny_files

TEXT = "the café: 多 😀\t\n <s> </s>"


def use_model(model: LoadedModel) -> None:
    """Pack everything, once per format family."""
    for index in range(model.config.num_layers):
        model.weights.block(index)
        model.weights.release(index)
    model.weights.embed()
    model.weights.lm_head()
    model.weights.final_norm()


def use_tokenizer(tokenizer: HfTokenizer) -> None:
    """Text to ids and back, whole and in pieces."""
    ids = tokenizer.encode(TEXT)
    tokenizer.decode(ids)
    stream = tokenizer.decoder(ids[:2])
    for token in [*ids, 0, 1, tokenizer.vocab_size, 5]:
        stream.push(token)
    stream.finish()


class Safetensors(Target):
    """`model.safetensors` of a directory whose other files are good."""

    name = "safetensors"
    length_prefix = True
    dictionary = ("data_offsets", "__metadata__", "dtype", "shape", "BF16", "F16", "F64", "[0,0]")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tiny_files.write_directory(folder)

    def seeds(self) -> list[bytes]:
        return [(self.folder / "model.safetensors").read_bytes()]

    def use(self, data: bytes) -> None:
        (self.folder / "model.safetensors").write_bytes(data)
        for weights in ("w4a16", "f16"):
            use_model(open_model(self.folder, weights=weights))


class Gguf(Target):
    """A GGUF file: metadata, tensors and tokenizer."""

    name = "gguf"
    json = False
    dictionary = ("GGUF", "llama", "qwen2", "phi3", "gemma2", "gpt-oss", "lfm2moe", "qwen35moe",
                  "expert_count", "expert_used_count", "tokenizer.ggml.model",
                  "general.architecture", "general.alignment", "blk.0.attn_qkv.weight")  # fmt: skip

    def seeds(self) -> list[bytes]:
        path = self.folder / "seed.gguf"
        pieces = {"tokenizer__ggml__model": "llama",
                  "tokenizer__ggml__tokens": ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "<0x41>"],
                  "tokenizer__ggml__token_type": [2, 3, 3, 1, 1, 1, 6],
                  "tokenizer__ggml__scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, 0.0]}  # fmt: skip
        letters = {"tokenizer__ggml__tokens": ["<s>", "</s>", "t", "h", "th", "the", "e"],
                   "tokenizer__ggml__token_type": [3, 3, 1, 1, 1, 1, 1],
                   "tokenizer__ggml__merges": ["t h", "th e"]}  # fmt: skip
        found = [tiny_files.write_gguf(path, **x).read_bytes() for x in (pieces, letters)]
        path.unlink()
        return found

    def use(self, data: bytes) -> None:
        path = self.folder / "model.gguf"
        path.write_bytes(data)
        model_spec(path)
        for weights in ("w4a16", "w8a16"):
            model = open_model(path, weights=weights)
            use_model(model)
        assert isinstance(model.tokenizer, HfTokenizer)
        use_tokenizer(model.tokenizer)


class Config(Target):
    """`config.json` of a directory whose other files are good."""

    name = "config"
    dictionary = ("rope_scaling", "rope_parameters", "rope_type", "llama3", "yarn", "factor",
                  "sliding_window", "partial_rotary_factor", "layer_types", "head_dim", "null",
                  "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "opt", "internlm2",
                  "gemma3_text", "granite", "smollm3", "ministral3", "olmo2", "olmo3", "exaone4",
                  "glm4", "ernie4_5", "hunyuan_v1_dense", "cohere2", "minicpm", "text_config",
                  "gpt_oss", "lfm2_moe", "qwen3_moe", "qwen3_5_moe", "num_experts",
                  "num_experts_per_tok", "mlp_only_layers", "quantization_config", "mxfp4",
                  "full_attention", "sliding_attention", "no_rope_layers", "alpha",
                  "Infinity", "NaN", "1e999", "true", "-1", "2147483647")  # fmt: skip

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tiny_files.write_directory(folder)

    def seeds(self) -> list[bytes]:
        plain = (self.folder / "config.json").read_bytes()
        scaling = b', "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 8}}'
        return [plain, plain[:-1] + scaling, plain.replace(b"llama", b"mistral")]

    def use(self, data: bytes) -> None:
        (self.folder / "config.json").write_bytes(data)
        model_spec(self.folder)
        use_model(open_model(self.folder))


class Tokenizer(Target):
    """`tokenizer.json` and `tokenizer_config.json`, one behind the other."""

    name = "tokenizer"
    dictionary = ("Unigram", "WordPiece", "WordLevel", "BPE", "ByteLevel", "Sequence", "Split",
                  "Regex", "Precompiled", "Metaspace", "Strip", "Replace", "ByteFallback",
                  "TemplateProcessing", "added_tokens", "chat_template", "merges")  # fmt: skip

    def seeds(self) -> list[bytes]:
        folder = tiny_files.write_directory(self.folder / "seed")
        names = ("tokenizer.json", "tokenizer_config.json")
        found = [SEPARATOR.join((folder / name).read_bytes() for name in names)]
        shutil.rmtree(folder)
        return found

    def use(self, data: bytes) -> None:
        whole, _, config = data.partition(SEPARATOR)
        (self.folder / "tokenizer.json").write_bytes(whole)
        (self.folder / "tokenizer_config.json").write_bytes(config or b"{}")
        use_tokenizer(HfTokenizer.from_directory(self.folder))


class Session(Target):
    """A session file of a model that is open."""

    name = "session"
    length_prefix = True
    dictionary = (
        "tokens", "messages", "sha256", "numerics", "schema_version", "k.0", "v.0", "I32", "first"
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.llm = LLM(str(tiny_files.write_directory(folder / "model")), device="npu")

    def seeds(self) -> list[bytes]:
        path = self.folder / "seed"
        talk = self.llm.conversation()
        talk.say("hi", max_tokens=2)
        talk.save(path)
        return [path.read_bytes()]

    def use(self, data: bytes) -> None:
        path = self.folder / "session"
        path.write_bytes(data)
        self.llm.load_session(path)

    def close(self) -> None:
        self.llm.close()


class Contexts(Target):
    """The folder of a service: what it is of, a context's text, a file of chunks. Whatever opens
    is gone on with, and any number of tokens is computed again.
    """

    name = "contexts"
    json = False
    dictionary = (
        "HTKV",
        '"keep":',
        '"tokens":',
        '"told":',
        '"version":',
        '"secret":',
        '"used":',
        '"encryption":',
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tiny_files.write_directory(folder / "model")
        self.llm = LLM(str(folder / "model"), device="npu")
        self.place = folder / "contexts"
        with self._service() as service:
            context = service.bind("a").new_context(chat=False)
            context.call("hi hi hi", max_tokens=3)
            context.call("hi", max_tokens=3)
            service.swap.drain()
        self.parts = [self.place / "service.json", *sorted(self.place.glob("apps/*/*"))]
        self.sound = [path.read_bytes() for path in self.parts]

    def _service(self) -> Service:
        return Service(
            self.llm, directory=self.place, context_memory="2MiB", context_disk="1MiB", kv_bits="8"
        )

    def seeds(self) -> list[bytes]:
        return [SEPARATOR.join(self.sound)]

    def use(self, data: bytes) -> None:
        shutil.rmtree(self.place / "apps")
        for path, part in zip(self.parts, data.split(SEPARATOR), strict=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(part)
        with self._service() as service:
            for context in service.bind("a").contexts():
                context.call("hi", max_tokens=1)
            service.swap.drain()
            service.memory.check()

    def close(self) -> None:
        self.llm.close()


DOCUMENTS: tuple[type[Target], ...] = (Plan, Profile, Journal, Bundle, Manifest)
TARGETS: dict[str, type[Target]] = {
    x.name: x for x in (Safetensors, Gguf, Config, Tokenizer, Session, Contexts, *DOCUMENTS)
}
