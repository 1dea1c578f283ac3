"""Public bug reports of programs that do this job, and the tests of the same kind of fault here.

    python -m tests.support.field_reports       # run these tests and print a line for each report
    python -m tests.support.field_reports bos   # only reports whose kind has this word

Each report was reduced to a small input; its tests take that input and other values of the kind.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree

ROOT: Final = Path(__file__).resolve().parents[2]


class Report(NamedTuple):
    """A kind of fault, where it was reported (`owner/repository#number`), what tests it here."""

    kind: str
    threads: str
    tests: tuple[str, ...]


_SPECIAL: Final = "models/test_gguf_special_tokens.py"
_ROPE: Final = "models/test_gguf_rope.py"
_KEYS: Final = "models/test_gguf_keys.py"
_SPLIT: Final = "models/test_gguf_split.py"
_TOKENIZER: Final = "models/test_tokenizer.py"
_CONTEXTS: Final = "contexts/test_contexts.py"
REPORTS: Final = (
    Report("end of a turn that only a token's name gives",
           "rustformers/llm#446 ollama/ollama#3759 ggml-org/llama.cpp#6772 "
           "withcatai/node-llama-cpp#169",
           (f"{_SPECIAL}::test_a_generation_ends_at_a_token_of_a_known_name",
            f"{_SPECIAL}::test_an_answer_ends_at_the_named_token",
            f"{_SPECIAL}::test_a_directory_ends_at_its_special_tokens_of_known_names")),
    Report("end of text given as end of turn", "unslothai/unsloth#468",
           (f"{_SPECIAL}::test_given_ids_end_a_generation",)),
    Report("special ids out of range", "EricLBuehler/mistral.rs#2282",
           ("bad_inputs/test_bad_inputs.py::test_a_bad_input_is_one_sentence",)),
    Report("bos and eos ids absent", "ggml-org/llama.cpp#2772",
           (f"{_SPECIAL}::test_a_sentencepiece_file_without_ids_has_llama_cpps",
            f"{_SPECIAL}::test_a_byte_level_file_without_ids_ends_at_token_11_if_that_is_no_text")),
    Report("RoPE factor without a type, old names, attention factors",
           "oobabooga/text-generation-webui#6111 floneum/floneum#340 ggml-org/llama.cpp#2268 "
           "ggml-org/llama.cpp#7225 ggml-org/llama.cpp#3090",
           (f"{_ROPE}::test_scaling_is_that_of_transformers",
            f"{_ROPE}::test_a_scaled_model_is_the_same_in_both_formats")),
    Report("LongRoPE's factors", "OpenNMT/CTranslate2#1685 oobabooga/text-generation-webui#5930 "
           "huggingface/text-generation-inference#2172",
           (f"{_ROPE}::test_factors_of_longrope",
            "runtime/test_longrope.py::test_logits_are_those_of_transformers",
            f"{_ROPE}::test_other_scaling_is_refused")),
    Report("split GGUF files",
           "ggml-org/llama.cpp#6187 huggingface/transformers#32266 "
           "abetlen/llama-cpp-python#1341 ngxson/wllama#135",
           (f"{_SPLIT}::test_any_file_of_a_split_model_opens_it",
            f"{_SPLIT}::test_a_missing_file_is_named")),
    Report("padded embeddings", "ggml-org/llama.cpp#5910",
           (f"{_TOKENIZER}::test_ids_outside_a_random_models_bytes_are_named",
            f"{_KEYS}::test_sizes_that_a_file_leaves_out_are_llama_cpps")),
    Report("one number for each layer", "zackshen/gguf#21",
           (f"{_KEYS}::test_a_list_of_one_number_is_that_number",
            f"{_KEYS}::test_other_lists_are_refused")),
    Report("big-endian file", "ggml-org/llama.cpp#13943 ggml-org/llama.cpp#3298",
           (f"{_SPLIT}::test_a_big_endian_file_is_named",)),
    Report("pre-tokenizer absent or unknown",
           "ggml-org/llama.cpp#7476 ngxson/wllama#41 tinygrad/tinygrad#17659 "
           "ggml-org/llama.cpp#12122",
           ("models/test_gguf_tokenizer.py::"
            "test_text_without_a_named_pattern_is_split_by_llama_cpps_default",
            "models/test_gguf_tokenizer.py::test_a_model_of_an_unknown_pattern_is_refused",
            "models/test_gguf.py::test_the_tokenizer_is_the_same")),
    Report("doubled bos", "abetlen/llama-cpp-python#1501 sgl-project/sglang#888",
           (f"{_TOKENIZER}::test_bos_is_added_once_where_the_configuration_asks",
            f"{_CONTEXTS}::test_a_text_that_goes_on_has_one_beginning")),
    Report("special tokens in a user's text", "ggml-org/llama.cpp#7262",
           ("models/test_chat_template.py::"
            "test_a_conversation_is_encoded_with_the_templates_special_tokens_only",)),
    Report("characters cut in a stream",
           "vllm-project/vllm#931 anthropics/claude-code#62870 ollama/ollama#13497",
           (f"{_TOKENIZER}::test_any_ids_stream_as_they_decode",
            f"{_TOKENIZER}::test_a_piece_never_ends_inside_a_character")),
    Report("log-probabilities of an echoed prompt", "ggml-org/llama.cpp#27174",
           ("serving/test_openai.py::test_a_text_is_scored_as_evaluation_harnesses_do",)),
    Report("stop text over several tokens", "vllm-project/vllm#3574",
           ("generation/test_generation.py::test_stop_filter_equals_searching_the_whole_text",)),
    Report("biases of logits",
           "ggml-org/llama.cpp#19699 ggml-org/llama.cpp#13605 abetlen/llama-cpp-python#827",
           ("generation/test_sampling.py::test_a_bias_alone_is_added_as_with_all_else",)),
    Report("sampling options at their limits", "nomic-ai/gpt4all#2705 "
           "abetlen/llama-cpp-python#386",
           ("generation/test_sampling.py::test_the_largest_values_that_are_allowed_keep_the_numbers_finite",
            "generation/test_sampling.py::test_impossible_options_are_named",
            "generation/test_sampling.py::test_a_seed_repeats")),
    Report("texts of others, answers mixed",
           "ggml-org/llama.cpp#27148 ggml-org/llama.cpp#27422 ggml-org/llama.cpp#10072",
           ("serving/test_together.py::test_each_text_is_what_it_is_alone",
            "serving/test_security.py::test_nothing_is_shared_between_applications")),
    Report("usage in streams",
           "abetlen/llama-cpp-python#1082 ggml-org/llama.cpp#16048 ggml-org/llama.cpp#12102",
           ("serving/test_openai.py::test_pieces_of_a_stream_are_the_whole_answer",)),
    Report("streams that the client leaves", "abetlen/llama-cpp-python#733",
           ("serving/test_lifecycle.py::test_an_answer_ends_with_its_client",)),
    Report("JSON schemas",
           "ggml-org/llama.cpp#8180 abetlen/llama-cpp-python#1048 ggml-org/llama.cpp#25746",
           ("serving/test_grammars.py::test_answers_are_valid_over_random_schemas",)),
    Report("templates that refuse a conversation",
           "EricLBuehler/mistral.rs#506 sgl-project/sglang#892 menloresearch/jan#6254",
           ("models/test_chat_template.py::test_a_refusal_carries_the_templates_own_words",)),
    Report("templates' language",
           "oobabooga/text-generation-webui#6675 abetlen/llama-cpp-python#2225 "
           "mitsuhiko/minijinja#815",
           ("models/test_chat_template.py::test_templates_render_as_in_transformers",)),
    Report("fields of an API that are null or lists",
           "open-webui/open-webui#12441 Kilo-Org/kilocode#12330 open-webui/open-webui#17135",
           ("serving/test_api_schema.py::test_random_requests_are_answered_or_refused_in_shape",)),
    Report("a chat without a template", "",
           ("serving/test_no_template.py::test_a_chat_names_what_can_be_asked_instead",)),
    Report("no home directory",
           "vectorize-io/hindsight#3934 h2oai/h2o-llmstudio#974 NeuroDesk/neurodesktop#805",
           ("cli/test_cli.py::test_devices_compute_below_a_home_that_is_no_folder",
            "backends/test_folders.py::"
            "test_a_user_without_a_home_has_a_private_temporary_folder")),
    Report("folders that cannot be read", "",
           ("cli/test_system_errors.py::"
            "test_models_lists_the_others_beside_a_folder_that_cannot_be_read",
            "cli/test_system_errors.py::test_models_without_a_current_folder")),
    Report("byte order marks", "",
           ("cli/test_system_errors.py::test_a_prompt_has_no_byte_order_mark",
            "cli/test_system_errors.py::test_a_models_files_may_begin_with_a_byte_order_mark")),
    Report("a folder that is named as a model of the package", "",
           ("cli/test_system_errors.py::test_the_shipped_profile_is_not_a_folder_here",)),
    Report("code pages and closed streams", "",
           ("cli/test_cli.py::test_text_outside_the_terminals_code_page_is_replaced",
            "cli/test_cli.py::test_a_reader_that_goes_away_is_no_error",
            "cli/test_cli.py::test_a_full_disk_is_one_sentence")),
    Report("one core, CPU quotas",
           "huggingface/text-generation-inference#3011 "
           "huggingface/text-embeddings-inference#405 ollama/ollama#5554 "
           "microsoft/onnxruntime#8313",
           ("backends/test_cores.py::test_the_quota_of_control_groups",
            "backends/test_cores.py::test_a_process_on_one_core_gets_one_device")),
    Report("full disks and caches", "",
           ("cli/test_cli.py::test_a_cache_that_cannot_be_written_changes_nothing",
            "bad_inputs/test_broken_drivers.py::test_a_full_cache_is_at_most_a_warning")),
    Report("OpenCL drivers missing, broken, many",
           "inducer/pyopencl#537 inducer/pyopencl#391 ComputeCanada/software-stack#139",
           ("bad_inputs/test_broken_drivers.py::test_a_broken_driver_is_one_warning",)),
    Report("forks", "inducer/pyopencl#156 OpenMathLib/OpenBLAS#294 gurnec/btcrecover#46",
           ("meta/test_fork.py::test_a_model_of_the_childs_own",
            "meta/test_fork.py::test_a_pool_hands_the_error_on")),
    Report("interrupted answers", "vllm-project/vllm#17738",
           ("runtime/test_interrupts.py::test_a_signal_at_any_instruction",
            "runtime/test_interrupts.py::test_signals_at_any_moment",
            "contexts/test_service_interrupts.py::test_a_signal_at_any_instruction")),
    Report("threads and streams at once", "",
           ("contexts/test_own_contexts.py::test_streams_read_in_any_order_are_those_alone",
            "contexts/test_own_contexts.py::test_threads_have_a_context_each",
            f"{_SPLIT}::test_a_file_that_another_thread_opens_meanwhile_is_not_returned")),
    Report("what the first model of a process decides", "",
           ("backends/opencl/test_one_process.py::test_every_core_after_one",
            "backends/opencl/test_one_process.py::test_one_core_after_every_core",
            "measuring/test_contenders.py::test_none_decides_the_threads_of_another")),
    Report("memory that does not come back", "", (f"{_CONTEXTS}::test_memory_comes_back",)),
    Report("files that are no model", "",
           ("bad_inputs/test_bad_inputs.py::test_a_bad_input_is_one_sentence",
            "models/test_safetensors_file.py::test_any_damage_gives_tensors_or_a_model_error")),
    Report("checkpoints in other layouts and types", "",
           ("models/test_checkpoint.py::test_every_architecture_of_transformers",
            "models/test_checkpoint.py::test_half_precision_is_read_exactly")),
    Report("texts of a GGUF file that are no UTF-8", "",
           (f"{_SPLIT}::test_texts_that_are_no_utf8_are_read",)),
    Report("biases of some matmuls only", "",
           ("models/test_gguf_biases.py::test_a_bias_that_is_missing_is_zero",)),
    Report("types of GGUF tensors", "",
           ("models/test_gguf.py::test_other_types_are_read_as_the_library_reads_them",)),
    Report("bodies of requests", "", ("serving/test_guard.py::test_bodies",)),
    Report("answers of a trained assistant against float32", "",
           ("generation/test_smollm2.py::test_greedy_answers_equal_float32",
            "generation/test_smollm2.py::"
            "test_greedy_answers_equal_float32_more_nearly_with_exact_caches")),
)  # fmt: skip


def main(words: list[str]) -> int:
    """Run the tests of the reports and print a line for each; return 1 where one failed."""
    wanted = [x for x in REPORTS if all(word.lower() in x.kind.lower() for word in words)]
    nodes = sorted({f"tests/{node}" for report in wanted for node in report.tests})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--full", f"--junitxml={log}", *nodes]
        ran = subprocess.run(command, cwd=ROOT, check=False).returncode
        outcomes = _outcomes(log)
    for report in wanted:
        results = [outcome for node in report.tests for outcome in outcomes.get(_name(node), [])]
        worst = next((x for x in ("FAIL", "skipped") if x in results), "OK" if results else "FAIL")
        print(f"{worst:8}{report.kind}: {report.threads} ({len(results)} inputs)")
    return ran


def _outcomes(log: Path) -> dict[tuple[str, str], list[str]]:
    """Return the outcomes of each test, by its module and name without parameters."""
    outcomes: dict[tuple[str, str], list[str]] = {}
    for case in ElementTree.parse(log).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
        kinds = {child.tag for child in case}
        bad = "FAIL" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "OK"
        outcomes.setdefault((module, name), []).append(bad)
    return outcomes


def _name(node: str) -> tuple[str, str]:
    path, _, name = node.partition("::")
    return "tests." + path.removesuffix(".py").replace("/", "."), name


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
