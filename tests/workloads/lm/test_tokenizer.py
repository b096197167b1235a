"""tokenizer.json: the same tokens as Hugging Face's own library, on every text and pattern."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import unicodedata

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


def trained(folder, pattern=None, ignore_merges=False, prefix_space=False, composes=False):
    """A tokenizer of this repository's own text, saved as its library saves it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    if composes:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
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
        {"pattern": GPT4 % "", "composes": True},
    ],
    ids=["gpt2", "prefix", "llama3", "one digit", "qwen"],
)
def test_tokens_are_those_of_hugging_face(tmp_path, options):
    tokenizer = trained(tmp_path, **options)
    all_texts = list(texts(1500))
    size, answers = ours(tmp_path / "tokenizer.json", all_texts)
    assert size == tokenizer.get_vocab_size()
    for text, (tokens, decoded) in zip(all_texts, answers, strict=True):
        assert tokens == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)
        if options.get("composes"):
            text = unicodedata.normalize("NFC", text)
        if not options.get("prefix_space"):
            assert decoded == text.encode(), repr(text)


def characters(known):
    """All characters but halves of pairs, and those that had not been given out."""
    return [chr(point) for point in range(0x110000) if known.category(chr(point)) not in ("Cs", "Cn")]


def composed_texts(points):
    """All characters, alone among others and beside marks; then any of those that change each other."""
    marks = [c for c in points if unicodedata.combining(c)]
    # What decomposes, what it decomposes into, and syllables of Korean with their parts.
    parts = [c for c in points if unicodedata.normalize("NFD", c) != c and not "\uac00" <= c <= "\ud7a3"]
    parts = sorted({c for part in parts for c in part + unicodedata.normalize("NFD", part)})
    parts += [chr(p) for p in (*range(0x1100, 0x115A), *range(0x1161, 0x11A3), *range(0x11A8, 0x11FA))]
    parts += [chr(p) for p in (*range(0xAC00, 0xAC00 + 60), 0xD7A3)]
    for begin in range(0, len(points), 256):
        some = points[begin : begin + 256]
        yield "".join(f"{c}x" for c in some)
        yield "".join(some)
        yield "".join(f"{c}\u0301\u0323" for c in some)
    numbers = random.Random(11)
    for _ in range(5000):
        pools = numbers.choices(
            [parts, marks, points, "e\u0301A\u030a<"], [6, 3, 1, 2], k=numbers.randrange(1, 40)
        )
        yield "".join(numbers.choice(pool) for pool in pools)
    for first in parts:
        yield first + "".join(first + second for second in ("\u0301", "\u0338", "\u3099", "\u093c", "\u11a8"))


def test_texts_are_composed_as_unicode_says(tmp_path):
    trained(tmp_path, composes=True)
    all_texts = list(composed_texts(characters(unicodedata)))
    _, answers = ours(tmp_path / "tokenizer.json", all_texts)
    for text, (_, decoded) in zip(all_texts, answers, strict=True):
        assert decoded.decode() == unicodedata.normalize("NFC", text), ascii(text)


def test_texts_are_composed_as_hugging_face_does(tmp_path):
    """Whose tables are older than Python's: of the characters that both know."""
    tokenizer = trained(tmp_path, composes=True)
    all_texts = list(composed_texts(characters(unicodedata.ucd_3_2_0)))
    _, answers = ours(tmp_path / "tokenizer.json", all_texts)
    for text, (_, decoded) in zip(all_texts, answers, strict=True):
        assert decoded.decode() == tokenizer.normalizer.normalize_str(text), ascii(text)


def test_bytes_that_are_no_utf8_stay_as_they_are(tmp_path):
    trained(tmp_path, composes=True)
    good = "e\u0301".encode()
    broken = [
        b"\xff",
        b"\xc3",
        b"\xcc",
        b"\xed\xa0\x80",
        b"\xc0\x81",
        b"\xe0\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\x81",
    ]
    lines = "".join((good + one + b"\xcc\x81" + one + good).hex() + "\n" for one in broken)
    result = subprocess.run(
        [PROGRAM, tmp_path / "tokenizer.json"], input=lines, capture_output=True, text=True, timeout=60
    )
    texts = [bytes.fromhex(line.split("|")[1]) for line in result.stdout.splitlines()[1:]]
    whole = "\u00e9".encode()
    assert texts == [whole + one + b"\xcc\x81" + one + whole for one in broken]


def test_added_tokens_are_found_before_or_after_the_text_is_composed(tmp_path):
    trained(tmp_path, pattern=GPT4 % "", composes=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    token = tokenizers.AddedToken
    tokenizer.add_tokens([token("e\u0301x", normalized=True), token("a\u030a", normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    some = ["e\u0301x", "\u00e9x", "a\u030a", "\u00e5", "e", "\u0301", "x", " ", "<|end|>", "a\u030ae\u0301x"]
    numbers = random.Random(3)
    all_texts = [*some, *("".join(numbers.choices(some, k=numbers.randrange(2, 9))) for _ in range(500))]
    _, answers = ours(tmp_path / "tokenizer.json", all_texts)
    for text, (tokens, _) in zip(all_texts, answers, strict=True):
        assert tokens == tokenizer.encode(text, add_special_tokens=False).ids, ascii(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda j: j["model"].update(type="WordPiece"), "is a tokenizer of type 'WordPiece', not BPE"),
        (lambda j: j.update(normalizer={"type": "NFKC"}), "changed by the normalizer 'NFKC', not by NFC"),
        (
            lambda j: j.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
            "changed by the normalizer 'Sequence', not by NFC",
        ),
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
