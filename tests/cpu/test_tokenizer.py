"""The tokenizer of a folder: the ids that the model was trained on, no second BOS, every EOS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_tiny_gguf
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from nanorunner.embedded_model import embedded_model_folder
from nanorunner.gguf_folder import write_folder
from nanorunner.tokenizer import Tokenizer, load_tokenizer

REPOSITORY = Path(__file__).parents[2]

TEXTS = [
    "Hello, world!",
    "1234567890 and 3.14159, $1,234.56, x1y22z333",
    "tabs\t\tand\n\n\nlines   and  spaces ",
    "a  1\n 22   333",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f 12 \ud55c\uad6d\uc5b4",
    "caf\u00e9 e\u0301 na\u00efve \u0661\u0662 \u00b2 \u2167 \u00bd",
    "<|im_start|>user\nhi<|im_end|>",
    "don't I'll we've\r\n\x00\x7f\u200b\ufeff",
    "def f(x):\n    return x ** 2  # 10%",
    "",
]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(embedded_model_folder())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a small model's folder; the test may change it."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_folder(write_tiny_gguf(tmp_path / "tiny.gguf"), folder)
    return folder


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def add_bos_rule(folder: Path) -> None:
    """Make the tokenizer put a BOS before every text, as Llama 3's does."""
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    raw.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(smollm: Tokenizer, text: str) -> None:
    assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text


def test_ids_are_those_of_transformers_own_choice_of_tokenizer(smollm: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(str(embedded_model_folder()))
    for text in TEXTS:
        assert smollm.encode(text) == theirs.encode(text)


def test_known_ids(smollm: Tokenizer) -> None:
    assert smollm.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    # Every digit stands alone, and the spaces before it are one token: transformers' own reading
    # of the GGUF file splits them in two, unlike the tokenizer that SmolLM2 was trained with.
    assert smollm.encode("a   12") == [81, 333, 33, 34]


def test_chat_ids_are_the_template_with_an_open_answer(smollm: Tokenizer) -> None:
    ids = smollm.chat_ids([{"role": "user", "content": "Hi"}])
    assert smollm.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids[0] == smollm.bos_id != ids[1]


def test_special_tokens_are_left_out_of_the_text(smollm: Tokenizer) -> None:
    assert smollm.decode([*smollm.encode("yes"), *smollm.eos_ids]) == "yes"


def test_a_rendered_prompt_gets_no_second_bos(folder: Path) -> None:
    add_bos_rule(folder)
    tokenizer = load_tokenizer(folder)
    plain = tokenizer.encode("hi")
    assert plain[0] == tokenizer.bos_id
    assert tokenizer.encode("<|im_start|>hi") == plain
    assert tokenizer.encode("hi", add_special_tokens=False) == plain[1:]
    text = tokenizer.chat_text([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(text) == tokenizer.chat_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(5, 9, {2, 5}), ([5, 6], 9, {2, 5, 6}), (None, [7, 8], {2, 7, 8}), (None, None, {2})],
)
def test_eos_is_the_union_of_tokenizer_and_generation_config(
    folder: Path, generation: object, config: object, expected: set[int]
) -> None:
    change(folder / "generation_config.json", eos_token_id=generation)
    change(folder / "config.json", eos_token_id=config)
    assert load_tokenizer(folder).eos_ids == expected


def test_a_model_without_a_template_cannot_chat(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=None)
    tokenizer = load_tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat_ids([{"role": "user", "content": "hi"}])


def test_a_template_in_a_file_of_its_own_is_read(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert load_tokenizer(folder).chat_text([{"role": "user", "content": "hi"}]) == "hi!"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only user may speak') }}",
        "{{ messages[0].x.y }}",
        "{% if %}",
        "{{ 1 + '' }}",
    ],
)
def test_a_template_that_refuses_is_one_clear_error(folder: Path, template: str) -> None:
    change(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ValueError, match="chat template refuses"):
        load_tokenizer(folder).chat_ids([{"role": "user", "content": "hi"}])


def test_a_template_cannot_reach_out_of_its_sandbox(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="unsafe"):
        load_tokenizer(folder).chat_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], ["hi"], [{"content": "hi"}]])
def test_messages_without_role_or_content_are_refused(
    smollm: Tokenizer, messages: list[Any]
) -> None:
    with pytest.raises(ValueError, match="'role': 'user'"):
        smollm.chat_ids(messages)


def test_a_damaged_tokenizer_is_refused_by_name(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read a tokenizer from .*model"):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read a tokenizer from"):
        load_tokenizer(tmp_path)


def test_loading_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from nanorunner.tokenizer import load_tokenizer\n"
        "load_tokenizer(sys.argv[1]).chat_ids([{'role': 'user', 'content': 'hi'}])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=REPOSITORY, timeout=280, check=True
    )


@pytest.mark.parametrize("text", ["\ud83d cut", "caf\udce9"])
def test_half_a_character_is_refused_in_words(smollm: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError, match=r"half a character \(U\+D[0-9A-F]{3}\)"):
        smollm.encode(text)
