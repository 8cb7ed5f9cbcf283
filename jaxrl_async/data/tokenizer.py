"""The one door to transformers and tokenizers: text to token ids, once, and back."""

import contextlib
import importlib
import json
import logging
import os
import string
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.types import IntArray

log = logging.getLogger(__name__)


def _without_advice(module: str) -> Any:
    """The module, imported without transformers' advice to install PyTorch: nothing here uses it,
    and it reads as if the run could not work. What it has to say later is said."""
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
BARE = "{prompt}"
"""Template of a prompt that stands alone, whatever chat template the tokenizer has."""
ANCHORS = ("\n", "a", ".")
"""Texts that an answer is encoded behind, to see its tokens as they are inside of a text."""
MAX_FILE_BYTES = 2**28
"""Longest tokenizer.json."""
SAMPLE = "What is 12 + 34?\n"
"""What a tokenizer is tried on when it is loaded."""


class Tokenizer:
    """A Hugging Face fast tokenizer with the things that a run needs of it. Thread safe."""

    def __init__(self, hf: Any, *, eos_ids: tuple[int, ...] | None = None) -> None:
        """`eos_ids` end an answer, the first of them is taught; None: the tokenizer's own."""
        self.hf = hf
        hf.backend_tokenizer.no_truncation()  # which would silently cut prompts and answers
        hf.backend_tokenizer.no_padding()
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_ids = own if eos_ids is None else eos_ids
        vocabulary = hf.get_vocab()
        self.vocab_size = 1 + max(
            vocabulary.values(), default=-1
        )  # largest id + 1, added tokens included
        self._lock = threading.Lock()  # the backend's settings are not safe to share
        self.num_inexact = 0  # answers that no tokens make the joined text of, see encode_answer

    @property
    def pad_id(self) -> int:
        """Id of the padding token; the first end token, then 0, where the tokenizer has none."""
        pad = self.hf.pad_token_id
        return int(pad) if pad is not None else next(iter(self.eos_ids), 0)

    @property
    def special_ids(self) -> dict[str, int]:
        """Token ids by "bos" and "pad", of those that the tokenizer names."""
        named = {"bos": self.hf.bos_token_id, "pad": self.hf.pad_token_id}
        return {name: int(i) for name, i in named.items() if i is not None}

    def encode(self, text: str) -> IntArray:
        """Ids of the text as it stands, without special tokens round it; [length] int32."""
        return self._encode(text, special=False)

    def encode_prompt(self, text: str, template: str | None = None) -> IntArray:
        """Ids of a prompt; [length] int32.

        With a template: it, with {prompt} filled in. Else through the tokenizer's chat template as
        one user message, where it has one. Else bare. Tokens that the tokenizer sets before a text
        (bos) are set; an end token that it sets after it is not, since the answer goes on there.
        """
        return self._open_end(*self._shown(text, template))

    def encode_answer(self, prompt: str, answer: str, template: str | None = None) -> IntArray:
        """Ids of an answer behind encode_prompt(prompt, template), and the end token that is
        taught; [length] int32.

        The text is prompt and answer joined as they are: whoever wants a space between them writes
        it. Where the joined text's ids begin with the prompt's, the answer's are the rest. Where
        they do not (a token reaches over the border: "Answer: " and "18" make " 18"), the prompt's
        ids stay as the policy is asked with them, and the answer's are those of the answer alone,
        or of the answer inside of a text, whichever decodes to the joined text behind the prompt's.
        Where neither does, it is the answer alone, counted in num_inexact and logged.
        """
        shown, special = self._shown(prompt, template)
        before, joined = (self._open_end(t, special) for t in (shown, shown + answer))
        begins = np.array_equal(joined[: len(before)], before)
        ids = joined[len(before) :] if begins else self._behind(before, joined, answer)
        return np.concatenate([ids, np.asarray(self.eos_ids[:1], np.int32)]).astype(np.int32)

    def decode(self, token_ids: IntArray) -> str:
        """Text of the ids; end tokens, special tokens and ids without a token are left out."""
        ids = [int(i) for i in token_ids if int(i) not in self.eos_ids]
        with self._lock, _told(f"the tokenizer cannot decode {len(ids)} tokens"):
            return str(self.hf.backend_tokenizer.decode(ids, skip_special_tokens=True))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face tokenizer directory. Raises DataError."""
        try:
            self.hf.save_pretrained(str(folder))
        except OSError as error:
            raise DataError(f"{folder}: the tokenizer cannot be written: {error}.") from None

    def _shown(self, text: str, template: str | None) -> tuple[str, bool]:
        """What a prompt looks like, and whether the tokenizer's special tokens go round it."""
        if template is not None or not self.hf.chat_template:
            return text if template is None else fill_template(template, text), True
        messages = [{"role": "user", "content": text}]
        with self._lock, _told(f"the tokenizer's chat template fails on {_cut(text)}"):
            shown = self.hf.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        return str(shown), False

    def _open_end(self, text: str, special: bool) -> IntArray:
        """Ids of a text that goes on: without an end token that the tokenizer sets after it."""
        ids = self._encode(text, special=special)
        bare = self._encode(text[-1:], special=special)
        return ids[:-1] if len(bare) > 1 and bare[-1] in self.eos_ids else ids

    def _behind(self, before: IntArray, joined: IntArray, answer: str) -> IntArray:
        """Ids of the answer that decode, behind `before`, to what `joined` decodes to."""
        wanted = self._whole_text(joined)
        for ids in self._ways(answer):
            if self._whole_text(np.concatenate([before, ids])) == wanted:
                return ids
        with self._lock:
            self.num_inexact += 1
            count = self.num_inexact
        if count == 1 or count % 100 == 0:
            log.warning(
                "%d answers so far have no tokens that make prompt and answer the joined text, "
                "which ends %s; they are encoded alone",
                count,
                _cut(wanted[-40:]),
            )
        return self.encode(answer)

    def _ways(self, answer: str) -> Iterator[IntArray]:
        """Ids of a text as it stands, then as it is inside of another one, where no space or mark
        of a beginning is set before it (SentencePiece sets one)."""
        yield self.encode(answer)
        for anchor in ANCHORS:
            head, whole = self.encode(anchor), self.encode(anchor + answer)
            if np.array_equal(whole[: len(head)], head):
                yield whole[len(head) :]

    def _whole_text(self, token_ids: IntArray) -> str:
        """Text of the ids, special tokens included."""
        with self._lock, _told(f"the tokenizer cannot decode {len(token_ids)} tokens"):
            ids = [int(i) for i in token_ids]
            return str(self.hf.backend_tokenizer.decode(ids, skip_special_tokens=False))

    def _encode(self, text: str, *, special: bool) -> IntArray:
        with self._lock, _told(f"the tokenizer cannot encode {_cut(text)}"):
            ids = self.hf.backend_tokenizer.encode(text, add_special_tokens=special).ids
        return np.asarray(ids, np.int32)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face directory: tokenizer.json, tokenizer_config.json if there.

    End tokens are the tokenizer's own and those of generation_config.json and config.json. Nothing
    is looked up on a network and no code of the directory runs. Raises DataError.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"{folder}: no tokenizer.json here. Point data.tokenizer at a Hugging Face "
            "directory that has one (save_pretrained of a fast tokenizer writes it)."
        )
    hf = _open(folder, file)
    named = [*_eos_of(folder / "generation_config.json"), *_eos_of(folder / "config.json")]
    with _told(f"{folder}: the tokenizer's special tokens cannot be read"):
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
        hf.eos_token = hf.convert_ids_to_tokens(eos_ids[0])  # so that a saved directory names it
    try:
        tokenizer.decode(tokenizer.encode_prompt(SAMPLE))
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None
    return tokenizer


def _open(folder: Path, file: Path) -> Any:
    """tokenizer.json as it is, whatever class AutoTokenizer would put in its place."""
    if file.stat().st_size > MAX_FILE_BYTES:
        raise DataError(f"{file}: longer than {MAX_FILE_BYTES:,} bytes: not a tokenizer.")
    with _told(f"{file}: not a tokenizer"):
        Backend.from_file(str(file))
    with _told(f"{folder}: the tokenizer cannot be loaded"):
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever the libraries raise as DataError: bare Exception, and Rust's panics, which are not
    even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DataError(f"{what}: {reason}. Copy the tokenizer's files again.") from error


def _cut(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _eos_of(file: Path) -> list[int]:
    """The eos_token_id of a model's JSON file: none, one or several."""
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_text("utf-8")).get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{file}: not a JSON object: {error}. Copy the file again.") from None
    several = found if isinstance(found, list) else [found]
    return [i for i in several if type(i) is int]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Raise DataError where the tokenizer makes ids that the model at `where` has no row for."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the vocabulary of "
            f"{where} has {vocab_size} entries. Set data.tokenizer to the tokenizer of that model."
        )


def check_same_tokens(tokenizer: Tokenizer, folder: str | Path, size: int, setting: str) -> None:
    """Raise ConfigError where an id below `size` that the policy's tokenizer knows is another token
    in the folder's tokenizer, or none. Ids that only that one knows are told in the log."""
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
            f"data.jsonl.template = {template!r} must hold {{prompt}} and no other field. "
            "Write a brace as {{."
        )


def fill_template(template: str, prompt: str) -> str:
    """The template with {prompt} replaced."""
    return template.format(prompt=prompt)


def character_tokenizer(alphabet: str) -> Tokenizer:
    """One token per character of `alphabet`, after <pad>, <bos>, <eos> and <unk>.

    A real tokenizer: save_pretrained writes a directory that AutoTokenizer loads.
    """
    words = [PAD, BOS, EOS, UNKNOWN, *alphabet]
    backend = Backend(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    return Tokenizer(hf)
