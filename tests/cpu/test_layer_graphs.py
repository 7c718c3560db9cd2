"""A step by its layers' graphs is the decoder's forward, whatever stands behind its tokens.

Without a GPU: a graph's replay is here a call of what would have been captured.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from body_graphs import Steps, request

from nanorunner.workers.cuda_graphs import GraphManager
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.layer_graphs import LayerGraphs, sizes_of

pytestmark = pytest.mark.beside


class Part:
    """What is captured between two attentions; replay() calls it."""

    def __init__(self, owner: Parts, size: int, call: Callable[[], torch.Tensor | None]) -> None:
        self.owner, self.size, self.call = owner, size, call

    @torch.inference_mode()
    def replay(self) -> None:
        hidden = self.call()
        if hidden is not None:
            self.owner._hidden[self.size] = hidden


class Parts(LayerGraphs):
    """LayerGraphs of a decoder on a CPU."""

    def capture(self) -> None:
        for size in self.sizes:
            parts: list[Any] = [Part(self, size, call) for call in self._parts(size)]
            self._graphs[size] = parts

    def poison(self, ids: torch.Tensor) -> None:
        """Let older steps have left NaN in every buffer, and other ids."""
        self.input_ids.copy_(ids)
        for buffer in (self.residual, self.attended, self.qkv):
            buffer.fill_(float("nan"))


def add_layers(steps: Steps) -> Parts:
    layers = Parts(steps.runner.model, steps.runner.inputs.all_ids)
    layers.capture()
    steps.runner.graphs.layers = layers
    return layers


def decoder_of(hidden: int, intermediate: int, kv_width: int) -> Any:
    """Return the weights of one layer of a decoder, of no memory."""
    shapes = {
        "qkv": (hidden + 2 * kv_width, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    layer = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return SimpleNamespace(layers=[SimpleNamespace(**layer)])


def test_large_models_have_close_sizes_and_only_short_ones() -> None:
    """What padding costs, and up to where the host is slower, follows from the arithmetic."""
    assert sizes_of(decoder_of(4096, 12288, 1024), 8192) == list(range(32, 1025, 32))
    assert sizes_of(decoder_of(1024, 3072, 1024), 8192) == list(range(128, 2049, 128))
    assert sizes_of(decoder_of(8192, 28672, 1024), 8192) == list(range(32, 225, 32))
    assert sizes_of(decoder_of(4096, 12288, 1024), 100) == [32, 64, 96]
    assert sizes_of(decoder_of(4096, 12288, 1024), 20) == []


def test_steps_too_short_for_any_size_have_no_graphs() -> None:
    model = Steps(has_graphs=False).runner.model
    tiny = LayerGraphs(model, torch.zeros(20, dtype=torch.int64))
    tiny.capture()
    assert tiny.size_for(10) is None


@pytest.mark.parametrize("num_tokens", [2, 127, 128, 129, 250])
@torch.inference_mode()
def test_hidden_states_and_kv_equal_the_decoders(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other = Steps(has_graphs=False), Steps(has_graphs=False)
    layers = add_layers(other)
    generator = torch.Generator().manual_seed(num_tokens)
    vocab = plain.runner.config.model.vocab_size
    layers.poison(torch.randint(vocab, layers.input_ids.shape, generator=generator))
    prompt = torch.randint(vocab, (num_tokens,), generator=generator).tolist()
    heard: list[list[torch.Tensor]] = []
    for steps in (plain, other):
        hidden: list[torch.Tensor] = []
        logits = steps.runner.model.compute_logits

        def listen(x: torch.Tensor, hidden: Any = hidden, logits: Any = logits) -> torch.Tensor:
            hidden.append(x.clone())
            result: torch.Tensor = logits(x)
            return result

        monkeypatch.setattr(steps.runner.model, "compute_logits", listen)
        steps.run((1, num_tokens), new=(request(1, prompt, FullSampling()),))
        heard.append(hidden)
    size = layers.size_for(num_tokens)
    assert other.runner.graphs.dispatched == {f"layers {size}": 1}
    torch.testing.assert_close(heard[1], heard[0], rtol=1e-5, atol=1e-5)
    written, expected = (steps.runner.kv_cache[:, :, 1, :num_tokens] for steps in (other, plain))
    torch.testing.assert_close(written, expected, rtol=1e-5, atol=1e-5)


def test_ids_of_prompts_that_join_decodes_do_not_change() -> None:
    """Prompts of all lengths join, one after the other, greedy ones and drawn ones."""
    heard = []
    for has_layers in (False, True):
        steps = Steps(has_graphs=True)
        if has_layers:
            layers = add_layers(steps)
            layers.poison(torch.full_like(layers.input_ids, 7))
        outputs = []
        batch: list[tuple[int, int]] = []
        for index, length in enumerate((30, 100, 1, 140, 7)):
            sampling = FullSampling(temperature=0.8 * (index % 2), seed=index)
            new = request(index, [(index + 3 * i) % 50 for i in range(length)], sampling)
            joined = steps.run(*batch, (index, length), new=(new,))
            batch.append((index, 1))
            outputs += [joined.token_ids.tolist(), steps.run(*batch).token_ids.tolist()]
        heard.append(outputs)
        counts = steps.runner.graphs.dispatched
        is_layers = [name.startswith("layers") for name in counts.elements()]
        assert sum(is_layers) == (4 if has_layers else 0), counts
    assert heard[1] == heard[0]


def test_graphs_that_were_given_up_serve_nothing() -> None:
    manager = GraphManager(4, is_enabled=False)
    assert manager.layers is None
    assert manager.dispatch_layers(10, 10) is None
