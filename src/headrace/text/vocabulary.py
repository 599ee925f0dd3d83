"""The vocabulary of a model: what GGUF metadata says about tokens, checked once and kept in a compact form.

Source of the keys: the GGUF specification, section "Tokenizer" (`tokenizer.ggml.*`). Which texts end a generation
and which look like control tokens follows llama.cpp, since files rely on it.
Does not know how text is split: see `byte_level` and `spm`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import operator
import re
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace.errors import ModelFileError, UnsupportedModelError
from headrace.text.pretokenizers import PreTokenizer, pre_tokenizer

# Token types as GGUF numbers them, kept as one digit per token.
NORMAL: Final = "1"
UNKNOWN: Final = "2"
CONTROL: Final = "3"
USER_DEFINED: Final = "4"
BYTE: Final = "6"
_TYPES: Final = frozenset("0123456")

SPACE: Final = "▁"  # how a SentencePiece vocabulary writes a space
_JSON_FORMAT: Final = 1
_SEPARATORS: Final = "\uffff\ufffe\ufdd0\ufdd1"  # noncharacters: no token of a sane vocabulary holds them all
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")

# Tokens that end a generation whenever a vocabulary has them.
_END_TEXTS: Final = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>", "<turn|>"),
    *("[EOS]", "<eos>", "<|tool_response>", "[e~[", "<|ifm|im_end|>", "<｜end▁of▁sentence｜>"),
    # Padding, repository and file marks of models that fill in code.
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
# Tokens that are control tokens even in files that call them normal or user defined.
_CONTROL_TEXTS: Final = (
    *_END_TEXTS,
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
)


@dataclass(frozen=True)
class Vocabulary:
    """A checked vocabulary of `V` tokens.

    Attributes:
        model: `gpt2` (byte-level BPE with merges) or `llama` (SentencePiece BPE by scores).
        pre: name of the pre-tokenizer; only byte-level BPE has one.
        tokens: text of each token, as the file writes it.
        types: one digit per token, see the constants of this module.
        merges: left and right texts in turn, the most urgent merge first (byte-level BPE).
        scores: one float32 per token (SentencePiece).
        space_followers: characters after which some token holds a space mark inside (SentencePiece).
        bos_id, eos_id, unknown_id: special tokens, where the model has them.
        end_ids: all tokens that end a generation.
        adds_bos: whether a text starts with the BOS token.
        adds_space_prefix: whether a text starts with a space of its own (SentencePiece).
    """

    model: str
    pre: str
    tokens: list[str]
    types: str
    merges: list[str]
    scores: array[float]
    space_followers: str
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: tuple[int, ...]
    adds_bos: bool
    adds_space_prefix: bool

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Reads and checks the keys `tokenizer.ggml.*`.

        Raises:
            UnsupportedModelError: the tokenizer model or pre-tokenizer is not known here.
            ModelFileError: a key is missing, has the wrong type or contradicts another one.
        """
        model = _text(metadata, "model", None)
        if model not in {"gpt2", "llama"}:
            raise UnsupportedModelError(f"the tokenizer model {model!r} is not supported: use a file with 'gpt2' or 'llama'")
        pre = (_text(metadata, "pre", "") or "default") if model == "gpt2" else "default"
        rules = pre_tokenizer(pre)
        tokens = _tokens(metadata)
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(ids) != len(tokens):
            raise ModelFileError(f"two tokens have the same text {_first_duplicate(tokens)!r}: the model file is damaged")
        types = _types(metadata, tokens, ids)
        bos_id, eos_id, unknown_id = (
            _token_id(metadata, key, len(tokens), default if model == "llama" else None)
            for key, default in (("bos_token_id", 1), ("eos_token_id", 2), ("unknown_token_id", 0))
        )
        return cls(
            model=model,
            pre=pre,
            tokens=tokens,
            types=types,
            merges=_merges(metadata, ids, types) if model == "gpt2" else [],
            scores=_scores(metadata, len(tokens)) if model == "llama" else array("f"),
            space_followers=_space_followers(tokens, types) if model == "llama" else "",
            bos_id=bos_id,
            eos_id=eos_id,
            unknown_id=unknown_id,
            end_ids=_end_ids(metadata, ids, types, eos_id),
            adds_bos=_flag(metadata, "add_bos_token", default=_adds_bos(model, rules)) and bos_id is not None,
            adds_space_prefix=_flag(metadata, "add_space_prefix", default=True) if model == "llama" else False,
        )

    def is_special(self, token_id: int) -> bool:
        """Whether a token stands for no text of its own: control tokens and the unknown token."""
        return self.types[token_id] in {CONTROL, UNKNOWN}

    def text_ids(self) -> dict[str, int]:
        """Text to id for all tokens that ordinary text may become, which special ones may not."""
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        for token_id in self.ids_of_types(CONTROL + UNKNOWN):
            del ids[self.tokens[token_id]]
        return ids

    def ids_of_types(self, types: str) -> list[int]:
        """Ids of all tokens whose type is one of these digits."""
        return [match.start() for match in re.finditer(f"[{types}]", self.types)]

    def to_json(self) -> bytes:
        """UTF-8 JSON with lists of texts joined into one string each, which loads several times faster than lists."""
        scores = array("f", self.scores)
        if sys.byteorder == "big":
            scores.byteswap()
        separator = next((mark for mark in _SEPARATORS if not any(mark in token for token in self.tokens)), None)
        if separator is None:
            raise ModelFileError("the vocabulary holds every noncharacter that could separate its tokens: it is damaged")
        fields = {
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            "format": _JSON_FORMAT,
            "separator": separator,
            "tokens": separator.join(self.tokens),
            "merges": separator.join(self.merges),
            "scores": base64.b64encode(scores.tobytes()).decode("ascii"),
        }
        return json.dumps(fields, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Vocabulary:
        """The inverse of `to_json`.

        Raises:
            ModelFileError: the bytes are damaged or come from another version.
        """
        try:
            fields = json.loads(data)
            if fields["format"] != _JSON_FORMAT:
                raise ValueError(f"format {fields['format']!r} is not {_JSON_FORMAT}")
            scores = array("f", base64.b64decode(fields["scores"]))
            if sys.byteorder == "big":
                scores.byteswap()
            vocabulary = cls(
                **{name: fields[name] for name in _PLAIN_FIELDS} | {"end_ids": tuple(fields["end_ids"])},
                tokens=fields["tokens"].split(fields["separator"]),
                merges=fields["merges"].split(fields["separator"]) if fields["merges"] else [],
                scores=scores,
            )
            if len(vocabulary.types) != len(vocabulary.tokens):
                raise ValueError(f"{len(vocabulary.types)} types for {len(vocabulary.tokens)} tokens")
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise ModelFileError(f"the stored tokenizer cannot be read ({error}): delete it, it will be made again") from error
        return vocabulary


_PLAIN_FIELDS: Final = (
    *("model", "pre", "types", "space_followers", "bos_id", "eos_id", "unknown_id", "end_ids"),
    *("adds_bos", "adds_space_prefix"),
)


def _adds_bos(model: str, rules: PreTokenizer) -> bool:
    return model == "llama" or rules.adds_bos


def _text(metadata: Mapping[str, Any], key: str, default: str | None) -> str:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if value is None:
        raise ModelFileError(f"the metadata has no tokenizer.ggml.{key}: the file holds no tokenizer, use another GGUF file")
    if not isinstance(value, str):
        raise ModelFileError(f"tokenizer.ggml.{key}={value!r} is not a text: the model file is damaged")
    return value


def _flag(metadata: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if value is not True and value is not False:
        raise ModelFileError(f"tokenizer.ggml.{key}={value!r} is not true or false: the model file is damaged")
    return bool(value)


def _array(metadata: Mapping[str, Any], key: str, length: int | None = None) -> Iterable[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None or isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise ModelFileError(f"the metadata has no list tokenizer.ggml.{key}: the model file is damaged or incomplete")
    if length is not None and len(values) != length:
        raise ModelFileError(f"tokenizer.ggml.{key} has {len(values)} entries for {length} tokens: the model file is damaged")
    return values  # type: ignore[no-any-return]  # a list or a NumPy array


def _token_id(metadata: Mapping[str, Any], key: str, num_tokens: int, default: int | None = None) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return default if default is not None and default < num_tokens else None
    try:
        token_id = operator.index(value)
    except TypeError:
        token_id = -1
    if not 0 <= token_id < num_tokens:
        raise ModelFileError(f"tokenizer.ggml.{key}={value!r} is not an id below {num_tokens}: the model file is damaged")
    return token_id


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = list(_array(metadata, "tokens"))
    if not tokens:
        raise ModelFileError("tokenizer.ggml.tokens is empty: the file holds no tokenizer, use another GGUF file")
    for index, token in enumerate(tokens):
        if not isinstance(token, str) or not _is_unicode(token):
            raise ModelFileError(f"token {index} is {token!r}, not a text in UTF-8: the model file is damaged")
        if not token:
            tokens[index] = f"[EMPTY_{index}]"  # as llama.cpp names it: an id must not vanish
    return tokens


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_duplicate(tokens: list[str]) -> str:
    seen: set[str] = set()
    return next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]


def _types(metadata: Mapping[str, Any], tokens: list[str], ids: Mapping[str, int]) -> str:
    if metadata.get("tokenizer.ggml.token_type") is None:
        types = [NORMAL] * len(tokens)
    else:
        types = [str(value) for value in _array(metadata, "token_type", len(tokens))]
    strange = set(types) - _TYPES
    if strange:
        raise ModelFileError(f"tokenizer.ggml.token_type holds {min(strange)}, not 0 to 6: the model file is damaged")
    for text in _CONTROL_TEXTS:
        if text in ids:
            types[ids[text]] = CONTROL
    if _end_closes_a_part(ids):
        types[ids["<|end|>"]] = USER_DEFINED
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == BYTE and not _BYTE_TOKEN.fullmatch(token):
            raise ModelFileError(f"the byte token {token!r} is not written as <0x41>: the model file is damaged")
    return "".join(types)


def _scores(metadata: Mapping[str, Any], num_tokens: int) -> array[float]:
    try:
        scores = array("f", [float(score) for score in _array(metadata, "scores", num_tokens)])
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"tokenizer.ggml.scores holds other things than numbers ({error}): the file is damaged") from error
    if not all(map(math.isfinite, scores)):
        raise ModelFileError("tokenizer.ggml.scores holds a value that is not finite: the model file is damaged")
    return scores


def _merges(metadata: Mapping[str, Any], ids: Mapping[str, int], types: str) -> list[str]:
    merges: dict[tuple[str, str], None] = {}  # of two equal merges the first counts
    for index, merge in enumerate(_array(metadata, "merges")):
        # A space at the very start belongs to the left token.
        space = merge.find(" ", 1) if isinstance(merge, str) else -1
        if space < 0:
            raise ModelFileError(f"merge {index} is {merge!r}, not two texts and a space: the model file is damaged")
        left, right = merge[:space], merge[space + 1 :]
        for text in (left, right, left + right):
            if text not in ids:
                raise ModelFileError(f"merge {index} names {text!r}, which is no token: the model file is damaged")
        # Text must never grow into a special token.
        if not any(types[ids[text]] in {CONTROL, UNKNOWN} for text in (left, right, left + right)):
            merges[left, right] = None
    return [text for pair in merges for text in pair]


def _space_followers(tokens: list[str], types: str) -> str:
    texts = "\n".join(token for token, kind in zip(tokens, types, strict=True) if kind not in {CONTROL, UNKNOWN})
    return "".join(sorted(set(re.findall(f"([^{SPACE}]){SPACE}", texts)) - {"\n"}))


def _end_closes_a_part(ids: Mapping[str, int]) -> bool:
    """Whether <|end|> closes only a part of a message, which then ends with <|return|> or a call."""
    calls = "<|call|>" in ids or "<|calls|>" in ids
    return "<|end|>" in ids and calls and ("<|return|>" in ids or "<|flush|>" in ids)


def _end_ids(metadata: Mapping[str, Any], ids: Mapping[str, int], types: str, eos_id: int | None) -> tuple[int, ...]:
    end_ids = {ids[text] for text in _END_TEXTS if text in ids}
    if "</s>" in ids and types[ids["</s>"]] == CONTROL:  # in some vocabularies it is a tag of HTML
        end_ids.add(ids["</s>"])
    named = (_token_id(metadata, key, len(ids)) for key in ("eot_token_id", "eom_token_id"))
    end_ids.update(token_id for token_id in (eos_id, *named) if token_id is not None)
    if _end_closes_a_part(ids):
        end_ids.discard(ids["<|end|>"])
    return tuple(sorted(end_ids))
