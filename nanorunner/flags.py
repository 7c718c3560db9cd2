"""The command line's flags, made from the fields of Config and SamplingParams.

Nothing here imports torch, so `--help` and a misspelt flag answer at once.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, NoReturn

from nanorunner.config import CHOICES, Config
from nanorunner.did_you_mean import did_you_mean
from nanorunner.sampling_params import SamplingParams
from nanorunner.token_count import parse_count

ENGINE_HELP = {
    "model": "Hugging Face folder, hub id or preset (default: the embedded SmolLM2-135M-Instruct)",
    "tp": "processes that the model is split over (default 1)",
    "runner": "which runner works on the ranks",
    "device": "where to run",
    "dtype": "of weights and arithmetic",
    "load_format": "dummy: random weights, nothing downloaded",
    "attention_backend": "who computes attention",
    "all_reduce": "who adds up small tensors of several GPUs; auto takes peer memory if it works",
    "enforce_eager": "capture no CUDA graphs",
    "batch_invariant": "slower kernels, whose results never depend on what else is in the batch",
    "skip_tokenizer_init": "token ids in, token ids out",
    "max_num_seqs": "most requests in one step (default 256)",
    "max_num_reqs": "rows of runner v2's state table (default 1024, or 2 x max_num_seqs)",
    "max_num_batched_tokens": "most tokens in one step (default 8192)",
    "max_model_len": "most tokens of one request, prompt and completion (default: the model's, "
    "at most 4096)",
    "gpu_memory_utilization": "this instance's share of each GPU's memory (default 0.9)",
    "kv_cache_gib": "KV cache of each rank (default: what is left on a GPU; 1 on a CPU)",
    "num_blocks": "KV cache of each rank in blocks of 256 tokens",
    "prefix_cache": "share the KV of equal beginnings (default on)",
    "async_depth": "steps in flight (default 2; runner v1 does one at a time)",
    "seed": "of every random draw (default 0)",
    "step_timeout_s": "longest wait for one step (default 300)",
    "start_timeout_s": "longest wait for the ranks to start (default 600)",
    "step_times": "record where each step's time goes, and print it at the end",
    "trace": "write what each rank did when, to DIR/rank-N.jsonl, at the end",
    "tap": "print a line for each frame that rank 0 sends; 2: with its arguments",
    "tap_json": "write the same to FILE, a JSON object a line",
    "check_ranks": "prove that the ranks agree: weights against the checkpoint, values in every "
    "step; slow",
    "share_gpu": "put every rank on GPU 0, over gloo, when there are fewer GPUs than ranks; slow",
    "speculative": "who proposes tokens that a step verifies together: off (default), ngram (the "
    "request's own text) or draft (a small model)",
    "draft_model": "the small model for --speculative draft: folder, hub id or preset",
    "num_speculative_tokens": "drafts a step (default 7 for ngram, 4 for draft)",
    "ngram_min": "shortest suffix that ngram looks up (default 2)",
    "ngram_max": "longest suffix that ngram looks up (default 4)",
    "speculative_adaptive": "turn speculation down where it loses (default on)",
}
SAMPLING_HELP = {
    "max_tokens": "most ids to generate for a prompt (default 256)",
    "min_tokens": "ignore every stop before this many (default 0)",
    "temperature": "0 is greedy (default 0)",
    "top_k": "keep the k likeliest ids; 0 is off (default)",
    "top_p": "keep the likeliest ids up to this probability; 1 is off (default)",
    "min_p": "drop ids less likely than this share of the likeliest; 0 is off (default)",
    "repetition_penalty": "above 1: against ids of prompt and output; 1 is off (default)",
    "presence_penalty": "taken once from the logit of an id in the output (-2 to 2; default 0)",
    "frequency_penalty": "taken as often as the output has the id (-2 to 2; default 0)",
    "n": "completions of each prompt (default 1)",
    "logprobs": "with each id, log-probabilities of it and of the N likeliest; needs JSON output",
    "prompt_logprobs": "the same of the prompt's ids",
    "ignore_eos": "go on after the model's end of text",
}
DEFAULT_MAX_TOKENS = 256
COUNTS = (
    "max_num_seqs",
    "max_num_reqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_blocks",
    "max_tokens",
)
METAVARS = {"trace": "DIR", "tap": "LEVEL", "tap_json": "FILE"}
OPTIONAL = {"tap": 1}  # what the flag means without a value
SHORT = {"tp": "--tensor-parallel-size", "step_timeout_s": "--step-timeout"}


class Parser(argparse.ArgumentParser):
    """argparse with one clear line per refusal, and the closest name of an unknown flag."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)  # --temp must not pass for --temperature
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Print the refusal alone, without the page of usage, and exit with 2."""
        self.exit(2, f"nanorunner: {message}\n")

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Return the flags; exit with 2 for an unknown one."""
        arguments, unknown = self.parse_known_args(argv)
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"unexpected {word!r}; give a prompt as --prompt {word!r}")
            name = word.split("=")[0]
            self.error(f"unknown flag {name}; {did_you_mean(name, self.long_flags())}")
        return arguments

    def long_flags(self) -> list[str]:
        """Return every flag that starts with two dashes."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of Config; one left out keeps the field's own default."""
    group = parser.add_argument_group("engine")
    for field in fields(Config):
        help_text = ENGINE_HELP[field.name]
        if field.name in CHOICES:
            help_text += ": " + ", ".join(CHOICES[field.name])
        _add(group, field.name, str(field.type), help_text)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of SamplingParams; --seed is the engine's."""
    group = parser.add_argument_group("sampling")
    kinds = {field.name: str(field.type) for field in fields(SamplingParams)}
    for name, help_text in SAMPLING_HELP.items():
        _add(group, name, kinds[name], help_text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; repeat for several"
    )
    group.add_argument(
        "--stop-token-id",
        action="append",
        type=int,
        metavar="ID",
        help="end after this id; repeat for several",
    )
    group.add_argument(
        "--bad-word", action="append", metavar="TEXT", help="never write this; repeat for several"
    )
    group.add_argument(
        "--allowed-token-ids",
        type=parse_ids,
        metavar="1,2,3",
        help="sample no other id",
    )
    group.add_argument(
        "--logit-bias",
        action="append",
        type=parse_bias,
        metavar="ID=X",
        help="add X (-100 to 100) to the id's logit; repeat for several",
    )


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the Config fields that were given."""
    names = (field.name for field in fields(Config))
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Return the SamplingParams that the flags ask for; ValueError for what no sampler can do."""
    given = {name: getattr(arguments, name) for name in SAMPLING_HELP if hasattr(arguments, name)}
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS, **given},
        stop=tuple(arguments.stop or ()),
        stop_token_ids=tuple(arguments.stop_token_id or ()),
        bad_words=tuple(arguments.bad_word or ()),
        allowed_token_ids=arguments.allowed_token_ids,
        logit_bias=dict(arguments.logit_bias or ()),
    )


def _add(group: argparse._ArgumentGroup, name: str, kind: str, help_text: str) -> None:
    flags = ["--" + name.replace("_", "-"), *([SHORT[name]] if name in SHORT else [])]
    settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text}
    if kind == "bool":
        action: Any = "store_true"
        if getattr(Config, name, False):  # on by default: --no-NAME switches it off
            action = argparse.BooleanOptionalAction
        group.add_argument(*flags, action=action, **settings)
        return
    convert: Any = {"int": int, "float": float, "str": str}[kind.split(" |")[0]]
    if name in COUNTS:
        convert = _count
    by_kind = {"int": "N", "float": "X", "str": "NAME"}[kind.split(" |")[0]]
    metavar = METAVARS.get(name, by_kind)
    if name in OPTIONAL:
        settings |= {"nargs": "?", "const": OPTIONAL[name]}
    group.add_argument(*flags, type=convert, metavar=metavar, **settings)


def _count(text: str) -> int:
    """parse_count with argparse's error, so that the line names the flag."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_bias(text: str) -> tuple[int, float]:
    """Return the id and the bias of "17=-100"; argparse's error otherwise."""
    try:
        token_id, bias = text.split("=")
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no bias; write ID=X, as 17=-100") from None


def parse_ids(text: str) -> list[int]:
    """Return the token ids of "1,2,3"; argparse's error otherwise."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ids; write 1,2,3") from None
