"""The name of the code changes with whatever decides a result, and with nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nanorunner.bench import code_version


def test_the_digest_holds_code_and_shapes_but_no_sweep(tmp_path: Path) -> None:
    files = [tmp_path / "a.py", tmp_path / "configs" / "kernels" / "gpu.yaml"]
    sweep = tmp_path / "configs" / "sweeps" / "smoke.yaml"
    for path in (*files, sweep):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    digests = [code_version.source_digest(tmp_path)]
    for path in files:
        path.write_text("2")
        digests.append(code_version.source_digest(tmp_path))
    assert len(set(digests)) == 3
    sweep.write_text("2")
    (tmp_path / "notes.txt").write_text("2")
    assert code_version.source_digest(tmp_path) == digests[-1]


def test_a_file_that_git_does_not_know_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NANORUNNER_COMMIT", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # whoever runs this may sign commits
    monkeypatch.setattr(code_version, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("1")
    name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "a.py"], [*name, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=200)
    (tmp_path / "notes.txt").write_text("1")
    commit = code_version.git_commit()
    assert commit is not None
    assert len(commit) == 12
    (tmp_path / "a.py").write_text("2")
    assert code_version.git_commit() == f"{commit}+changes"
