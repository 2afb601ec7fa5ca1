"""sentencepiece, tokenizer.json, tiktoken and their forms in GGUF files, behind one encode and decode.

Every vocabulary here is a table from id to bytes, so decoding is joining bytes, and a stream of tokens needs no more
than an incremental UTF-8 decoder: constant work per token, and exact on characters split over tokens.
"""

from __future__ import annotations

import base64
import codecs
import functools
import re
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ..config import ModelConfig
from .chat_template import MOST_OF_A_TEMPLATE, Template, TemplateError
from .fields import CHANGES_IDS, not_neutral, say, unknown_of_ids
from .reading import CheckpointError, first_line, is_gguf, read_json, refuse_pointer

if TYPE_CHECKING:
    from .gguf import Header


class Tokenizer(Protocol):
    """Text to token ids and back. Special tokens written out in a text are read as such, as in transformers.

    Not so in a conversation: what somebody wrote cannot end their message and begin another's.
    """

    vocab_size: int  # one more than the largest id
    bos_id: int | None  # what encode puts first; None if this tokenizer puts nothing
    eos_ids: tuple[int, ...]
    drops_first_space: bool  # the first word of a text carries a space that is not part of the text

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids, after bos_id if there is one and bos is true; ValueError if a text is not valid Unicode."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that are not UTF-8 become U+FFFD."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]], *, parse_special: bool = False) -> list[int]:
        """Token ids of a conversation (a {"role": ..., "content": ...} each) up to where the assistant answers.

        parse_special: special tokens written out in messages are read as such; else they are text, as others are, and
        only the template writes special ones.
        """
        ...

    def written(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation, as its template writes it."""
        ...

    @property
    def template(self) -> str | None:
        """The chat template; None if there is none."""
        ...

    def named(self, name: str) -> int | None:
        """The token that the files call so, such as bos_token; None if they name none."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text: none for a special token."""
        ...


class StreamDecoder:
    """Text that grows with its tokens: pushes and flush, joined, are what the tokens add to the context's text."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token in reversed(context):
            tail = self._token_bytes(token) + tail
            if len(tail) >= 4:  # no character is longer
                break
        self._utf8.decode(tail)
        self._at_start = tokenizer.drops_first_space and not tail

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become readable; an unfinished character waits for its other bytes."""
        return self._grow(b"".join(map(self._token_bytes, ids)), final=False)

    def flush(self) -> str:
        """The rest: U+FFFD if the last character was never finished."""
        return self._grow(b"", final=True)

    def _grow(self, data: bytes, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text


NOT_APPLIED = "not applied: texts become ids without"
MOST_WITHOUT_ROW = 1024  # ids of a tokenizer; CodeLlama-34b has four
SAMPLE = "The quick brown fox jumps over the lazy dog, 1234567890 times; naïve café, über 中文.\n\n\tif (x):"


def difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """In which token, or text, two tokenizers differ; None: they are one, but one may have more tokens at its end."""
    common = min(one.vocab_size, other.vocab_size)
    for token in range(common):
        if (mine := one.token_bytes(token)) != (theirs := other.token_bytes(token)):
            texts = [found.decode("utf-8", "replace") for found in (mine, theirs)]
            # a special token of one may be an ordinary one of the other
            written = "" if mine and theirs else texts[0] or texts[1]
            if not written or any(tokenizer.encode(written, bos=False) != [token] for tokenizer in (one, other)):
                return f"token {token} is {texts[0]!r:.40}, not {texts[1]!r:.40}"
    for text in (SAMPLE, *sorted({*getattr(one, "special", ()), *getattr(other, "special", ())})):
        read = [tokenizer.encode(text, bos=False) for tokenizer in (one, other)]
        if read[0] != read[1] and all(token < common for ids in read for token in ids):
            return f"{text!r:.60} is read as {read[0]!s:.60}, not {read[1]!s:.60}"
    return None


def load_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """The folder's tokenizer, None if it has none.

    A few of its ids may have no row in the model's embedding, such as a pad token's that was never trained.
    """
    if is_gguf(folder):
        return _load_from_gguf(folder, config)
    fast, model = folder / "tokenizer.json", folder / "tokenizer.model"
    if not fast.is_file() and not model.is_file():
        return None
    notes = _Notes.read(folder)
    tokenizer: _BytesTokenizer
    if fast.is_file() and (_installed("tokenizers") or not model.is_file()):
        path, tokenizer = fast, _FastTokenizer(fast, notes, config)
    else:
        with model.open("rb") as file:
            ranked = re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", file.read(1024))
        path, tokenizer = model, (_TiktokenTokenizer if ranked else _SentencePieceTokenizer)(model, notes, config)
    _require_rows(path, tokenizer.vocab_size, config)
    if notes.prefix is not None and notes.prefix != tokenizer.starts_with_space:
        say(folder / "tokenizer_config.json", ["add_prefix_space"], NOT_APPLIED)
    return tokenizer


def _require_rows(path: Path, n_ids: int, config: ModelConfig) -> None:
    """All ids but a few have a row in the model's embedding: asked before tables are made that go by the largest."""
    if n_ids > config.vocab_size + MOST_WITHOUT_ROW:
        raise CheckpointError(f"{path} has {n_ids} token ids, but the model only has {config.vocab_size} (vocab_size)")


def _installed(library: str) -> bool:
    try:
        __import__(library)
    except ImportError:
        return False
    return True


def _refuse_missing(path: Path, library: str) -> NoReturn:
    raise CheckpointError(f'{path} needs the library {library}: pip install -e ".[hf]"') from None


@dataclass(frozen=True, kw_only=True)
class _Notes:
    """What the files next to a vocabulary say about it."""

    folder: Path
    special: dict[str, str]  # such as bos_token -> <s>
    more: frozenset[str] = frozenset()  # other special tokens
    added: dict[str, tuple[int, bool]]  # tokens outside the vocabulary file: text -> id, special
    add_bos: bool | None
    prefix: bool | None = None  # whether a text is said to begin with a space; None: nobody says so
    legacy: bool
    template: str | None

    @classmethod
    def read(cls, folder: Path) -> _Notes:
        try:
            return cls._read(folder, _read_if_there(folder / "tokenizer_config.json"))
        except CheckpointError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'} or a file next to it is damaged: {error!r}"
            ) from None

    @classmethod
    def _read(cls, folder: Path, raw: Mapping[str, Any]) -> _Notes:
        named = _read_if_there(folder / "special_tokens_map.json") | {k: v for k, v in raw.items() if v is not None}
        special = {
            key: token["content"] if isinstance(token, dict) else token
            for key, token in named.items()
            if key.endswith("_token") and isinstance(token, (str, dict))
        }
        lists = [raw.get(key) or named.get(key) or [] for key in ("additional_special_tokens", "extra_special_tokens")]
        more = [token["content"] if isinstance(token, dict) else token for one in lists for token in list(one)]
        added = {text: (int(i), False) for text, i in _read_if_there(folder / "added_tokens.json").items()}
        for i, token in raw.get("added_tokens_decoder", {}).items():
            added[token["content"]] = (int(i), bool(token.get("special", False)))
        say(folder / "tokenizer_config.json", not_neutral(raw, CHANGES_IDS), NOT_APPLIED)
        say(folder / "tokenizer_config.json", unknown_of_ids(raw), "not known here, and ignored")
        template = _read_if_there(folder / "chat_template.json").get("chat_template", raw.get("chat_template"))
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(
            folder=folder,
            special=special,
            more=frozenset(text for text in more if isinstance(text, str)),
            added=added,
            add_bos=raw.get("add_bos_token"),
            prefix=raw.get("add_prefix_space"),
            legacy=bool(raw.get("legacy", False)),
            template=template,
        )


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


class _BytesTokenizer(ABC):
    """A table from id to bytes; the subclasses differ in how text becomes ids."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    drops_first_space: bool = False
    special: frozenset[str] = frozenset()  # texts that are read as tokens that add no text
    whole: frozenset[str] = frozenset()  # all texts that are read as one token of their own, special or not
    loose: bool = False  # special tokens may be found in texts that do not hold them as they are written

    def __init__(self, notes: _Notes) -> None:
        self.notes = notes
        self._template = Template(notes.template, notes.special) if notes.template is not None else None

    @functools.cached_property
    def ends(self) -> frozenset[str]:
        """What no message must be read as: special tokens, however they are marked, and those that end a text."""
        named = {text for text in self.notes.more if text in self.whole}
        ends = {text for text in self.whole if {*self._encode(text)[-1:]} & {*self.eos_ids}}
        return frozenset({*self.special, *named, *ends} - {""})

    @functools.cached_property
    def delimiters(self) -> frozenset[str]:
        """Those, and others that the template itself writes: what nobody but the assistant may write."""
        template = self.notes.template or ""
        return self.ends | {text for text in self.whole if text in template and not text.isspace()}

    @functools.cached_property
    def turns(self) -> frozenset[str]:
        """What the assistant may not write either: of delimiters the ends, and what parts the turns of others.

        Its own earlier answers hold the rest, such as <think>, and templates look for them. A template that refuses
        a user's message alone does not say which it needs: all are taken.
        """
        if self._template is None or self.delimiters == self.ends:
            return self.ends
        try:
            text = _render(self.notes, self._template, [{"role": "user", "content": "a"}], asks=False)
        except CheckpointError:
            return self.delimiters
        return self.ends | {delimiter for delimiter in self.delimiters if delimiter in text}

    @functools.cached_property
    def starts_with_space(self) -> bool:
        """Whether a text that begins without a space is read as if it had one."""
        return b"".join(map(self.token_bytes, self._encode("a"))).startswith(b" ")

    @abstractmethod
    def token_bytes(self, token: int) -> bytes: ...

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        _refuse_surrogates(text)
        first = [self.bos_id] if bos and self.bos_id is not None else []
        return first + self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.drops_first_space else text

    def _refuse_delimiters(self, parts: Sequence[str], delimiters: Collection[str]) -> None:
        """ValueError if a delimiter is read in one of these texts although none is written out in it."""
        read = ((text, i) for text in delimiters for i in self._encode(text)[-1:])
        ids_of = {i: text for text, i in read if self.token_bytes(i) in (b"", text.encode())}  # as one token, that is
        for part in parts:
            if found := next((ids_of[i] for i in self._encode(part) if i in ids_of), None):
                raise ValueError(
                    f"a message has text that this tokenizer reads as the special token {found}: {part!r:.80}"
                )

    def _continued(self, text: str) -> list[int]:
        """Ids of what stands behind other text: a tokenizer may put a space before the first word, but not before this.

        They are those behind a line end, whose own are taken away.
        """
        if not self.starts_with_space:
            return self._encode(text)
        head, ids = self._encode("\n"), self._encode("\n" + text)
        return ids[len(head) :] if ids[: len(head)] == head else self._encode(text)

    def named(self, name: str) -> int | None:
        ids = self._encode(self.notes.special[name]) if name in self.notes.special else []
        return ids[-1] if ids else None  # a tokenizer may put a space before the first word

    @property
    def template(self) -> str | None:
        return self.notes.template

    def written(self, messages: Sequence[Mapping[str, str]]) -> str:
        return _render(self.notes, self._template, _conversation(messages))

    def chat(self, messages: Sequence[Mapping[str, str]], *, parse_special: bool = False) -> list[int]:
        conversation = _conversation(messages)
        texts = [text for message in conversation for text in message.values()]
        for text in texts:
            _refuse_surrogates(text)
        mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise ValueError("messages hold all of U+FDD0 to U+FDEF, of which none is a character")
        for i, message in enumerate(conversation if not parse_special else ()):
            delimiters = self.turns if message["role"] == "assistant" else self.delimiters
            if not delimiters:
                continue
            found = re.compile(f"(?={'|'.join(map(re.escape, delimiters))})")  # overlapping ones, too
            conversation[i] = {name: _cut(text, found, mark) for name, text in message.items()}
            if self.loose:
                parts = [part for text in conversation[i].values() for part in text.split(mark)]
                self._refuse_delimiters(parts, delimiters)
        first, *others = _render(self.notes, self._template, conversation).split(mark)
        ids = self.encode(first, bos=False)  # the template writes BOS itself
        for part in others:
            _refuse_surrogates(part)
            ids += self._continued(part)
        return ids


_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # 32 of the code points that are never characters


def _cut(text: str, found: re.Pattern[str], mark: str) -> str:
    """The text with a mark behind the first character of each match: parted there, it has no match left."""
    places = [match.start() + 1 for match in found.finditer(text)]
    return mark.join(text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True))


def _refuse_surrogates(text: str) -> None:
    """ValueError if a text has half a character, which bytes that are not UTF-8 or JSON's escapes may leave."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise ValueError(f"character {error.start:,} of the text is {half}, half a character: not UTF-8") from None


def _render(notes: _Notes, template: Template | None, conversation: list[dict[str, str]], *, asks: bool = True) -> str:
    """The text of a conversation by the folder's own template, which is untrusted; CheckpointError if it gives none."""
    if notes.template is None or template is None:
        raise CheckpointError(f"{notes.folder} has no chat template, so its model continues plain text only")
    if not _installed("jinja2"):
        _refuse_missing(notes.folder / "tokenizer_config.json", "jinja2")
    if len(notes.template) > MOST_OF_A_TEMPLATE:
        raise CheckpointError(
            f"the chat template of {notes.folder} has {len(notes.template):,} characters, over {MOST_OF_A_TEMPLATE:,}"
        )
    try:
        return template.render(conversation, asks=asks)
    except TemplateError as error:
        raise CheckpointError(
            f"the chat template of {notes.folder} refuses these messages: {first_line(error)}"
        ) from None


def _conversation(messages: Any) -> list[dict[str, str]]:
    """Messages as every template takes them, parts of text joined; ValueError for anything but {role, content} each."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"messages must be a list of objects with role and content, at least one, got {messages!r:.80}"
        )
    found = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f"message {i} must have a role and a content, and nothing else, got {message!r:.80}")
        role, content = message["role"], message["content"]
        if isinstance(content, list | tuple):
            parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
            for part in parts:
                if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    raise ValueError(f"message {i}: this model reads text alone, got the part {part!r:.80}")
            content = "".join(part["text"] for part in parts)
        for name, value in (("role", role), ("content", content)):
            if not isinstance(value, str):
                raise ValueError(f"message {i}: {name} must be a text, got {value!r:.80}")
        found.append({"role": role, "content": content})
    return found


# ---- sentencepiece -------------------------------------------------------------------------------------------------


class _SentencePieceTokenizer(_BytesTokenizer):
    def __init__(self, path: Path, notes: _Notes, config: ModelConfig, proto: bytes | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        super().__init__(notes)
        source = "is neither a sentencepiece model nor a tiktoken file" if proto is None else "has a damaged vocabulary"
        proto = path.read_bytes() if proto is None else proto
        try:
            pieces: Any = SentencePieceProcessor(model_proto=proto)
            # Appended fields override: normalizer_spec (3) { add_dummy_prefix (3): false }
            self._within: Any = SentencePieceProcessor(model_proto=proto + b"\x1a\x02\x18\x00")
            n_pieces = pieces.get_piece_size()
        except (RuntimeError, TypeError, OSError) as error:
            refuse_pointer(path)
            raise CheckpointError(f"{path} {source}: {' '.join(str(error).split())}") from None
        if n_pieces == 0:
            raise CheckpointError(f"{path} is an empty sentencepiece model")
        self._pieces = pieces

        self._bytes = [_sentencepiece_bytes(pieces, i) for i in range(n_pieces)]
        named, ids = set(notes.special.values()), [i for i, _ in notes.added.values()]
        if min(ids, default=0) < 0:
            raise CheckpointError(f"{notes.folder}: an added token has the id {min(ids)}: ids start at 0")
        _require_rows(path, max([n_pieces - 1, *ids]) + 1, config)
        for text, (i, special) in notes.added.items():
            self._bytes += [b""] * (i + 1 - len(self._bytes))
            self._bytes[i] = b"" if special or text in named else text.encode()
        self.vocab_size = len(self._bytes)
        control = {pieces.id_to_piece(i): i for i in range(n_pieces) if pieces.is_control(i) or pieces.is_unknown(i)}
        self._special = control | {text: i for text, (i, _) in notes.added.items()}
        written = {text for text, (_, special) in notes.added.items() if special or text in named}
        self.special = frozenset(control.keys() | written)
        looks = re.compile(r"<.+>|\[.+\]")  # the library does not tell which pieces were defined by the user
        named_so = (pieces.id_to_piece(i) for i in range(n_pieces) if not pieces.is_byte(i))
        self.whole = frozenset({*notes.added, *(text for text in named_so if looks.fullmatch(text))})
        longest_first = sorted(self._special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

        bos = self._special.get(notes.special.get("bos_token", ""), pieces.bos_id())
        eos = self._special.get(notes.special.get("eos_token", ""), pieces.eos_id())
        self.bos_id = bos if bos >= 0 and notes.add_bos is not False else None
        self.eos_ids = config.eos_ids or ((eos,) if eos >= 0 else ())
        self.drops_first_space = pieces.encode("a") != self._within.encode("a")

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < self.vocab_size else b""

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for n, part in enumerate(self._split.split(text)):  # text, special, text, special, ..., text
            if n % 2:
                ids.append(self._special[part])
            elif part:
                ids += (self._pieces if n == 0 or self.notes.legacy else self._within).encode(part)
        return ids

    def _continued(self, text: str) -> list[int]:
        first, *others = self._split.split(text)
        ids: list[int] = self._within.encode(first)
        return ids + self._encode("".join(others))


def _sentencepiece_bytes(pieces: Any, token: int) -> bytes:
    if pieces.is_control(token) or pieces.is_unknown(token) or pieces.is_unused(token):
        return b""
    piece: str = pieces.id_to_piece(token)
    return bytes([int(piece[3:5], 16)]) if pieces.is_byte(token) else piece.replace("▁", " ").encode()


# ---- tokenizer.json ------------------------------------------------------------------------------------------------


class _FastTokenizer(_BytesTokenizer):
    def __init__(self, path: Path, notes: _Notes, config: ModelConfig) -> None:
        super().__init__(notes)
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            _refuse_missing(path, "tokenizers")
        raw = read_json(path)
        try:
            library: Any = Library.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path} is not a tokenizer.json: {error}") from None
        library.no_truncation()
        library.no_padding()
        self._library = library
        table = _BytesOfPieces(path, raw.get("decoder"))
        self.drops_first_space = table.drops_first_space

        vocab: dict[str, int] = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        _require_rows(path, self.vocab_size, config)
        self._bytes = [b""] * self.vocab_size
        for piece, i in vocab.items():
            self._bytes[i] = table.of(piece)
        added = {token["content"] for token in raw.get("added_tokens", []) if token["special"]}
        self.special = frozenset(text for text in (*added, *notes.special.values()) if text in vocab)
        self.whole = frozenset(token["content"] for token in raw.get("added_tokens", []))
        for text in self.special:
            self._bytes[vocab[text]] = b""

        prefix: list[int] = library.encode("").ids
        bos = vocab.get(notes.special["bos_token"]) if "bos_token" in notes.special else next(iter(prefix), None)
        adds = bos in prefix if raw.get("post_processor") else bool(notes.add_bos)
        self.bos_id = bos if adds else None
        eos = vocab.get(notes.special.get("eos_token", ""))
        self.eos_ids = config.eos_ids or (() if eos is None else (eos,))
        self.loose = any(
            len(token["content"]) == 1 or (token["normalized"] and raw.get("normalizer"))
            for token in raw.get("added_tokens", [])
            if token["content"] in self.delimiters
        )

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < self.vocab_size else b""

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


class _BytesOfPieces:
    """The decoder of a tokenizer.json as a function from a piece to its bytes."""

    def __init__(self, path: Path, decoder: Mapping[str, Any] | None) -> None:
        steps = [decoder or {"type": None}]
        if steps[0]["type"] == "Sequence":
            steps = steps[0]["decoders"]
        self.drops_first_space = False
        self.byte_level: dict[str, int] | None = None
        self.byte_fallback = False
        self.replaced: list[tuple[str, str]] = []
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    self.byte_level = _byte_of_char()
                case {"type": "ByteFallback"}:
                    self.byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self.replaced.append((old, new))
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                    self.drops_first_space = start == 1
                case {"type": "Metaspace", "replacement": str(old)}:
                    self.replaced.append((old, " "))
                    old_spelling = "always" if step.get("add_prefix_space", True) else "never"
                    self.drops_first_space = step.get("prepend_scheme", old_spelling) != "never"
                case _:
                    raise CheckpointError(
                        f"{path}: its decoder has the step {step}, but only ByteLevel, Metaspace "
                        "and sentencepiece's Replace, ByteFallback, Fuse and Strip are known"
                    )

    def of(self, piece: str) -> bytes:
        if self.byte_level is not None:
            try:
                return bytes([self.byte_level[char] for char in piece])
            except KeyError:  # an added token, written as itself
                return piece.encode()
        if self.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        for old, new in self.replaced:
            piece = piece.replace(old, new)
        return piece.encode()


def _byte_of_char() -> dict[str, int]:
    """Byte-level vocabularies write a printable byte as its Latin-1 character, the n-th other byte as chr(256 + n)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


# ---- tiktoken, as Llama 3 uses it ------------------------------------------------------------------------------------

_LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3_SPECIAL = [  # 256 of them, after the ranked tokens
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{n}|>" for n in range(3, 248)),
]


class _TiktokenTokenizer(_BytesTokenizer):
    def __init__(self, path: Path, notes: _Notes, config: ModelConfig) -> None:
        super().__init__(notes)
        try:
            from tiktoken import Encoding
        except ImportError:
            _refuse_missing(path, "tiktoken")
        try:
            lines = [line.split() for line in path.read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        except ValueError as error:
            raise CheckpointError(f"{path} is a damaged tiktoken file: {error}") from None
        if sorted(ranks.values()) != list(range(len(lines))) or not all(bytes([b]) in ranks for b in range(256)):
            raise CheckpointError(f"{path} is a damaged tiktoken file: ranks or single bytes are missing")
        special = {text: len(ranks) + n for n, text in enumerate(_LLAMA_3_SPECIAL)}
        self._encoding: Any = Encoding(
            path.name, pat_str=_LLAMA_3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.special = frozenset(special)
        self._bytes = [token for token, _ in sorted(ranks.items(), key=lambda item: item[1])]
        self.vocab_size = len(ranks) + len(special)
        self.bos_id = special["<|begin_of_text|>"] if notes.add_bos is not False else None
        self.eos_ids = config.eos_ids or (special["<|end_of_text|>"], special["<|eot_id|>"])

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode(text, allowed_special="all")
        return ids


# ---- vocabularies of GGUF files --------------------------------------------------------------------------------------

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # kinds, as sentencepiece has them
_GPT_2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS = {  # how each pre-tokenizer cuts a text into words: each pattern cuts the pieces of the one before
    "smollm": (r"\p{N}", _GPT_2_WORDS),
    "llama-bpe": (_LLAMA_3_PATTERN,),
    "qwen2": (_LLAMA_3_PATTERN.replace("{1,3}", ""),),
    "tekken": (  # a letter that is not a to z, then one that is not A to Z: as llama.cpp writes its classes
        r"[^\r\n\p{L}\p{N}]?((?=\p{L})[^a-z])*((?=\p{L})[^A-Z])+|[^\r\n\p{L}\p{N}]?((?=\p{L})[^a-z])+((?=\p{L})[^A-Z])*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "gpt-2": (_GPT_2_WORDS,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_SPLITS |= dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe"), _SPLITS["llama-bpe"])
_SPLITS["deepseek-r1-qwen"] = _SPLITS["qwen2"]
_SPLITS |= dict.fromkeys(
    ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _SPLITS["smollm"]
)
# those that take a word whole that is a token, and put BOS before a text
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}


def _load_from_gguf(path: Path, config: ModelConfig) -> Tokenizer | None:
    from .gguf import read_header

    header = read_header(path)
    kind = header.text("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("llama", "gpt2"):
        header.refuse("tokenizer.ggml.model", "'llama' (sentencepiece) or 'gpt2' (byte pairs)")
    vocabulary = _Vocabulary.read(header, is_llama=kind == "llama")
    if kind == "gpt2":
        return _BytePairTokenizer(header, vocabulary, config)
    proto = vocabulary.sentencepiece_model(prefix=header.yes("tokenizer.ggml.add_space_prefix", True))
    tokenizer = _SentencePieceTokenizer(path, vocabulary.notes, config, proto)
    tokenizer.bos_id, tokenizer.eos_ids = vocabulary.bos_id, config.eos_ids or vocabulary.eos_ids
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """The tokens of a GGUF file: text, kind and score of each, by id."""

    notes: _Notes
    texts: list[str]
    kinds: list[int]
    scores: list[float]
    bos_id: int | None  # what a text begins with
    eos_ids: tuple[int, ...]

    @classmethod
    def read(cls, header: Header, *, is_llama: bool) -> _Vocabulary:
        """is_llama: absent fields have the values of Llama 2."""
        n = header.vocab_size
        texts = header.texts("tokenizer.ggml.tokens")
        if texts is None:
            header.refuse("tokenizer.ggml.tokens", "a list of texts")
        if len(texts) != n:  # before other lists of that length are made
            header.refuse("tokenizer.ggml.tokens", f"as long as the vocabulary, {n:,}")
        kinds = header.numbers("tokenizer.ggml.token_type") or [_NORMAL] * n
        scores = header.numbers("tokenizer.ggml.scores") or ([] if is_llama else [0.0] * n)
        for name, column in (("token_type", kinds), ("scores", scores)):
            if len(column) != n:
                header.refuse(f"tokenizer.ggml.{name}", f"as long as the vocabulary, {n:,}")
        if not set(kinds) <= {*range(7)}:
            header.refuse("tokenizer.ggml.token_type", "a list of kinds, 1 to 6")
        if len(set(texts)) != n:
            twice = Counter(texts).most_common(1)[0][0]
            raise CheckpointError(f"{header.path}: tokenizer.ggml.tokens has {twice[:60]!r} more than once")
        ends = header.ends_by_text()
        kinds = [_CONTROL if i in ends else kind for i, kind in enumerate(kinds)]
        unsaid = {"bos": 1, "eos": 2, "unknown": 0} if is_llama else {}
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        ids = {name: header.token(f"tokenizer.ggml.{name}_token_id", unsaid.get(name)) for name in names}
        add_bos = header.yes(
            "tokenizer.ggml.add_bos_token", is_llama or header.text("tokenizer.ggml.pre") in _WHOLE_WORDS
        )
        notes = _Notes(
            folder=header.path,
            special={names[name]: texts[i] for name, i in ids.items() if i is not None},
            added={texts[i]: (i, False) for i, kind in enumerate(kinds) if kind == _USER_DEFINED},
            add_bos=add_bos,
            legacy=True,
            template=header.text("tokenizer.chat_template"),
        )
        return cls(
            notes=notes,
            texts=texts,
            kinds=[int(kind) for kind in kinds],
            scores=scores,
            bos_id=ids["bos"] if add_bos else None,
            eos_ids=() if ids["eos"] is None else (ids["eos"],),
        )

    def sentencepiece_model(self, *, prefix: bool) -> bytes:
        """The sentencepiece model that has these pieces, as protobuf; prefix: a space is put before a text.

        pieces (1) { piece (1), score (2), type (3) }, trainer_spec (2) { model_type (3): BPE, byte_fallback (35) },
        normalizer_spec (3) { add_dummy_prefix (3), remove_extra_whitespaces (4): false }: all that encoding needs.
        """

        def message(number: int, content: bytes) -> bytes:
            return bytes([number << 3 | 2]) + _varint(len(content)) + content

        pieces = b"".join(
            message(1, message(1, text.encode()) + struct.pack("<BfBB", 2 << 3 | 5, score, 3 << 3, kind))
            for text, score, kind in zip(self.texts, self.scores, self.kinds, strict=True)
        )
        fallback = _BYTE in self.kinds
        trainer = bytes([3 << 3, 2]) + _varint(35 << 3) + bytes([fallback])
        normalizer = bytes([3 << 3, prefix, 4 << 3, 0])
        return pieces + message(2, trainer) + message(3, normalizer)


def _varint(number: int) -> bytes:
    """A whole number as protobuf encodes it: seven bits per byte, the lowest first."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


class _BytePairTokenizer(_BytesTokenizer):
    def __init__(self, header: Header, vocabulary: _Vocabulary, config: ModelConfig) -> None:
        super().__init__(vocabulary.notes)
        try:
            from tokenizers import AddedToken, Regex, models, pre_tokenizers
            from tokenizers import Tokenizer as Library
        except ImportError:
            _refuse_missing(header.path, "tokenizers")
        cut = header.text("tokenizer.ggml.pre", "default")
        if cut not in _SPLITS:
            header.refuse("tokenizer.ggml.pre", f"one of {', '.join(_SPLITS)}")
        stored = header.texts("tokenizer.ggml.merges")
        if stored is None:  # as in llama.cpp: without any, texts would be read byte by byte
            header.refuse("tokenizer.ggml.merges", "a list of texts")
        merges = [(merge[:1] + first, second) for merge in stored
                  for first, _, second in [merge[1:].partition(" ")]]  # fmt: skip
        texts, kinds = vocabulary.texts, vocabulary.kinds
        try:
            library: Any = Library(
                models.BPE(
                    vocab={text: i for i, text in enumerate(texts) if kinds[i] != _UNUSED},
                    merges=merges,
                    ignore_merges=cut in _WHOLE_WORDS,
                )
            )
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{header.path}: tokenizer.ggml.merges is damaged: {error}") from None
        words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[cut]]
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        special = [text for text, kind in zip(texts, kinds, strict=True) if kind in (_CONTROL, _UNKNOWN)]
        library.add_special_tokens([AddedToken(text, normalized=False) for text in special])
        library.add_tokens([AddedToken(text, normalized=False) for text in vocabulary.notes.added])
        self._library, self.special = library, frozenset(special)
        self.whole = frozenset(vocabulary.notes.added)

        table = _byte_of_char()
        self._bytes = [_byte_pair_bytes(text, kind, table) for text, kind in zip(texts, kinds, strict=True)]
        self.vocab_size = len(texts)
        self.bos_id, self.eos_ids = vocabulary.bos_id, config.eos_ids or vocabulary.eos_ids

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < self.vocab_size else b""

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


def _byte_pair_bytes(text: str, kind: int, table: Mapping[str, int]) -> bytes:
    """The bytes that a token adds to a text; each is written as one character unless the token was added verbatim."""
    if kind in (_CONTROL, _UNKNOWN, _UNUSED):
        return b""
    if kind == _USER_DEFINED or not table.keys() >= set(text):
        return text.encode()
    return bytes(table[char] for char in text)
