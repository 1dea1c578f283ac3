"""Prompts, options, places to write, plans and profiles."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.bad_inputs.case import GENERATE, BadInput, Change, replaced

LONG = "word " * 500
HOST = ("--profile", "host", "--seq-lens", "64")
MANY = ",".join(map(str, range(1, 3001)))  # its beginning has one more than is solved
WITHIN = ("quantize", "{gguf}", "--out", "{work}/o.gguf", "--calibrate", "{work}/words")
OPTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--max-tokens", "0"), "'--max-tokens'"),
    (("--max-tokens", "many"), "'--max-tokens'"),
    (("--temperature", "-1"), "temperature must be at least 0, got -1"),
    (("--temperature", "nan"), "temperature must be at least 0, got nan"),
    (("--temperature", "inf"), "temperature must be at least 0, got inf"),
    (("--temperature", "hot"), "'--temperature'"),
    (("--temperature", "1e-320"), "temperature must be 0 (the likeliest token) or from 1e-30 to"),
    (("--temperature", "1e300"), "temperature must be 0 (the likeliest token) or from 1e-30 to"),
    (("--repetition-penalty", "1e-45"), "repetition_penalty must be from 1e-30 to 1e+30"),
    (("--frequency-penalty", "-1e308"), "frequency_penalty must be within ±10000, got -1e+308"),
    (("--presence-penalty", "-1e308"), "presence_penalty must be within ±10000, got -1e+308"),
    (("--memory-budget", "0.5"), "is not a size of at least a byte"),
    (("--top-k", "-1"), "top_k must be at least 0 (0 keeps all), got -1"),
    (("--top-k", "1.5"), "'--top-k'"),
    (("--top-p", "0"), "top_p must be in (0, 1], got 0"),
    (("--top-p", "1.5"), "top_p must be in (0, 1], got 1.5"),
    (("--top-p", "nan"), "top_p must be in (0, 1], got nan"),
    (("--min-p", "-0.1"), "min_p must be in [0, 1], got -0.1"),
    (("--min-p", "2"), "min_p must be in [0, 1], got 2"),
    (("--repetition-penalty", "0"), "repetition_penalty must be above 0, got 0"),
    (("--repetition-penalty", "inf"), "repetition_penalty must be above 0, got inf"),
    (("--frequency-penalty", "nan"), "frequency_penalty must be a finite number, got nan"),
    (("--presence-penalty", "inf"), "presence_penalty must be a finite number, got inf"),
    (("--logit-bias", "comma"), "--logit-bias must be a token id and a number such as 42=-5"),
    (("--logit-bias", "1="), "--logit-bias must be a token id and a number"),
    (("--logit-bias", "=1"), "--logit-bias must be a token id and a number"),
    (("--logit-bias", "1=nan"), "logit_bias of token 1 must be within"),
    (("--logit-bias", "1=1e9"), "logit_bias of token 1 must be within"),
    (("--logit-bias", "-5=1"), "token id -5 is outside the vocabulary"),
    (("--logit-bias", "999999=1"), "token id 999999 is outside the vocabulary"),
    (("--logit-bias", "9" * 5000 + "=1"), "--logit-bias must be a token id and a number"),
    (("--seed", "-1"), "seed must be at least 0, got -1"),
    (("--seed", "x"), "'--seed'"),
    (("--stop", ""), "a stop text must not be empty"),
    (("--logprobs", "-1"), "'--logprobs'"),
    (("--speculative", "-1"), "'--speculative'"),
    (("--draft-model", "mtp"), "has no head for multi-token prediction"),
    (("--draft-model", "mtp", "--draft-device", "gpu"), "leave --draft-device out"),
    (("--device", "tpu"), "'--device'"),
    (("--gpu", "opencll"), "did you mean 'opencl'?"),
    (("--npu", "opencl"), "opencl is not a npu backend"),
    (("--gpu", "opencl-cores"), "opencl-cores leaves the NPU no core: use --device gpu"),
    (("--npu", "tpu"), "unknown"),
    (("--cpu", "opencl"), "opencl is not a cpu backend: choose ort-cpu"),
    (("--weights", "w5"), "'--weights'"),
    (("--strategy", "rowcut"), "did you mean row-cut?"),
    (("--sync", "pray"), "'--sync'"),
    (("--max-seq-len", "0"), "'--max-seq-len'"),
    (("--max-seq-len", "65"), "max_seq_len must be in [1, 64]"),
    (("--plan", "{work}/none.json"), "cannot read the plan"),
    (("--plan", "{work}"), "cannot read the plan"),
    (("--plan", "{dir}/config.json"), "is not valid"),
    (("--plan", "{dir}/model.safetensors"), "plan"),
    (("--profile", "none"), "profile 'none': there is no such file"),
    (("--trace", "{work}/none/t.json"), "cannot write the trace {work}/none/t.json"),
    (("--temprature", "1"), "--temprature"),
)
COMMANDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("two prompts", ("generate", "{dir}", "hi", "--file", "{dir}/config.json"), "not both"),
    ("no such command", ("genrate", "{dir}", "hi"), "genrate"),
    ("an empty prompt", ("generate", "{dir}", ""), "the prompt is empty: give some text"),
    ("an empty prompt for chat", ("generate", "{dir}", LONG, "--chat", "--device", "npu"),
     "do not fit the context of 64"),
    ("a prompt beyond the context", ("generate", "{dir}", LONG, "--device", "npu"),
     "do not fit the context of 64: shorten the prompt or open the model with a larger"),
    ("bench: a prompt beyond the context", ("bench", "{dir}", "-p", "99999", "--device", "npu"),
     "choose a smaller -p or -n"),
    ("bench: a depth beyond the context", ("bench", "{dir}", "-d", "60", "-p", "8", "-n", "2",
                                           "--device", "npu"),
     "-d 60 with -p 8 and -n 2 needs a context of 68 tokens, this model's has 64: choose a"),
    ("bench: a depth below 0", ("bench", "{dir}", "-d", "-1"), "'-d'"),
    ("bench: no rounds", ("bench", "{dir}", "-r", "0"), "'-r'"),
    ("bench: an unknown format", ("bench", "{dir}", "-o", "xml"), "'-o'"),
    ("bench: an unknown strategy", ("bench", "{dir}", "--strategy", "x"), "unknown strategy 'x'"),
    ("bench: an unknown way to wait", ("bench", "{dir}", "--sync", "pray"), "'--sync'"),
    ("eval: no text", ("eval", "{dir}", "--text", "{work}/none"), "cannot be read as UTF-8 text"),
    ("eval: a folder", ("eval", "{dir}", "--text", "{work}"), "cannot be read as UTF-8 text"),
    ("eval: no words", ("eval", "{dir}", "--text", "{work}/nothing"), "needs at least 32"),
    ("eval: no UTF-8", ("eval", "{dir}", "--text", "{dir}/model.safetensors"), "UTF-8 text"),
    ("eval: a window of 1", ("eval", "{dir}", "--text", "{work}/words", "--window", "1"),
     "the window must be in [2, 64] tokens"),
    ("eval: a window beyond the context",
     ("eval", "{dir}", "--text", "{work}/words", "--window", "65"), "must be in [2, 64]"),
    ("eval: no stride", ("eval", "{dir}", "--text", "{work}/words", "--stride", "0"),
     "the stride must be in [1, 63]"),
    ("eval: another reference",
     ("eval", "{dir}", "--text", "{work}/words", "--reference", "demo"), "a vocabulary of 2048"),
    ("reproduce: a figure without numbers", ("reproduce", "--figure", "12"),
     "choose one of 11, 13, 14, 15, 16, 17, 19"),
    ("reproduce: a page of one figure", ("reproduce", "--figure", "13", "--report", "{dir}/x.html"),
     "leave out --figure"),
    ("eval: no experts to count",
     ("eval", "{dir}", "--text", "{work}/words", "--count-experts", "{work}/counts"),
     "has no routed experts to count"),
    ("generate: counts of no experts", ("generate", "demo", "x", "--experts", "{work}/none"),
     "cannot read the counts"),
    ("plan: no counts", ("plan", "llama-3-8b", *HOST, "--experts", "{work}/none"),
     "cannot read the counts"),
    ("plan: counts that are none", ("plan", "llama-3-8b", *HOST, "--experts", "{dir}/config.json"),
     "config.json are not valid"),
    ("plan: an unknown model", ("plan", "lama-3-8b"), "did you mean"),
    ("plan: another engine's arguments without its rates",
     ("plan", "llama-3-8b", *HOST, "--print-args", "llama.cpp"),
     "profile host has no rates of llama.cpp: name a fitted chip with --profile"),
    ("profile: a check of nothing", ("profile", "--check", "{work}/nothing"), "is not JSON"),
    ("profile: a check of no file", ("profile", "--check", "{work}/none"), "cannot be read"),
    ("doctor: a report of another form", ("doctor", "--report", "{work}/a.pdf"),
     "--report {work}/a.pdf: a report is .md, with a .json next to it"),
    ("doctor: a report in no folder", ("doctor", "--report", "{work}/none/a"), "that is there"),
    ("profile: rates of nothing", ("profile", "--from", "{work}/nothing"), "has no column 'model'"),
    ("profile: rates of a folder", ("profile", "--from", "{work}"), "{work} cannot be read"),
    ("profile: rates that are missing", ("profile", "--from", "{work}/none"), "cannot be read"),
    ("plan: an unknown engine", ("plan", "llama-3-8b", *HOST, "--print-args", "vllm"),
     "'--print-args'"),
    ("plan: none at all", ("plan", "none"), "demo, or one of llama-3.2-1b, "),
    ("plan: lengths", ("plan", "llama-3-8b", "--seq-lens", "a,b"), "give token counts like 64,256"),
    ("plan: a length of 0", ("plan", "llama-3-8b", "--seq-lens", "0"), "--seq-lens"),
    ("plan: a length beyond 64 bits", ("plan", "llama-3-8b", *HOST, "--seq-lens", "9" * 20),
     "prompt lengths are token counts from 1 to 1048576, got [99999999999999999999]"),
    ("plan: 3000 lengths", ("plan", "llama-3-8b", *HOST, "--seq-lens", MANY),
     "at most 128 prompt lengths are solved, got 3000"),
    ("plan: 13 lengths and any sizes", ("plan", "llama-3-8b", *HOST, "--graph-sizes", "auto",
                                        "--seq-lens", MANY[:29]),
     "at most 12 prompt lengths are solved with --graph-sizes auto, got 13"),
    ("plan: 3000 graph sizes", ("plan", "llama-3-8b", *HOST, "--graph-sizes", MANY),
     "at most 64 graph sizes are solved, got 3000"),
    ("plan: a graph beyond 64 bits", ("plan", "llama-3-8b", *HOST, "--graph-sizes", "9" * 20),
     "graph sizes are token counts from 1 to 1048576"),
    ("plan: a context beyond 64 bits", ("plan", "llama-3-8b", *HOST, "--context", "9" * 20),
     "--context is from 0 to 1048576 tokens"),
    ("plan: a budget of half a byte", ("plan", "llama-3-8b", *HOST, "--memory-budget", "0.5"),
     "is not a size of at least a byte"),
    ("bench: rounds without end", ("bench", "{dir}", "-r", "99999999999999"), "'-r'"),
    ("bench: a prompt without end", ("bench", "{dir}", "-p", "9" * 20), "'-p'"),
    ("sync-bench: rounds without end", ("sync-bench", "-r", "99999999999999"), "'-r'"),
    ("profile: no time at all", ("profile", "--budget", "1e-320"), "--budget is a time such as"),
    ("plan: no length", ("plan", "llama-3-8b", "--seq-lens", ""), "--seq-lens"),
    ("plan: graph sizes", ("plan", "llama-3-8b", "--graph-sizes", "x"), "--graph-sizes"),
    ("plan: objective", ("plan", "llama-3-8b", "--objective", "beauty"), "'--objective'"),
    ("plan: share", ("plan", "llama-3-8b", "--profile", "host", "--max-gpu-share", "2"), "share"),
    ("plan: budget", ("plan", "llama-3-8b", "--memory-budget", "4 apples"), "is not a size"),
    ("plan: budget of nothing", ("plan", "llama-3-8b", "--memory-budget", "0"), "is not a size"),
    ("plan: a weight of 0", ("plan", "llama-3-8b", "--seq-lens", "64:0"), "a number above 0"),
    ("plan: a weight", ("plan", "llama-3-8b", "--seq-lens", "64:x,8"), "a number above 0"),
    ("plan: a weight of nothing", ("plan", "llama-3-8b", "--seq-lens", ":3"), "--seq-lens"),
    ("plan: graph memory", ("plan", "llama-3-8b", "--graph-memory", "much"), "is not a size"),
    ("plan: a budget of given sizes", ("plan", "llama-3-8b", "--profile", "host",
                                       "--graph-memory", "1GiB"), "add --graph-sizes auto"),
    ("plan: no preparation", ("plan", "llama-3-8b", "--profile", "host", "--graph-sizes", "auto",
                              "--preparation-budget", "-1"), "are above 0"),
    ("plan: weights", ("plan", "llama-3-8b", "--weights", "w5"), "weights 'w5' is not a format"),
    ("plan: a profile that is none", ("plan", "llama-3-8b", "--profile", "{dir}/config.json"),
     "is not a profile"),
    ("plan: a profile of the future", ("plan", "llama-3-8b", "--profile", "{work}/future.json"),
     "has schema version 99"),
    ("report: no file", ("report", "{work}/none", "--out", "{work}/r.html"),
     "there is no such file, and no shipped profile of this name: those are"),
    ("report: no profile", ("report", "{dir}/config.json", "--out", "{work}/r.html"),
     "is neither a profile nor a plan"),
    ("profile: a third device", ("profile", "--measure-cpu", "qnn"), "qnn is not a cpu backend"),
    ("profile: a third device later", ("profile", "--add", "--measure-cpu", "ort-cpu"),
     "leave out --measure-cpu"),
    ("profile: two third devices", ("profile", "--measure-cpu", "ort-cpu", "--cpu", "reference"),
     "its old name, disagree"),
    ("profile: a budget", ("profile", "--budget", "long"), "--budget is a time such as 90s"),
    ("profile: add to a model's", ("profile", "--add", "--model", "demo"), "leave out --model"),
    ("compile: an unknown chip", ("compile", "{dir}", "--soc", "sm1", "--dry-run"), "sm1"),
    ("compile: graph sizes", ("compile", "{dir}", "--soc", "sm8650", "--dry-run",
                              "--graph-sizes", "x"), "--graph-sizes"),
    ("quantize: into the model", ("quantize", "{dir}", "--out", "{dir}"), "holds files that"),
    ("quantize: onto a file", ("quantize", "{dir}", "--out", "{work}/words"), "is a file"),
    ("quantize: nowhere", ("quantize", "{dir}", "--out", "{work}/a/b"), "there is no such"),
    ("quantize: into /proc", ("quantize", "{dir}", "--out", "/proc/x"), "/proc/x: needs"),
    ("quantize: again", ("quantize", "{dir}", "--out", "{quantised}"), "or use --overwrite"),
    ("quantize: over other files", ("quantize", "{dir}", "--out", "{mixed}", "--overwrite"),
     "which hetero quantize did not write"),
    ("quantize: formats", ("quantize", "{dir}", "--out", "{work}/o", "--weights", "w2"),
     "--weights 'w2' is not a format; choose one or two of w4a16"),
    ("quantize: calibration without text",
     ("quantize", "{dir}", "--out", "{work}/o", "--calibrate", "{work}/none"), "cannot be read"),
    ("quantize: calibration with too little",
     ("quantize", "{dir}", "--out", "{work}/o", "--calibrate", "{work}/few"), "needs at least 32"),
    ("quantize: calibration of floats", ("quantize", "{dir}", "--out", "{work}/o", "--weights",
                                         "f16", "--calibrate", "{work}/words"), "choose w4a16"),
    ("quantize: static scales without text",
     ("quantize", "{dir}", "--out", "{work}/o", "--weights", "w8a8"), "--calibrate TEXT --out DIR"),
    ("quantize: outliers of 4 bits", ("quantize", "{dir}", "--out", "{work}/o", "--calibrate",
                                      "{work}/words", "--outliers", "all"), "give --weights w8a8"),
    ("quantize: outliers without text", ("quantize", "{dir}", "--out", "{work}/o", "--weights",
                                         "w8a8", "--outliers", "none"), "--calibrate TEXT too"),
    *((f"quantize: outliers {x!r}", ("quantize", "{dir}", "--out", "{work}/o", "--weights", "w8a8",
                                     "--calibrate", "{work}/words", "--outliers", x),
       "outliers are 15% (of the matmuls), none, all or paper")
      for x in ("", "%", "15", "101%", "-1%", "1.5%", "15 %", "٣%", "PAPER", "9" * 100 + "%")),
    *((f"quantize: quality {x}", (*WITHIN, "--quality", x), "a number of nats above 0")
      for x in ("0", "-1", "nan", "inf")),
    ("quantize: quality without text",
     ("quantize", "{gguf}", "--out", "{work}/o.gguf", "--quality", "1"), "--calibrate TEXT too"),
    ("quantize: quality of no GGUF", (*WITHIN[:1], "{dir}", *WITHIN[2:], "--quality", "1"),
     "give a .gguf file of the model"),
    ("quantize: quality of a format", (*WITHIN, "--quality", "1", "--weights", "w8a16"),
     "leave out --weights and --outliers"),
    ("quantize: quality into a folder",
     ("quantize", "{gguf}", "--out", "{work}", "--quality", "1", "--calibrate", "{work}/words"),
     "a name that ends in .gguf"),
    ("quantize: quality onto the model",
     ("quantize", "{gguf}", "--out", "{gguf}", "--quality", "1", "--calibrate", "{work}/words"),
     "is the model that is quantised"),
    ("quantize: quality by too little",
     (*WITHIN[:-1], "{work}/few", "--quality", "1"), "needs at least 256"),
    *((f"quantize: {x} without a quality", (*WITHIN, f"--{x}", y), f"--{x} is for --quality")
      for x, y in (("objective", "prompt"), ("profile", "host"))),
    ("quantize: an objective", (*WITHIN, "--quality", "1", "--objective", "speed"),
     "'--objective'"),
    ("quantize: times of no profile", (*WITHIN, "--quality", "1", "--profile", "{work}/none"),
     "there is no such file"),
    *((f"plan: {x} without a quality", ("plan", "{gguf}", *HOST, f"--{x}", y),
       f"--{x} is for --quality")
      for x, y in (("calibrate", "{work}/words"), ("calibration-tokens", "400"))),
    ("plan: quality without text", ("plan", "{gguf}", *HOST, "--quality", "1"),
     "--calibrate TEXT too"),
    ("plan: quality of nothing", ("plan", "{gguf}", *HOST, "--quality", "0", "--calibrate",
                                  "{work}/words"), "a number of nats above 0"),
    ("plan: quality of shapes", ("plan", "{dir}", *HOST, "--quality", "1", "--calibrate",
                                 "{work}/words"), "give a .gguf file of the model"),
    ("plan: quality by too little", ("plan", "{gguf}", *HOST, "--quality", "1", "--calibrate",
                                     "{work}/few"), "needs at least 256"),
    ("plan: quality of energy", ("plan", "{gguf}", *HOST, "--quality", "1", "--calibrate",
                                 "{work}/words", "--objective", "energy"),
     "leave out --objective energy"),
    ("plan: quality of other engines", ("plan", "{gguf}", *HOST, "--quality", "1", "--calibrate",
                                        "{work}/words", "--print-args", "llama.cpp"),
     "leave out --quality"),
    ("chat: a context of nothing", ("chat", "{dir}", "--max-seq-len", "0"), "'--max-seq-len'"),
)  # fmt: skip


def mixed(work: Path) -> None:
    (work / "quantised" / "mine.txt").write_text("precious", encoding="utf-8")


FUTURE: Change = replaced("future.json", json.dumps({"schema_version": 99}))
CHANGES = {"{mixed}": mixed, "{work}/future.json": FUTURE}


def change_for(words: tuple[str, ...]) -> Change:
    """What a command's words need besides the good files."""
    wanted = [change for word, change in CHANGES.items() if word in words]

    def change(work: Path) -> None:
        for one in wanted:
            one(work)

    return change


FULL: tuple[tuple[str, tuple[str, ...], str, int], ...] = (
    ("quantize", ("quantize", "{dir}", "--out", "{work}/o"), "cannot be written", 4096),
    ("plan", ("plan", "llama-3-8b", "--profile", "host", "--seq-lens", "64", "--out",
              "{work}/p.json"), "cannot write the plan {work}/p.json", 512),
)  # fmt: skip

ENDLESS = "larger than 64 MiB"
SILENT = "nothing comes from this pipe"
# (what reads it, the command, the largest text that it takes)
READERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("a plan to run", (*GENERATE, "--plan", "{it}"), ENDLESS),
    ("a profile to run by", (*GENERATE, "--profile", "{it}", "--device", "hetero", "--strategy",
                             "row-cut"), ENDLESS),
    ("a profile to plan by", ("plan", "llama-3-8b", "--profile", "{it}"), ENDLESS),
    ("a plan to compare", ("plan", "llama-3-8b", *HOST, "--compare", "{it}"), ENDLESS),
    ("a report", ("report", "{it}", "--out", "{work}/r.html"), ENDLESS),
    ("a text to score", ("eval", "{dir}", "--text", "{it}"), "larger than 256 MiB"),
    ("a text to calibrate", ("quantize", "{dir}", "--out", "{work}/o", "--calibrate", "{it}"),
     "larger than 256 MiB"),
)  # fmt: skip


def pipe(work: Path) -> None:
    """A pipe that nobody writes to."""
    os.mkfifo(work / "pipe")


def special(name: str, path: str, sentence: str | None, change: Change = pipe) -> list[BadInput]:
    """Every command that reads a file, given another thing."""
    return [
        BadInput(
            f"{what}: {name}",
            sentence or large,
            tuple(word.replace("{it}", path) for word in words),
            change,
        )
        for what, words, large in READERS
    ]


def sparse(work: Path) -> None:
    """A file of 3 GB that takes no room."""
    with (work / "sparse").open("wb") as file:
        file.truncate(3 << 30)


CASES = [
    *special("a silent pipe", "{work}/pipe", SILENT),
    *special("zeros without end", "/dev/zero", None, lambda _: None),
    *special("3 GB of zeros", "{work}/sparse", None, sparse),
    *special("a folder", "{work}", "directory", lambda _: None),
    BadInput("profile: onto a folder", "cannot write", ("profile", "--out", "{work}")),
    BadInput("plan: onto a folder", "cannot write", ("plan", "llama-3-8b", *HOST, "--out",
                                                     "{work}")),
    BadInput("plan: onto a pipe", "no process reads this pipe", ("plan", "llama-3-8b", *HOST,
                                                             "--out", "{work}/pipe"), pipe),
    BadInput("trace: onto a folder", "cannot write the trace", (*GENERATE, "--trace", "{work}")),
    *(BadInput(f"option {' '.join(x)[:40]}", s, (*GENERATE, *x)) for x, s in OPTIONS),
    *(BadInput(n, s, tuple(w.replace("{mixed}", "{quantised}") for w in words), change_for(words))
      for n, words, s in COMMANDS),
    *(BadInput(f"{n}: a full disk", s, words, file_limit=x) for n, words, s, x in FULL),
]  # fmt: skip
