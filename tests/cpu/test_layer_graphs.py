"""A step by its layers' graphs is the decoder's forward, whatever stands behind its tokens.

Without a GPU: a graph's replay is here a call of what would have been captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from body_graphs import Steps, request

from nanorunner.workers import layer_graphs
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.layer_graphs import LayerGraphs, sizes_of

pytestmark = pytest.mark.beside


class Part:
    """What is captured between two attentions; replay() calls it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    @torch.inference_mode()
    def replay(self) -> None:
        self._call()


class Parts(LayerGraphs):
    """LayerGraphs of a decoder on a CPU."""

    def capture(self) -> None:
        for size in self.sizes:
            parts: list[Any] = [Part(call) for call in self._parts(size)]
            self._graphs[size] = parts

    def poison(self, ids: torch.Tensor) -> None:
        """Let older steps have left NaN in every buffer, and other ids."""
        self.input_ids.copy_(ids)
        for buffer in (self.residual, self.attended, self.qkv, self.hidden):
            buffer.fill_(float("nan"))


def add_layers(steps: Steps) -> Parts:
    layers = Parts(steps.runner.model, steps.runner.inputs.all_ids, 1.0)
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
    eight, small = decoder_of(4096, 12288, 1024), decoder_of(1024, 3072, 1024)
    assert sizes_of(eight, 8192, 1.0) == list(range(32, 1025, 32))
    assert sizes_of(small, 8192, 1.0) == list(range(128, 2049, 128))
    assert sizes_of(decoder_of(8192, 28672, 1024), 8192, 1.0) == list(range(32, 225, 32))
    assert sizes_of(eight, 8192, 0.1) == [32, 64, 96], "a GPU of a tenth of the arithmetic"
    assert sizes_of(small, 8192, 0.1)[:3] == [32, 64, 96]


def test_the_longest_step_has_a_size_of_its_own_where_it_is_worth_one() -> None:
    eight = decoder_of(4096, 12288, 1024)
    assert sizes_of(eight, 100, 1.0) == [32, 64, 96, 100]
    assert sizes_of(eight, 96, 1.0) == [32, 64, 96]
    assert sizes_of(eight, 20, 1.0) == [20]
    assert sizes_of(eight, 1030, 1.0)[-1] == 1024
    assert sizes_of(decoder_of(1024, 3072, 1024), 1000, 1.0)[-2:] == [896, 1000]


@pytest.mark.parametrize(
    ("capability", "processors", "dtype", "speed"),
    [
        ((9, 0), 132, torch.bfloat16, 1.0),
        ((9, 0), 66, torch.float16, 0.5),
        ((9, 0), 132, torch.float32, 0.1),
        ((8, 0), 108, torch.bfloat16, 0.4 * 108 / 132),
        ((8, 9), 128, torch.bfloat16, 0.17 * 128 / 132),
    ],
)
def test_a_gpus_speed_follows_from_its_processors(
    capability: tuple[int, int],
    processors: int,
    dtype: torch.dtype,
    speed: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(layer_graphs, "num_processors", lambda device: processors)
    assert layer_graphs.relative_speed(torch.device("cuda"), dtype) == pytest.approx(speed)


class Gpu:
    """What capture() asks of torch.cuda, noted; nothing is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        calls = self.calls

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                calls.append(f"begin in {pool}")

            def capture_end(self) -> None:
                calls.append("end")

        stream = SimpleNamespace(wait_stream=lambda other: calls.append("wait"))
        fakes: dict[str, Any] = {
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: "a pool",
            "Stream": lambda device: stream,
            "stream": lambda stream: nullcontext(),
            "current_stream": lambda device: stream,
            "synchronize": lambda device: calls.append("synchronize"),
            "empty_cache": lambda: calls.append("empty_cache"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_every_part_of_every_size_is_captured_in_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    layer_graphs._capture_stream.cache_clear()
    model = Steps(has_graphs=False).runner.model
    layers = LayerGraphs(model, torch.zeros(200, dtype=torch.int64), 1.0)
    layers.capture()
    layer_graphs._capture_stream.cache_clear()
    num_graphs = 2 * (len(model.layers) + 1)  # 128 and 200 tokens
    assert gpu.calls == ["wait", *["begin in a pool", "end"] * num_graphs, *gpu.calls[-2:]]
    assert gpu.calls[-2:] == ["synchronize", "empty_cache"]
    assert [layers.size_for(n) for n in (1, 128, 129, 200, 201)] == [128, 128, 200, 200, None]


def test_a_capture_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else PyTorch's allocator would take the next engine's memory for a graph's."""
    gpu = Gpu(monkeypatch)

    def fail() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        layer_graphs._capture(fail, None)
    assert gpu.calls == ["begin in None", "end"]


@pytest.mark.parametrize(
    ("num_tokens", "settings"),
    [
        *((num_tokens, {}) for num_tokens in (2, 127, 128, 129, 250)),
        (100, {"model": "tiny-qwen2"}),  # a bias
        (100, {"model": "tiny-llama"}),
        (100, {"batch_invariant": True}),
        (100, {"dtype": "bfloat16"}),
    ],
    ids=str,
)
@torch.inference_mode()
def test_hidden_states_and_kv_equal_the_decoders(
    num_tokens: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other = (Steps(has_graphs=False, **settings) for _ in range(2))
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
    near = 3e-2 if "dtype" in settings else 0.0 if "batch_invariant" in settings else 1e-5
    torch.testing.assert_close(heard[1], heard[0], rtol=near, atol=near)
    written, expected = (steps.runner.kv_cache[:, :, 1, :num_tokens] for steps in (other, plain))
    torch.testing.assert_close(written, expected, rtol=near, atol=near)


@pytest.mark.parametrize("pooling", ["", "last", "mean"])
def test_what_is_read_of_all_of_a_prompt_does_not_change(pooling: str) -> None:
    """Log-probabilities of its tokens, or its embedding; of two chunks, a decode in between."""
    heard: list[Any] = []
    for has_layers in (False, True):
        steps = Steps(has_graphs=False)
        if has_layers:
            add_layers(steps)
        sampling = FullSampling(temperature=0.0, prompt_logprobs=-1 if pooling else 2)
        new = request(1, [3 * i % 50 for i in range(90)], sampling)._replace(pooling=pooling)
        other = request(2, [4, 5], FullSampling(temperature=0.0))
        outputs = [
            steps.run((1, 60), new=(new,)),
            steps.run((2, 2), new=(other,)),
            steps.run((2, 1), (1, 30)),
        ]
        heard.append([output.extras for output in outputs])
        names = steps.runner.graphs.dispatched
        assert any(name.startswith("layers") for name in names) == has_layers
    plain, captured = heard
    assert any(extras for extras in plain), "it has been read"
    assert repr(captured) == repr(plain)


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
