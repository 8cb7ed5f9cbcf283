"""Tokenizers: text to token ids and back. Wraps transformers and tokenizers."""

import contextlib
import importlib
import json
import logging
import os
import re
import string
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxrl_async.data.images import ImageStore
from jaxrl_async.data.token_bytes import (
    bytes_of_tokens,
    chars_per_token,
    joins_bytes,
    most_chars,
    writes_bytes,
)
from jaxrl_async.errors import ConfigError, DataError, TextTooLong, in_a_line
from jaxrl_async.types import IntArray, Message
from jaxrl_async.whole_files import replacing

log = logging.getLogger(__name__)


def _without_advice(module: str) -> Any:
    """Import a module without transformers' advice to install PyTorch.

    PyTorch is not used here, and the advice suggests that the run cannot work. Later warnings are
    not silenced.
    """
    before = os.environ.get(NO_ADVICE)
    os.environ[NO_ADVICE] = "1"
    try:
        return importlib.import_module(module)
    finally:
        if before is None:
            del os.environ[NO_ADVICE]
        else:
            os.environ[NO_ADVICE] = before


NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
PreTrainedTokenizerFast: Any = _without_advice("transformers").PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
"""The printable ASCII characters, and the line break."""
CHAT_ROLES = ("<system>", "<user>", "<assistant>")
CHAT_MARKS = (
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CHAT_TEMPLATE = """
{%- if tools -%}
  <tools>
  {%- for tool in tools -%}
    {{- tool.function.name }}({{ tool.function.get("parameters", {}).get("properties", {})
        | join(", ") }})
    {%- if not loop.last %}, {% endif -%}
  {%- endfor -%}
  </tools>
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    <tool_response>{{ message.content }}</tool_response>
  {%- elif message.role == "assistant" -%}
    <assistant>
    {%- if message.reasoning_content -%}
      <think>{{ message.reasoning_content }}</think>
    {%- endif -%}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- "<tool_call>" }}{{ {"name": call.function.name, "arguments": call.function.arguments}
          | tojson }}{{ "</tool_call>" -}}
    {%- endfor -%}
    {{- eos_token -}}
  {%- else -%}
    {{- "<user>" if message.role == "user" else "<system>" }}{{ message.content }}{{ eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""
"""Chat template of chat_tokenizer."""
BARE = "{prompt}"
"""Template of a bare prompt, regardless of the tokenizer's chat template."""
ANCHORS = ("\n", "a", ".")
"""Texts to put before an answer when encoding, to get its tokens within a text."""
TEMPLATE_FILE = "chat_template.jinja"
MAX_FILE_BYTES = 2**28
"""Maximum size of tokenizer.json, bytes."""
PIECE = 2**16
"""Longer texts are counted in pieces of this length before they are encoded, characters."""
DENSE_CHARS = 8
"""Characters per token below which the pieces of a long text are not counted, since encoding costs
little."""
EDGE_TOKENS = 16
"""Maximum number of additional tokens of a piece, compared to the whole text."""
HEAD_CHARS = 2048
"""Number of characters of a refused text whose tokens represent it."""
SAMPLE = "What is 12 + 34?\n"
"""Text to test a tokenizer with when it is loaded."""


class Tokenizer:
    """A Hugging Face fast tokenizer with the functions that a run needs. Thread-safe."""

    def __init__(self, hf: Any, *, eos_ids: tuple[int, ...] | None = None) -> None:
        """eos_ids: end an answer; the first is the training target. None: the tokenizer's own."""
        self.hf = hf
        hf.backend_tokenizer.no_truncation()  # truncation would silently cut prompts and answers
        hf.backend_tokenizer.no_padding()
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_ids = own if eos_ids is None else eos_ids
        vocabulary = hf.get_vocab()
        self.vocab_size = 1 + max(
            vocabulary.values(), default=-1
        )  # largest id + 1, including added tokens
        self._known = np.unique(np.fromiter(vocabulary.values(), np.int64))  # ids with a token
        self._lock = threading.Lock()  # the backend's settings are not safe to share
        self.images: ImageStore | None = None  # for runs with images
        self.max_tokens: int | None = None  # longer texts are refused; None: no limit
        self.num_inexact = 0  # answers not encoded exactly, see encode_answer
        self._warned = False  # about ids without a token

    @property
    def pad_id(self) -> int:
        """Id of the padding token, else of the first end token, else 0."""
        pad = self.hf.pad_token_id
        return int(pad) if pad is not None else next(iter(self.eos_ids), 0)

    @property
    def special_ids(self) -> dict[str, int]:
        """Token ids of "bos" and "pad", if the tokenizer names them."""
        named = {"bos": self.hf.bos_token_id, "pad": self.hf.pad_token_id}
        return {name: int(i) for name, i in named.items() if i is not None}

    def encode(self, text: str) -> IntArray:
        """Encode a text verbatim, without special tokens around it; [length] int32. For a model
        with images, the mark of an image becomes its soft tokens. Like all encoding methods, raises
        TextTooLong for a text that must have more than max_tokens tokens."""
        if self.images is not None:
            self._check_length(text)
            text = text.replace(self.images.form.mark, self.images.form.written)
        return self._encode(text, special=False)

    def encode_prompt(self, text: str, template: str | None = None) -> IntArray:
        """Encode a prompt; [length] int32.

        The text is the template with {prompt} filled in, if one is given; else one user message in
        the tokenizer's chat template, if it has one; else the bare prompt. Tokens that the
        tokenizer adds before a text (bos) are kept. An end token added after a text is removed,
        since the answer continues there.
        """
        return self._open_end(*self._shown(text, template))

    def encode_answer(self, prompt: str, answer: str, template: str | None = None) -> IntArray:
        """Encode an answer after encode_prompt(prompt, template), with the end token to train on.

        Prompt and answer are joined verbatim, without a space. If the joined text's ids begin with
        the prompt's ids, the answer's ids are the rest. Otherwise a token spans the boundary
        ("Answer: " and "18" become " 18"). The prompt's ids are then kept as the policy gets them,
        and the answer is encoded alone or within another text, whichever decodes to the joined text
        after the prompt. If neither does, the answer is encoded alone, counted in num_inexact and
        logged. Returns [length] int32.
        """
        ids = self._after(*self._shown(prompt, template), answer)
        return np.concatenate([ids, np.asarray(self.eos_ids[:1], np.int32)]).astype(np.int32)

    def encode_after(self, before: str, text: str) -> IntArray:
        """Encode a text after another, like encode_answer but without the end token; [length]."""
        return self._after(before, False, text)

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None: there is no such token."""
        token_id = self.hf.backend_tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)

    @property
    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Text of each token added to the vocabulary, and True if it is special."""
        added = self.hf.added_tokens_decoder
        return {int(i): (token.content, bool(token.special)) for i, token in added.items()}

    @property
    def special_tokens(self) -> dict[int, str]:
        """Text of each special token; `decode` omits these."""
        return {i: text for i, (text, special) in self.added_tokens.items() if special}

    def decode_all(self, token_ids: IntArray | Sequence[int]) -> str:
        """Decode ids with their special tokens."""
        return self._decode_all(np.asarray(token_ids, np.int32))

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer has its own chat template."""
        return bool(self.hf.chat_template)

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opens_turn: bool = True,
        template: str | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> str:
        """Render messages with a chat template. Raises DataError if it refuses them.

        Args:
            messages: the conversation.
            tools: available tools, as OpenAI's function tools.
            opens_turn: start the policy's turn after them.
            template: Jinja text; None: the tokenizer's own.
            arguments: further variables of the template, such as enable_thinking.
        """
        kwargs = dict(arguments or {}, add_generation_prompt=opens_turn, tokenize=False)
        try:
            with self._lock:
                text = self.hf.apply_chat_template(
                    [dict(m) for m in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=template,
                    **kwargs,
                )
        except Exception as error:
            reason = f"{type(error).__name__}: {in_a_line(error)}"
            raise DataError(
                f"the tokenizer's chat template fails on {len(messages)} messages of "
                f"{', '.join(dict.fromkeys(str(m.get('role')) for m in messages))}: {reason}. "
                "Give messages that it can write, or another template (data.chat_format)."
            ) from error
        return str(text)

    def decode(self, token_ids: IntArray | Sequence[int]) -> str:
        """Decode ids, omitting end tokens, special tokens and ids without a token."""
        ids = [int(i) for i in token_ids if int(i) not in self.eos_ids]
        with self._lock, _as_data_error(f"the tokenizer cannot decode {len(ids)} tokens"):
            return str(self.hf.backend_tokenizer.decode(ids, skip_special_tokens=True))

    def count_unknown(self, token_ids: IntArray) -> int:
        """Return the number of ids [n] without a token, as in a vocabulary that is padded beyond
        the tokenizer's; they are missing in texts. Logs a warning the first time that 1 % of the
        ids have no token."""
        count = int(np.count_nonzero(~np.isin(token_ids, self._known)))
        if count * 100 >= len(token_ids) > 0 and not self._warned:
            self._warned = True
            log.warning(
                "the policy samples ids that have no token, %d of %d here (the tokenizer has %d "
                "tokens): texts, rewards and judges do not see them; see rollout/unknown_tokens",
                count,
                len(token_ids),
                len(self._known),
            )
        return count

    def token_text(self, token_id: int) -> str:
        """Return one token's text, also for special tokens; half a character is U+FFFD."""
        with self._lock, _as_data_error(f"the tokenizer cannot decode token {token_id}"):
            return str(self.hf.backend_tokenizer.decode([token_id], skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, also for a part of a character. A special
        token gives the bytes of its text; an id without a token gives no bytes."""
        piece = self._bytes_of(token_id)
        return self.token_text(token_id).encode() if piece is None else piece

    @cached_property
    def bytes_in_text(self) -> Callable[[int], bytes] | None:
        """A function from a token's id to the bytes that it adds to the result of decode. None: the
        tokenizer is not byte-level, so texts are not just the bytes of their tokens."""
        if not joins_bytes(self.hf.backend_tokenizer):
            return None
        unwritten = {*self.special_tokens, *self.eos_ids}
        return lambda token_id: b"" if token_id in unwritten else self.token_bytes(token_id)

    @property
    def writes_bytes(self) -> bool:
        """Whether a text is just the bytes of its tokens (token_bytes), one after another."""
        return writes_bytes(self.hf.backend_tokenizer)

    @cached_property
    def _bytes_of(self) -> Callable[[int], bytes | None]:
        return bytes_of_tokens(self.hf.backend_tokenizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face tokenizer directory. An existing chat template is replaced, or
        removed if this tokenizer has none. Raises DataError."""
        try:
            if not self.has_chat_template:
                (Path(folder) / TEMPLATE_FILE).unlink(missing_ok=True)
            with replacing(Path(folder)) as new:
                self.hf.save_pretrained(str(new))
        except OSError as error:
            raise DataError(f"{folder}: the tokenizer cannot be written: {error}.") from None

    def _shown(self, text: str, template: str | None) -> tuple[str, bool]:
        """Return a prompt's text, and whether the tokenizer adds its special tokens."""
        if template is not None or not self.has_chat_template:
            return text if template is None else fill_template(template, text), True
        return self.chat_text([{"role": "user", "content": text}]), False

    def _after(self, shown: str, special: bool, answer: str) -> IntArray:
        """Encode the answer after a text; special: see _shown."""
        before, joined = (self._open_end(t, special) for t in (shown, shown + answer))
        if np.array_equal(joined[: len(before)], before):
            return joined[len(before) :]
        return self._encode_after_ids(before, joined, answer)

    def _open_end(self, text: str, special: bool) -> IntArray:
        """Encode a text that will be continued, without an end token after it."""
        ids = self._encode(text, special=special)
        bare = self._encode(text[-1:], special=special)
        return ids[:-1] if len(bare) > 1 and bare[-1] in self.eos_ids else ids

    def _encode_after_ids(self, before: IntArray, joined: IntArray, answer: str) -> IntArray:
        """Encode the answer such that it decodes to the text of `joined` after `before`."""
        text = self._decode_all(joined)
        for ids in self._encodings(answer):
            if self._decode_all(np.concatenate([before, ids])) == text:
                return ids
        with self._lock:
            self.num_inexact += 1
            count = self.num_inexact
        if count == 1 or count % 100 == 0:
            log.warning(
                "%d answers so far have no tokens that reproduce the joined text of prompt and "
                "answer, which ends %s; they are encoded alone",
                count,
                _cut(text[-40:]),
            )
        return self.encode(answer)

    def _encodings(self, answer: str) -> Iterator[IntArray]:
        """Yield ids of a text alone, then within other texts.

        Alone, a tokenizer may add a space or a start mark before it, as SentencePiece does.
        """
        yield self.encode(answer)
        for anchor in ANCHORS:
            head, full = self.encode(anchor), self.encode(anchor + answer)
            if np.array_equal(full[: len(head)], head):
                yield full[len(head) :]

    def _decode_all(self, token_ids: IntArray) -> str:
        """Decode ids, including special tokens; image tokens as soft tokens."""
        if self.images is not None:
            token_ids = self.images.plain(token_ids)
        with self._lock, _as_data_error(f"the tokenizer cannot decode {len(token_ids)} tokens"):
            ids = [int(i) for i in token_ids]
            return str(self.hf.backend_tokenizer.decode(ids, skip_special_tokens=False))

    def most_chars(self, max_tokens: int) -> int:
        """Return the maximum number of characters of a text with at most `max_tokens` tokens. See
        token_bytes."""
        per_token = self._chars_per_token
        if per_token is not None and self.images is not None:
            per_token = max(per_token, len(self.images.form.mark))
        return most_chars(per_token, max_tokens)

    def cannot_fit(self, text: str) -> bool:
        """Return True if a text is refused for its length; see `encode`."""
        try:
            self._check_length(text)
        except TextTooLong:
            return True
        return False

    @cached_property
    def _chars_per_token(self) -> int | None:
        return chars_per_token(self.hf.backend_tokenizer)

    def _check_length(self, text: str) -> None:
        """Raise TextTooLong for a text that cannot fit, before it is encoded: by its length or, for
        a long text, by the tokens of its pieces."""
        limit = self.max_tokens
        if limit is None or len(text) <= limit:
            return
        most = self.most_chars(limit)
        if len(text) > most:
            raise self._too_long(text, f"and these have at most {most:,} characters")
        if len(text) <= max(PIECE, DENSE_CHARS * limit):
            return
        count = 0
        for number, start in enumerate(range(0, len(text), PIECE), 1):
            count += len(self._ids_of(text[start : start + PIECE], special=False))
            if count > 2 * limit + EDGE_TOKENS * number:
                raise self._too_long(text, f"and its first {start + PIECE:,} have {count:,}")

    def _too_long(self, text: str, why: str) -> TextTooLong:
        limit = self.max_tokens or 0
        head = text[:HEAD_CHARS].encode("utf-8", "replace").decode()
        ids = self._ids_of(head, special=False) or [self.pad_id]
        return TextTooLong(
            f"a text of {len(text):,} characters is too long: at most {limit:,} tokens fit, {why}.",
            np.resize(np.asarray(ids, np.int32), limit + 1),
        )

    def _ids_of(self, text: str, *, special: bool) -> list[int]:
        backend = self.hf.backend_tokenizer
        with self._lock, _as_data_error(f"the tokenizer cannot encode {_cut(text)}"):
            if len(text) <= HEAD_CHARS:
                return list(backend.encode(text, add_special_tokens=special).ids)
            # needs less memory, without offsets; releases the GIL
            return list(backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def _encode(self, text: str, *, special: bool) -> IntArray:
        self._check_length(text)
        if not text.isascii() and not _is_unicode(text):
            raise DataError(
                f"the text {_cut(text)} contains half a surrogate pair. Give text in UTF-8."
            )
        return np.asarray(self._ids_of(text, special=special), np.int32)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


HOW_LOADED = ("is_local", "local_files_only")
"""Keys that transformers adds to a tokenizer's settings when it loads one, and would save."""


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load a tokenizer from a Hugging Face directory with tokenizer.json.

    End tokens are the tokenizer's own, and the ones in generation_config.json and config.json. Uses
    no network and runs no code of the directory. Raises DataError.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file() and not (folder / "config.json").is_file():
        raise DataError(
            f"{folder}: not a model's directory: neither tokenizer.json nor config.json is here. "
            "Give one written by save_pretrained, or a complete download."
        )
    if not file.is_file():
        raise DataError(
            f"{folder}: no tokenizer.json here. Point data.tokenizer at a Hugging Face "
            "directory that has one (save_pretrained of a fast tokenizer writes it)."
        )
    hf = _open(folder, file)
    for name in HOW_LOADED:
        hf.init_kwargs.pop(name, None)
    named = [*_eos_of(folder / "generation_config.json"), *_eos_of(folder / "config.json")]
    with _as_data_error(f"{folder}: the tokenizer's special tokens cannot be read"):
        own = [] if hf.eos_token_id is None else [int(hf.eos_token_id)]
        eos_ids = tuple(dict.fromkeys([*own, *named]))
        tokenizer = Tokenizer(hf, eos_ids=eos_ids)
        pad_id = tokenizer.pad_id
    if strange := [i for i in (*eos_ids, pad_id) if not 0 <= i < max(1, tokenizer.vocab_size)]:
        raise DataError(
            f"{folder}: the end or padding token {strange[0]} is not one of the tokenizer's "
            f"{tokenizer.vocab_size} tokens. Copy tokenizer and config.json from the same model."
        )
    if not eos_ids:
        log.warning("%s: no end token is named; answers end at sampler.max_new_tokens only", folder)
    elif not own:
        hf.eos_token = hf.convert_ids_to_tokens(eos_ids[0])  # for saved directories
    try:
        tokenizer.decode(tokenizer.encode_prompt(SAMPLE))
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None
    return tokenizer


def _open(folder: Path, file: Path) -> Any:
    """Load tokenizer.json directly, not with the class that AutoTokenizer would choose."""
    if file.stat().st_size > MAX_FILE_BYTES:
        raise DataError(f"{file}: longer than {MAX_FILE_BYTES:,} bytes: not a tokenizer.")
    with _as_data_error(f"{file}: not a tokenizer"):
        Backend.from_file(str(file))
    with _as_data_error(f"{folder}: the tokenizer cannot be loaded"):
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


@contextlib.contextmanager
def _as_data_error(what: str) -> Iterator[None]:
    """Raise DataError for any error of the libraries, including bare Exception and Rust panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {in_a_line(error)}"
        raise DataError(f"{what}: {reason}. Copy the tokenizer's files again.") from error


def _cut(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _eos_of(file: Path) -> list[int]:
    """Return the eos_token_id of a model's JSON file, or of its text_config, as a list of ids. Old
    files use -1 for none."""
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_text("utf-8"))
        outer, inner = content.get("eos_token_id"), content.get("text_config") or {}
        eos = inner.get("eos_token_id") if outer in (None, -1, [-1], []) else outer
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{file}: not a JSON object: {error}. Copy the file again.") from None
    several = eos if isinstance(eos, list) else [eos]
    return [i for i in several if type(i) is int and i != -1]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Raise DataError if the tokenizer has ids beyond the vocabulary of the model at `where`."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the vocabulary of "
            f"{where} has {vocab_size} entries. Set data.tokenizer to the tokenizer of that model."
        )


def check_same_tokens(tokenizer: Tokenizer, folder: str | Path, size: int, setting: str) -> None:
    """Raise ConfigError unless the folder's tokenizer has the policy's tokens with the same ids.

    Ids from `size` on are not compared. Tokens that only the folder's tokenizer has are logged.
    """
    own, other = (
        {i: token for token, i in t.hf.get_vocab().items() if i < size}
        for t in (tokenizer, load_tokenizer(folder))
    )
    if strange := [i for i, token in own.items() if other.get(i) != token]:
        first = min(strange)
        raise ConfigError(
            f"{setting} has another tokenizer than the policy: {len(strange)} of {len(own)} ids "
            f"differ, such as {first}, which is {own[first]!r} to the policy and "
            f"{other.get(first)!r} there. Choose a model of the same family."
        )
    if more := other.keys() - own.keys():
        log.warning(
            "%s: its tokenizer has %d tokens that the policy's lacks, such as %r",
            setting,
            len(more),
            other[min(more)],
        )


def check_template(template: str) -> None:
    """Raise ConfigError unless the template is a format string with {prompt} and nothing else."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"data.jsonl.template = {template!r}: {error}. Write a brace as {{{{."
        ) from None
    if not names or any(name != "prompt" for name in names):
        raise ConfigError(
            f"data.jsonl.template = {template!r} must contain {{prompt}} and no other field. "
            "Write a brace as {{."
        )


def fill_template(template: str, prompt: str) -> str:
    """Fill {prompt} into the template."""
    return template.format(prompt=prompt)


def chat_tokenizer(words: Iterable[str] = PRINTABLE) -> Tokenizer:
    """Return a tokenizer with one token per word and a chat template, for multi-turn tasks.

    words: texts, often single characters; the longest match is used first. Each mark of the
    template is also one token: roles, the end of a turn (<eos>), thinking, tool calls in Hermes'
    form. A tool is shown only with its name and argument names, to keep prompts short. Other
    characters become <unk>. Raises ConfigError for invalid words.
    """
    texts = list(dict.fromkeys(words))
    special = {PAD, BOS, EOS, UNKNOWN, *CHAT_ROLES, *CHAT_MARKS}
    if not texts or not all(texts) or special & set(texts):
        raise ConfigError(
            f"{len(texts)} words for a tokenizer: give at least one; none may be empty or one of "
            f"{', '.join(sorted(special))}."
        )
    tokenizer = _word_level(texts)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in CHAT_ROLES])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in CHAT_MARKS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return Tokenizer(tokenizer)


def character_tokenizer(alphabet: str) -> Tokenizer:
    """Return a tokenizer with <pad>, <bos>, <eos>, <unk> and one token per character of `alphabet`.

    save_pretrained writes a directory that AutoTokenizer can load.
    """
    return Tokenizer(_word_level(alphabet))


def _word_level(words: Iterable[str]) -> Any:
    """Return a tokenizer of words; every other character is unknown."""
    known = [PAD, BOS, EOS, UNKNOWN, *words]
    backend = Backend(
        models.WordLevel({word: i for i, word in enumerate(known)}, unk_token=UNKNOWN)
    )
    longer = sorted((word for word in words if len(word) > 1), key=len, reverse=True)
    pieces = Regex("|".join([*map(re.escape, longer), r"[\s\S]"]))
    backend.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
