"""Write a tiny random Hugging Face model folder of any supported family.

    python scripts/make_toy_model.py /tmp/toy --preset tiny-qwen3 --set vocab_size=517 --tokenizer

The fields are a preset's (configs/models), each of which --set may override.
"""

from __future__ import annotations

import argparse

import yaml

from nanorunner.presets import load_preset, preset_names
from nanorunner.toy_model import make_toy_model
from nanorunner.workers.architectures import parse


def main() -> None:
    """Parse the command line, write the folder and say what it holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where to write; made if it does not exist")
    parser.add_argument("--preset", default="tiny-llama", help=", ".join(preset_names()))
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of config.json; the value is YAML",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", action="store_true", help="add a tokenizer of single bytes")
    parser.add_argument("--max-shard-size", default="5GB", help="50KB makes several shards")
    args = parser.parse_args()
    try:
        fields = load_preset(args.preset)
        for setting in args.set:
            field, separator, value = setting.partition("=")
            if not separator:
                raise ValueError(f"--set {setting}: write FIELD=VALUE")
            fields[field] = yaml.safe_load(value)
        model = parse(fields)
        make_toy_model(
            args.folder,
            fields,
            seed=args.seed,
            has_tokenizer=args.tokenizer,
            max_shard_size=args.max_shard_size,
        )
    except ValueError as error:
        parser.error(str(error))
    print(
        f"{args.folder}: {model.architecture}, {model.num_layers} layers, "
        f"{model.num_heads} query heads, {model.num_kv_heads} KV heads of {model.head_dim}, "
        f"vocabulary {model.vocab_size}"
    )


if __name__ == "__main__":
    main()
