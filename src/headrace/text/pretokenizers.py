"""Pre-tokenizers of byte-level BPE: the regular expressions that cut a text into words before any merge.

A GGUF file names its pre-tokenizer in `tokenizer.ggml.pre`; the names are those of llama.cpp. Each pre-tokenizer is
a sequence of patterns: every one cuts the pieces left by the one before, what it matches and what lies between
become pieces. The syntax is that of Oniguruma, which the library `tokenizers` uses.
Invariant: each family is compared with llama.cpp in the tests. Does not know the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.errors import UnsupportedModelError


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut.

    Attributes:
        patterns: applied in turn.
        ignores_merges: a word that is a token as a whole becomes that token, whatever the merges say.
        adds_bos: a text starts with the BOS token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_CONTRACTION: Final = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"  # spelled out: (?i) would also match ſ and K (kelvin)
_GPT2: Final = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(letters: str, digits: str, *, other: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*", breaks: str = r"\s*[\r\n]+") -> str:
    """Contractions, words with one leading mark, digits, runs of other marks, line breaks, spaces."""
    return rf"{_CONTRACTION}|{letters}|{digits}|{other}|{breaks}|\s+(?!\S)|\s+"


def _cased_words(contraction: str, digits: str) -> str:
    """Words that end where small letters are followed by capitals.

    Only ASCII letters have a case here, as in llama.cpp; the patterns in the models' own files tell the case of all
    letters and let marks continue a word.
    """
    capitals, smalls = r"[[\p{L}]&&[^a-z]]", r"[[\p{L}]&&[^A-Z]]"
    mark = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{mark}{capitals}*{smalls}+{contraction}|{mark}{capitals}+{smalls}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3: Final = _words(_LETTERS, r"\p{N}{1,3}")
_QWEN2: Final = _words(_LETTERS, r"\p{N}")
_QWEN35: Final = _words(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", other=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_BLOOM: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3: Final = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

FAMILIES: Final[tuple[tuple[str, PreTokenizer], ...]] = (
    (
        "gpt-2 phi-2 mpt olmo jais trillion gigachat mellum modern-bert exaone4 a.x-4.0 granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b", PreTokenizer((r"\p{N}", _GPT2))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen kormo stablelm2 megrez hunyuan grok-2 solar-open", PreTokenizer((_QWEN2,))),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("default", PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("tekken", PreTokenizer((_cased_words("", r"\p{N}"),), ignores_merges=True, adds_bos=True)),
    ("gpt-4o llama4", PreTokenizer((_cased_words(f"(?:{_CONTRACTION})?", r"\p{N}{1,3}"),))),
    ("deepseek-v3 hunyuan-dense", PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("seed-coder", PreTokenizer((_words(_LETTERS, r"\p{N}", other=r" ?[^\s\p{L}\p{N}\r\n]+"),))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_words(_LETTERS, r"\p{N}", breaks=r"\s*[\r\n]"),))),
)
"""Names that GGUF files use, with what they stand for; the first name of each stands for its family in tests."""

_BY_NAME: Final = {name: rules for names, rules in FAMILIES for name in names.split()}
NAMES: Final = tuple(sorted(_BY_NAME))
"""All names that `pre_tokenizer` knows."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of this name.

    Raises:
        UnsupportedModelError: the name is not known here.
    """
    if name not in _BY_NAME:
        raise UnsupportedModelError(f"the pre-tokenizer {name!r} is not supported: use a model with one of {', '.join(NAMES)}")
    return _BY_NAME[name]
