"""A model's name means one thing, and what is not there is refused with the way out.

The hub is a real HTTP server on this machine that answers as the hub does; no network is used.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from nanorunner.model_source import resolve_model
from nanorunner.presets import load_preset, preset_names

REPOSITORY = Path(__file__).parents[2]
CHILD_TIMEOUT_S = 200.0
COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files of a model, whose weights nobody reads here."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer.json").write_text("{}")
    source = resolve_model(str(folder))
    assert source.folder == str(folder)
    assert source.name == "tiny-model"
    assert source.config_json == {"model_type": "llama"}
    assert source.generation_config == {"eos_token_id": [1, 2]}
    assert source.load_format == "safetensors"
    assert source.has_tokenizer


def test_a_relative_folder_and_a_home_folder_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in ("tiny-model", "./tiny-model/", "~/tiny-model"):
        assert resolve_model(name).folder == str(folder)


def test_dummy_weights_need_a_config_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    source = resolve_model(str(folder), "dummy")
    assert source.load_format == "dummy"
    assert not source.has_tokenizer


def test_a_preset_is_a_shape_for_dummy_weights() -> None:
    name = preset_names()[0]
    source = resolve_model(name, "dummy")
    assert (source.folder, source.load_format, source.has_tokenizer) == ("", "dummy", False)
    assert source.config_json == load_preset(name)


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_a_preset_without_dummy_weights_is_refused(load_format: str) -> None:
    with pytest.raises(ValueError, match="--load-format dummy"):
        resolve_model(preset_names()[0], load_format)


@pytest.mark.parametrize(
    "name",
    ["/no/such/folder", "./nothing", "../nothing", "~/nothing", "models/", "a/b/c", "a/b.gguf"],
)
def test_a_path_that_is_not_there_is_never_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        resolve_model(name)


def test_a_name_that_is_nothing_gets_the_closest_preset() -> None:
    name = preset_names()[0]
    with pytest.raises(ValueError, match=f"did you mean {name}"):
        resolve_model(f"{name}x")


def test_a_file_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="is a file"):
        resolve_model(str(folder / "model.safetensors"))


@pytest.mark.parametrize("load_format", ["gguf", "DUMMY", ""])
def test_an_unknown_load_format_is_refused(load_format: str) -> None:
    with pytest.raises(ValueError, match="use auto, safetensors or dummy"):
        resolve_model("", load_format)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no .safetensors file; fetch"),
        ({"pytorch_model.bin": ""}, r"only pickled PyTorch weights \(pytorch_model.bin\)"),
        ({"model.Q4_1.gguf": ""}, r"only GGUF \(model.Q4_1.gguf\)"),
        ({"model.safetensors.index.json": "{}"}, "no weight_map"),
        ({"model.safetensors.index.json": "{"}, "cannot read .*index.json"),
        (
            {
                "model.safetensors.index.json": '{"weight_map": {"a": "x.safetensors", "b": "y"}}',
                "x.safetensors": "",
            },
            "lacks 1 of the files that .*: y;",
        ),
        ({"config.json": None}, "no config.json: it is not a Hugging Face model folder"),
        ({"config.json": "[1]"}, "holds a list"),
        ({"config.json": "not json"}, "cannot read .*config.json"),
        ({"config.json": b"\xff\xfe"}, "cannot read .*config.json"),
    ],
)
def test_a_folder_with_something_missing_is_refused_by_name(
    folder: Path, files: dict[str, str | bytes | None], words: str
) -> None:
    (folder / "model.safetensors").unlink()
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words):
        resolve_model(str(folder))


class HubHandler(http.server.BaseHTTPRequestHandler):
    """The few answers of the hub that a download needs, for acme/tiny, acme/odd and acme/gated."""

    files: ClassVar[dict[str, bytes]] = {
        "config.json": json.dumps(load_preset("tiny-llama")).encode(),
        "model.safetensors": b"weights",
        "consolidated.safetensors": b"the same weights again",
        "pytorch_model.bin": b"a pickle",
        "modeling_tiny.py": b"raise SystemExit('code from a checkpoint ran')",
        "onnx/model.safetensors": b"another layout",
        "tokenizer.json": b"{}",
    }

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def answer(self, send_body: bool) -> None:
        path = self.path.split("?")[0].strip("/")
        headers = {"X-Repo-Commit": COMMIT}
        status, body = 200, b""
        if "acme/gated" in path:
            status, headers = 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}
        elif "acme/tiny" not in path and "acme/odd" not in path:
            status, headers = 401, {"X-Error-Code": "RepoNotFound"}
        elif "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": f"{index:040d}"}
                for index, (name, content) in enumerate(self.files.items())
            ]
            body = json.dumps(entries).encode()
        elif path.startswith("api/"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}
            body = json.dumps(info).encode()
        else:
            name = path.split(f"resolve/{COMMIT}/")[-1]
            body = self.files[name]
            if "acme/odd" in path and name == "config.json":
                body = b'{"architectures": ["OddForCausalLM"], "model_type": "odd"}'
            headers["ETag"] = f'"{name}"'
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    """Run a hub and return its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(CHILD_TIMEOUT_S)
    server.server_close()


def resolve_in_child(
    model: str, hub: str, home: Path, load_format: str = "auto", **more: str
) -> dict[str, str]:
    """Resolve in a process of its own, since the hub's address is read on import."""
    code = (
        "import json, sys, traceback; from nanorunner.model_source import resolve_model\n"
        "try: print(json.dumps({'folder': resolve_model(*sys.argv[1:]).folder}))\n"
        "except ValueError as error:\n"
        "    print(json.dumps({'error': str(error), 'shown': traceback.format_exc()}))\n"
    )
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}
    for what in ("ETAG", "DOWNLOAD"):  # the hub is a thread of ours, which may get no core
        environment[f"HF_HUB_{what}_TIMEOUT"] = str(int(CHILD_TIMEOUT_S))
    child = subprocess.run(
        [sys.executable, "-c", code, model, load_format],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=True,
    )
    answer: dict[str, str] = json.loads(child.stdout)
    return answer


def test_a_hub_id_fetches_weights_configs_and_tokenizer_and_no_code(
    hub: str, tmp_path: Path
) -> None:
    answer = resolve_in_child("acme/tiny", hub, tmp_path)
    found = sorted(path.name for path in Path(answer["folder"]).rglob("*"))
    assert found == ["config.json", "model.safetensors", "tokenizer.json"]

    # Once fetched it is found again without the network.
    again = resolve_in_child("acme/tiny", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert again == answer


def test_dummy_weights_fetch_no_weights(hub: str, tmp_path: Path) -> None:
    answer = resolve_in_child("acme/tiny", hub, tmp_path, "dummy")
    found = sorted(path.name for path in Path(answer["folder"]).rglob("*"))
    assert found == ["config.json", "tokenizer.json"]


def test_a_model_that_cannot_run_is_refused_before_its_weights_are_fetched(
    hub: str, tmp_path: Path
) -> None:
    assert "OddForCausalLM" in resolve_in_child("acme/odd", hub, tmp_path)["error"]
    assert not list(tmp_path.rglob("*.safetensors"))


def error_alone(answer: dict[str, str]) -> str:
    """Return the error's words; no other error is shown with it."""
    assert answer["shown"].count("Traceback") == 1
    return answer["error"]


def test_the_hubs_refusals_are_named(hub: str, tmp_path: Path) -> None:
    assert "no such model" in error_alone(resolve_in_child("acme/nothing", hub, tmp_path))
    gated = error_alone(resolve_in_child("acme/gated", hub, tmp_path))
    assert "gated: accept its licence" in gated


def test_a_download_that_fails_says_why(hub: str, tmp_path: Path) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    error = error_alone(resolve_in_child("acme/tiny", hub, no_folder))
    assert "the download failed" in error
    assert str(no_folder) in error


def test_without_a_network_the_error_says_so(tmp_path: Path) -> None:
    with socket.socket() as unheard:  # bound, so that nobody else is there, but it does not listen
        unheard.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        refused = error_alone(resolve_in_child("acme/tiny", nowhere, tmp_path))
        offline = resolve_in_child("acme/tiny", nowhere, tmp_path, HF_HUB_OFFLINE="1")
    assert re.search(r"cannot be reached \(.*Connection refused", refused)
    assert "unset HF_HUB_OFFLINE" in error_alone(offline)
