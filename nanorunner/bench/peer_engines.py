"""Other engines behind one function: requests in, what the caller saw of each out.

    vllm   its LLMEngine, stepped by the same driver as ours (driver.py), which stamps the ids
    hf     transformers' generate: static batches of up to max_num_seqs prompts, padded on the left;
           a batch runs until its longest output is done, as that is how generate is used

Each is imported when it is opened. Greedy or with temperature, top-k and top-p, and nothing else
(sides.check_peer_sampling); a peer's random numbers are its own, so only greedy ids can be
compared.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanorunner.bench.arrivals import Arrivals, all_at_once
from nanorunner.bench.driver import NAP_S, Clock, PassRecord, Request, run_pass
from nanorunner.bench.metrics import RequestRecord
from nanorunner.request import RequestUpdate
from nanorunner.resolve import Resolved
from nanorunner.sampling_params import SamplingParams

Serve = Callable[[Sequence[Request], float], PassRecord]  # (requests, time limit in seconds)


@contextmanager
def open_peer(name: str, resolved: Resolved, max_model_len: int) -> Iterator[tuple[Serve, str]]:
    """Yield a peer's serve() and its name with its version; ValueError for what it cannot do."""
    with model_folder(resolved) as folder:
        if name == "vllm":
            vllm: Any = importlib.import_module("vllm")  # typed here: few machines have it
            engine = VllmEngine(vllm.LLM(**vllm_settings(resolved, folder, max_model_len)), vllm)

            def serve(requests: Sequence[Request], time_limit_s: float) -> PassRecord:
                arrivals = all_at_once(len(requests))
                return run_pass(engine, requests, arrivals, Clock(0.0), time_limit_s)

            yield serve, f"vllm {vllm.__version__}"
        else:
            yield HfEngine(resolved, folder).serve, f"transformers {version('transformers')}"


@contextmanager
def model_folder(resolved: Resolved) -> Iterator[str]:
    """Yield a Hugging Face folder of the model: a preset's has a config and no weights."""
    if resolved.source.folder:
        yield resolved.source.folder
        return
    with tempfile.TemporaryDirectory(prefix="nanorunner-peer-") as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(resolved.source.config_json), encoding="utf-8")
        yield folder


def vllm_settings(resolved: Resolved, folder: str, max_model_len: int) -> dict[str, Any]:
    """Return vLLM's arguments that mean the same as our settings."""
    from nanorunner.workers.cuda_graphs import capture_sizes

    config = resolved.config
    settings: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy" if config.load_format == "dummy" else "safetensors",
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tp,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": config.prefix_cache,
        "enforce_eager": config.enforce_eager,
        "seed": config.seed,
    }
    if not config.enforce_eager:
        sizes = capture_sizes(config.max_num_seqs)
        settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return settings


class VllmEngine:
    """vLLM's engine with the methods that driver.py needs.

    llm: a vllm.LLM; vllm: the package, whose SamplingParams a request gets.
    """

    def __init__(self, llm: Any, vllm: Any) -> None:
        self._engine = llm.llm_engine
        self._make_params = vllm.SamplingParams
        # of each update only the new ids, as our engine gives them
        self._delta = vllm.sampling_params.RequestOutputKind.DELTA
        self._next_id = 0
        self._unfinished: set[str] = set()

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request and return its id."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        theirs = self._make_params(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            # none of a request's own: its sampler has a slower way for rows that have one, and its
            # random numbers are others than ours anyway
            seed=None,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            detokenize=False,
            output_kind=self._delta,
        )
        self._engine.add_request(str(request_id), {"prompt_token_ids": list(prompt_ids)}, theirs)
        self._unfinished.add(str(request_id))
        return request_id

    def step(self) -> list[RequestUpdate]:
        """Run a step and return what it brought."""
        updates = []
        for output in self._engine.step():
            (completion,) = output.outputs
            reason = completion.finish_reason if output.finished else None
            updates.append(
                RequestUpdate(int(output.request_id), list(completion.token_ids), reason)
            )
            if output.finished:
                self._unfinished.discard(output.request_id)
        return updates

    def has_unfinished(self) -> bool:
        """Whether step() has anything left to do."""
        return bool(self._engine.has_unfinished_requests())

    def abort_all(self) -> None:
        """End every request."""
        self._engine.abort_request(sorted(self._unfinished))
        self._unfinished.clear()


class PunctualVllm(VllmEngine):
    """vLLM's engine that gets each request when it is due, as its own server would give it.

    It runs in a process of its own and takes requests at any time; our engine takes them between
    two steps. So step() ends without news once a request is due, where vLLM's would wait on.
    """

    def __init__(self, llm: Any, vllm: Any) -> None:
        super().__init__(llm, vllm)
        # vLLM's: its thread puts there what the engine's process sends, its step() takes it out
        self._outputs = llm.llm_engine.engine_core.outputs_queue
        self._due_s: deque[float] = deque()  # of the pass's requests that are still to come
        self._clock = Clock(0.0)

    def begin_pass(self, arrivals: Arrivals, clock: Clock) -> None:
        """Take the times at which a pass will add its requests; before each pass."""
        self._due_s, self._clock = deque(arrivals.due_s), clock

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue the next request and return its id."""
        self._due_s.popleft()
        return super().add_request(prompt_ids, params)

    def step(self) -> list[RequestUpdate]:
        """Return what came first; nothing when a request is due, or after NAP_S."""
        left_s = self._due_s[0] - self._clock.now() if self._due_s else NAP_S
        arrived = self._outputs.not_empty  # vLLM's thread ends this sleep: nothing spins
        with arrived:
            if not arrived.wait_for(lambda: self._outputs.queue, min(left_s, NAP_S)):
                return []
        return super().step()


class HfEngine:
    """transformers' model and its generate, on one device."""

    def __init__(self, resolved: Resolved, folder: str) -> None:
        import torch
        import transformers

        config = resolved.config
        if config.tp > 1:
            raise ValueError(f"hf: generate runs on one device here; leave out --tp {config.tp}")
        dtype = getattr(torch, config.dtype)
        auto = transformers.AutoModelForCausalLM
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            shape = transformers.AutoConfig.from_pretrained(folder)
            model = auto.from_config(shape, dtype=dtype)
        else:
            model = auto.from_pretrained(folder, dtype=dtype)
        self._model = model.to(config.device).eval()
        # a fresh one: no eos, so that every request runs to its full length, and none of the ways
        # of sampling (penalties, top-p) that a model's own file asks generate() for
        self._model.generation_config = transformers.GenerationConfig()
        self._device = config.device
        self._batch = config.max_num_seqs
        self._torch = torch

    def serve(self, requests: Sequence[Request], time_limit_s: float) -> PassRecord:
        """Serve every request, a batch after the other; TimeoutError after time_limit_s."""
        clock = Clock(0.0)
        records = [RequestRecord(len(request.prompt_ids)) for request in requests]
        for begin in range(0, len(requests), self._batch):
            if clock.now() > time_limit_s:
                raise TimeoutError(f"{begin} of {len(requests)} requests have ended")
            part = slice(begin, begin + self._batch)
            self._generate(requests[part], records[part], clock)
        return PassRecord(records, clock.now(), 0.0)

    def _generate(
        self, requests: Sequence[Request], records: Sequence[RequestRecord], clock: Clock
    ) -> None:
        longest = max(len(request.prompt_ids) for request in requests)
        padding = [longest - len(request.prompt_ids) for request in requests]
        ids = [[0] * pad + r.prompt_ids for pad, r in zip(padding, requests, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        limits = [request.params.max_tokens for request in requests]
        for record in records:
            record.arrival_s, record.handover_s = 0.0, clock.now()
        params = requests[0].params
        sampling: dict[str, Any] = {"do_sample": False}
        if params.temperature > 0:
            sampling = {"do_sample": True, "temperature": params.temperature}
            sampling |= {"top_k": params.top_k, "top_p": params.top_p}
        with self._torch.inference_mode():
            self._model.generate(
                self._torch.tensor(ids, device=self._device),
                attention_mask=self._torch.tensor(mask, device=self._device),
                max_new_tokens=max(limits),
                pad_token_id=0,
                streamer=_Streamer(records, limits, clock),
                **sampling,
            )


class _Streamer:
    """What generate() hands its new ids to; those beyond the length of a request are dropped."""

    def __init__(
        self, records: Sequence[RequestRecord], limits: Sequence[int], clock: Clock
    ) -> None:
        self._records = records
        self._limits = limits
        self._clock = clock
        self._is_prompt = True  # the first call brings the prompts back

    def put(self, value: Any) -> None:
        """Take a step's ids, one a request."""
        if self._is_prompt:
            self._is_prompt = False
            return
        now_s = self._clock.now()
        for record, limit, token in zip(self._records, self._limits, value.tolist(), strict=True):
            if len(record.token_ids) < limit:
                record.token_ids.append(token)
                record.token_times_s.append(now_s)
                if len(record.token_ids) == limit:
                    record.finish_reason = "length"

    def end(self) -> None:
        """Nothing is left to do."""
