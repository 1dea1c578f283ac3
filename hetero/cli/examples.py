"""Contents of the help: groups of commands, and command lines to begin with."""

from __future__ import annotations

from typing import Final

USE, DECIDE = "Use a model", "Measure and decide"
PREPARE, HERE = "Prepare a model", "This machine"

MAIN: Final = """
hetero generate demo "Once upon a time" --echo    # the model that ships with hetero
hetero chat demo
hetero COMMAND --help    # options and examples of a command
"""
COMMANDS: Final[dict[str, str]] = {
    "generate": """
hetero generate demo "Tell me a story"
hetero generate demo "Once upon a time" --echo --device hetero --stats    # both devices at once
hetero generate model.gguf --file question.txt --temperature 0
git diff | hetero generate ./my-model - --system "Review this change"
""",
    "chat": """
hetero chat demo
hetero chat ./my-model --session talk.session    # goes on there the next time
""",
    "serve": """
hetero serve demo    # OpenAI's and Anthropic's forms, on 127.0.0.1:8080
hetero serve ./my-model --keys keys.json --host 0.0.0.0
hetero serve demo ./my-model --models-max 1    # loaded when a request names it
""",
    "plan": """
hetero plan llama-3-8b --profile snapdragon-8-gen-3 --report plan.html
hetero plan ./my-model --explain qkv    # why this cut, and why not the others
hetero plan f16.gguf --calibrate text.txt --quality 0.02    # what a loss of quality buys
""",
    "profile": """
hetero profile --quick    # a minute; a full one takes ten
hetero profile --resume    # go on where Ctrl-C ended a run
hetero profile --from rates.jsonl --soc sm8750    # a phone's, from llama-bench -o jsonl
""",
    "report": """
hetero report plan.json --out plan.html
hetero report snapdragon-8-gen-3 --out chip.html
""",
    "eval": """
hetero eval ./my-model --text book.txt --weights w4a16 --weights w8a16
hetero eval ./my-model --text book.txt --count-experts counts.json    # for plan --experts
""",
    "compile": """
hetero compile ./my-model --soc sm8650 --dry-run    # sizes, time and memory
hetero compile ./my-model --soc sm8650 --out bundle
""",
    "quantize": """
hetero quantize ./my-model --out small
hetero quantize ./my-model --out small --calibrate text.txt    # 4 bits, chosen on a text
hetero quantize f16.gguf --out small.gguf --calibrate text.txt --quality 0.02    # types by tensor
hetero quantize f16.gguf --out fast.gguf --calibrate text.txt --quality 0.02 --objective prompt
""",
    "warm": """
hetero warm demo    # kernels, times and decision, before the first start
hetero warm model.gguf --whole-caches    # as `hetero serve` runs it
""",
    "cache": """
hetero cache    # kinds, sizes, and when they were last used
hetero cache packed    # the packed copies of GGUF files, and of which
hetero cache clear --stale    # unused leftovers
hetero cache clear packed --older-than 30d
""",
    "bench": """
hetero bench demo --device gpu --device npu --device hetero
hetero bench random:llama-3.2-1b -p 512 -n 128 -o json
""",
}
