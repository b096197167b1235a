"""tokenizer.json: the same tokens as Hugging Face's own library, on every text and pattern."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = os.environ.get("TOKENIZER_IDS", str(ROOT / "build/release/bin/tokenizer_ids"))
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What words are made of: letters of several scripts, numbers, signs, spaces of all kinds.
WORDS = """the The ing don't WE'LL I'm it's 's 'S 'RE '' ' a b ab Zürich naïve Ελλάδα привет 你好 日本語
한국어 مرحبا 1 12 123 1234 ٣٤ ½ Ⅷ ² _ - -- ... !? ;;; € → 😀 e\u0301"""
SPACES = (" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028", "\u200d")
PIECES = (*WORDS.split(), *SPACES, "<|end|>", "<|x|>")


def texts(count):
    numbers = random.Random(5)
    yield ""
    for piece in PIECES:
        yield piece
        yield " " + piece + " "
    for _ in range(count):
        yield "".join(numbers.choice(PIECES) for _ in range(numbers.randrange(1, 12)))
    yield "x" * 3000 + " " * 500 + "ab" * 2000


def trained(folder, pattern=None, ignore_merges=False, prefix_space=False):
    """A tokenizer of this repository's own text, saved as its library saves it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    if pattern is None:
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=prefix_space)
    else:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [split, byte_level(add_prefix_space=prefix_space, use_regex=False)]
        )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<|end|>", "<|x|>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    pages = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))[:12]]
    tokenizer.train_from_iterator([*pages, " ".join(PIECES) * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def ours(path, all_texts):
    lines = "".join(text.encode().hex() + "\n" for text in all_texts)
    result = subprocess.run([PROGRAM, path], input=lines, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    size, *answers = result.stdout.splitlines()
    parts = [answer.split("|") for answer in answers]
    return int(size), [
        ([int(word) for word in tokens.split()], bytes.fromhex(text)) for tokens, text in parts
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_space": True},
        {"pattern": GPT4 % "{1,3}", "ignore_merges": True},
        {"pattern": GPT4 % ""},
    ],
    ids=["gpt2", "prefix", "llama3", "qwen"],
)
def test_tokens_are_those_of_hugging_face(tmp_path, options):
    tokenizer = trained(tmp_path, **options)
    all_texts = list(texts(1500))
    size, answers = ours(tmp_path / "tokenizer.json", all_texts)
    assert size == tokenizer.get_vocab_size()
    for text, (tokens, decoded) in zip(all_texts, answers, strict=True):
        assert tokens == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)
        if not options.get("prefix_space"):
            assert decoded == text.encode(), repr(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda j: j["model"].update(type="WordPiece"), "is a tokenizer of type 'WordPiece', not BPE"),
        (lambda j: j.update(normalizer={"type": "NFC"}), "changed by the normalizer 'NFC'"),
        (lambda j: j.update(pre_tokenizer={"type": "Whitespace"}), "cut by 'Whitespace', not over bytes"),
        (lambda j: j["model"].update(byte_fallback=True), "byte_fallback is set"),
        (lambda j: j["model"]["merges"].append(["nowhere", "to"]), "is not of the vocabulary"),
        (lambda j: j["model"]["vocab"].update(new=-1), "a token has the number -1"),
        (lambda j: j.pop("model"), "there is no model"),
        (lambda j: j["model"].pop("vocab"), "is no tokenizer.json: key 'vocab' not found"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path, change, says):
    trained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    result = subprocess.run([PROGRAM, path], input="", capture_output=True, text=True, timeout=60)
    assert result.returncode == 65 and "tokenizer.json: " in result.stderr and says in result.stderr
