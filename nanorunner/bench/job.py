"""What one command measures: a workload, its arrivals, and what a result says of both.

    flags -> a list of (prompt length, output length), or ids, or text -> Job

Text is tokenised here, before the engine starts: a benchmark's numbers leave the tokenizer out.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanorunner.bench import workloads
from nanorunner.bench.arrivals import Arrivals, all_at_once, closed_loop, open_loop, replay
from nanorunner.bench.driver import Request
from nanorunner.bench.prompt_file import PromptLine, read_prompt_file, times_of
from nanorunner.bench.workloads import Workload
from nanorunner.resolve import Resolved
from nanorunner.sampling_params import SamplingParams
from nanorunner.tokenizer import Tokenizer, load_tokenizer

DEFAULT_REQUESTS, DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 200, 512, 128
# Which flags shape which workload; another one would be ignored, so it is refused.
SHAPED_BY = {
    "sharegpt": ("num_requests", "length_scale"),
    "fixed": ("num_requests", "input_len", "output_len"),
    "file": ("num_requests", "output_len"),
    "named": (),
}
SHAPE_FLAGS = ("num_requests", "input_len", "output_len", "length_scale")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A workload with its schedule. largest_id: None when the ids are the user's own."""

    name: str
    source: str
    workload: Workload
    arrivals: Arrivals
    seed: int
    largest_id: int | None

    def requests(self, params: SamplingParams, pass_number: int) -> list[Request]:
        """Return the requests of a pass; another number gives other ids where they are made up.

        Each runs to its full length and draws by a seed of its own, the same in every pass.
        """
        workload = self.workload
        if pass_number and self.largest_id is not None:
            workload = workload.shifted(pass_number, self.largest_id)
        return [
            Request(
                prompt,
                replace(
                    params,
                    max_tokens=output_len,
                    ignore_eos=True,
                    seed=(self.seed + index) % 2**63,
                ),
            )
            for index, (prompt, output_len) in enumerate(zip(*workload, strict=True))
        ]

    def pass_requests(
        self, params: SamplingParams, pass_number: int, *, prefix_cache: bool
    ) -> list[Request]:
        """Return the requests of a pass; with a prefix cache, ids that it has not seen yet."""
        return self.requests(params, pass_number if prefix_cache else 0)

    def describe(self, params: SamplingParams) -> dict[str, Any]:
        """Return a result's "workload"."""
        plain = SamplingParams()
        kept = ("temperature", "top_k", "top_p")  # said whether or not they are changed
        sampling = {
            name: value
            for name, value in vars(params).items()
            if name in kept or value != getattr(plain, name)
        }
        return {
            "name": self.name,
            "source": self.source,
            "seed": self.seed,
            **workloads.describe(self.workload),
            "sampling": sampling,
            "arrivals": self.arrivals.describe(),
        }


def batch_job(resolved: Resolved, batch_size: int, input_len: int, output_len: int) -> Job:
    """Return one batch of equal requests, all at once."""
    lengths = [(input_len, output_len)] * batch_size
    about = f"{batch_size} x {input_len} in, {output_len} out, random ids"
    return _made_up(resolved, "batch", about, lengths, all_at_once(batch_size))


def set_job(args: Namespace, resolved: Resolved) -> Job:
    """Return the job of a whole set, all at once, from the flags of add_workload_flags()."""
    job, _ = _choose(args, resolved)
    return job


def timed_job(args: Namespace, resolved: Resolved) -> Job:
    """Return the job of timed arrivals, from the flags of add_workload_flags() and `load`'s."""
    kind = _arrival_kind(args)
    job, times_s = _choose(args, resolved)
    num_requests = len(job.workload.prompts)
    if kind == "all":
        return job
    if kind == "closed":
        return replace(job, arrivals=closed_loop(num_requests, args.concurrency))
    if kind == "trace":
        return replace(job, arrivals=replay(times_s, args.speed or 1.0))
    burstiness = 1.0 if args.burstiness is None else args.burstiness
    seed = resolved.config.seed
    return replace(job, arrivals=open_loop(kind, num_requests, args.rate, seed, burstiness))


def _arrival_kind(args: Namespace) -> str:
    """Return which arrivals the flags mean; ValueError when they say nothing or two things."""
    needs = {"closed": "concurrency", "trace": "replay"} | dict.fromkeys(
        ("poisson", "constant", "burst"), "rate"
    )
    kind = args.arrivals
    if kind is None and args.replay is not None:
        kind = "trace"
    elif kind is None and args.concurrency is not None:
        kind = "closed"
    elif kind is None and args.rate is not None:
        kind = "poisson" if args.burstiness is None else "burst"
    if kind is None:
        raise ValueError(
            "load: say how requests arrive: --rate 4 (Poisson), --concurrency 8 (closed loop), "
            "--replay FILE, or --arrivals all"
        )
    wanted = {needs[kind]} if kind in needs else set()
    if kind == "burst" and args.burstiness is None:
        raise ValueError("arrivals burst: needs --burstiness, such as 0.5; 1 would be Poisson")
    allowed = wanted | {"burst": {"burstiness"}, "trace": {"speed"}}.get(kind, set())
    for name in ("rate", "concurrency", "replay", "burstiness", "speed"):
        is_given = getattr(args, name) is not None
        if name in wanted and not is_given:
            raise ValueError(f"arrivals {kind}: needs --{name}")
        if is_given and name not in allowed:
            raise ValueError(f"--{name}: means nothing for arrivals {kind}; leave it out")
    return str(kind)


def _choose(args: Namespace, resolved: Resolved) -> tuple[Job, list[float]]:
    """Return the set that the flags mean, all at once, and a trace's times."""
    trace = getattr(args, "replay", None)
    path = args.prompts if trace is None else trace
    if path is not None and (args.workload is not None or (trace and args.prompts)):
        raise ValueError("--workload, --prompts, --replay: give one of them")
    if path is not None:
        _refuse_unused(args, "file")
        return _file_job(args, resolved, str(path), is_trace=trace is not None)
    name = args.workload or ("fixed" if args.input_len is not None else "sharegpt")
    _refuse_unused(args, name if name in SHAPED_BY else "named")
    num_requests = args.num_requests or DEFAULT_REQUESTS
    if name == "sharegpt":
        scale = args.length_scale or 1.0
        about = workloads.SHAREGPT_SOURCE + ("" if scale == 1 else f"; lengths x {scale:g}")
        lengths = workloads.sharegpt_lengths(num_requests, resolved.config.seed, scale)
        return _made_up(resolved, name, about, lengths, all_at_once(num_requests)), []
    if name == "fixed":
        input_len = args.input_len or DEFAULT_INPUT_LEN
        output_len = args.output_len or DEFAULT_OUTPUT_LEN
        return replace(batch_job(resolved, num_requests, input_len, output_len), name=name), []
    vocab_size = resolved.runner_config.model.vocab_size
    workload = workloads.make_workload(name, vocab_size)
    job = Job(
        name=name,
        source="a named load: fixed seeds, random ids",
        workload=workload,
        arrivals=all_at_once(len(workload.prompts)),
        seed=resolved.config.seed,
        largest_id=workloads.largest_id(vocab_size),
    )
    return job, []


def _refuse_unused(args: Namespace, shape: str) -> None:
    for name in SHAPE_FLAGS:
        if getattr(args, name) is not None and name not in SHAPED_BY[shape]:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: means nothing for this workload ({shape}); leave it out")


def _made_up(
    resolved: Resolved,
    name: str,
    source: str,
    lengths: Sequence[tuple[int, int]],
    arrivals: Arrivals,
) -> Job:
    seed = resolved.config.seed
    largest_id = workloads.largest_id(resolved.runner_config.model.vocab_size)
    workload = workloads.of_lengths(lengths, seed, largest_id)
    return Job(
        name=name,
        source=source,
        workload=workload,
        arrivals=arrivals,
        seed=seed,
        largest_id=largest_id,
    )


def _file_job(
    args: Namespace, resolved: Resolved, path: str, *, is_trace: bool
) -> tuple[Job, list[float]]:
    """Return the job of a file's requests and, of a trace, their times."""
    lines = read_prompt_file(path, args.output_len, is_trace=is_trace)
    num_requests = args.num_requests or len(lines)
    if num_requests > len(lines):
        raise ValueError(f"--num-requests {num_requests}: {path} has {len(lines)}")
    lines = lines[:num_requests]
    seed = resolved.config.seed
    largest_id = workloads.largest_id(resolved.runner_config.model.vocab_size)
    lengths = [(line.input_len or 0, line.output_len) for line in lines]
    workload = workloads.of_lengths(lengths, seed, largest_id)
    is_made_up = all(line.input_len is not None for line in lines)
    if not is_made_up:
        tokenizer = _tokenizer(resolved, lines)
        for prompt, line in zip(workload.prompts, lines, strict=True):
            prompt += _ids_of(line, tokenizer)
    job = Job(
        name="trace" if is_trace else "prompts",
        source=path.rpartition("/")[2],
        workload=workload,
        arrivals=all_at_once(num_requests),
        seed=seed,
        largest_id=largest_id if is_made_up else None,
    )
    return job, times_of(lines)


def _tokenizer(resolved: Resolved, lines: Sequence[PromptLine]) -> Tokenizer | None:
    if all(line.text is None for line in lines):
        return None
    if not resolved.source.has_tokenizer:
        raise ValueError(
            f"model {resolved.source.name}: has no tokenizer for the text in the file; give "
            f"prompt_token_ids or input_len"
        )
    return load_tokenizer(resolved.source.folder)


def _ids_of(line: PromptLine, tokenizer: Tokenizer | None) -> list[int]:
    """Return the ids of a line that has text or ids; none of one whose ids are made up already."""
    if line.text is not None and tokenizer is not None:
        return tokenizer.encode(line.text)
    return list(line.token_ids or ())
