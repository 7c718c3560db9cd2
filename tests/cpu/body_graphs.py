"""A v2 runner on a CPU whose decodes go through its graphs' bodies, as on a GPU, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nanorunner.config import make_config
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.resolve import resolve
from nanorunner.workers.cuda_graphs import LOGITS, PLAIN, Descriptor, GraphManager
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import NewRequest, StepInput, StepOutput
from nanorunner.workers.model_runner import ModelRunner


class BodyGraphs(GraphManager):
    """Serves every decode by running its body at once."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner.config.max_num_seqs, is_enabled=True)
        self.replayed: list[Descriptor] = []
        self._body = runner.decode_body

    def dispatch(
        self, num_reqs: int, *, is_decode: bool, is_plain: bool, **kind: Any
    ) -> Descriptor | None:
        """Return a graph as large as the batch for every decode."""
        family = PLAIN if is_plain else LOGITS
        return Descriptor(num_reqs, family, **kind) if is_decode else None

    @property
    def num_replays(self) -> int:
        """How often replay() was called."""
        return len(self.replayed)

    @torch.inference_mode()
    def replay(self, descriptor: Descriptor) -> torch.Tensor:
        """Run the body."""
        self.replayed.append(descriptor)
        return self._body(descriptor)


class Steps:
    """A v2 runner and the number of its next step."""

    def __init__(self, *, has_graphs: bool, on: str = "cpu", **changes: Any) -> None:
        """has_graphs: BodyGraphs serve its decodes. changes: of the settings."""
        settings = {"load_format": "dummy", "device": on, "dtype": "float32", "num_blocks": 8}
        settings |= {"model": "tiny-qwen3", "runner": "v2", "skip_tokenizer_init": True}
        config = resolve(make_config(settings | changes)).runner_config
        device = Device(on, 0)
        group = Group(None, 0, 1, device.torch_device, timeout_s=10)
        self.runner = ModelRunner(config, 0, group, device)
        self.runner.load_model()
        self.runner.allocate_kv(8)
        self.runner.capture()
        if has_graphs:
            self.runner.graphs = BodyGraphs(self.runner)
        self._number = 0

    def run(
        self,
        *batch: tuple[int, int],
        new: tuple[NewRequest, ...] = (),
        removed: tuple[int, ...] = (),
    ) -> StepOutput:
        """Run one step of (request id, tokens) pairs and return its output."""
        gone = np.array(removed, np.int32).tobytes()
        pairs = np.array(batch, np.int32).tobytes()
        self._number += 1
        handle = self.runner.step(StepInput(self._number, gone, new, (), pairs, b"").to_wire())
        assert handle is not None, "rank 0 always gets a handle"
        return handle.result()

    def listen(self, monkeypatch: pytest.MonkeyPatch) -> list[AttentionBatch]:
        """Return, growing with each forward, what attention is told of the step."""
        heard: list[AttentionBatch] = []
        forward = self.runner.model.forward

        def listen(ids: Any, positions: Any, batch: AttentionBatch, *caches: Any) -> Any:
            heard.append(batch)
            return forward(ids, positions, batch, *caches)

        monkeypatch.setattr(self.runner.model, "forward", listen)
        return heard

    @property
    def num_replays(self) -> int:
        graphs = self.runner.graphs
        return graphs.num_replays if isinstance(graphs, BodyGraphs) else 0


def request(request_id: int, prompt: list[int], sampling: FullSampling) -> NewRequest:
    ids, block = np.array(prompt, np.int32), np.array([request_id], np.int32)
    return NewRequest(request_id, ids.tobytes(), len(prompt), 0, block.tobytes(), sampling)
