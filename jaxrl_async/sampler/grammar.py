"""Constraints of answers: which tokens may come next, by llguidance, on the host.

    Constraint ──check, at submit──> compiled, once ──matching──> Matching of one request
                                                                   ready: forced tokens, mask
                                                                   take:  the tokens that came

Everything depends on the constraint and the request's tokens alone: a request that was preempted,
saved or moved gets the same masks again. The library is imported at the first constraint.
"""

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.errors import RequestRefused, RolloutError, in_a_line
from jaxrl_async.types import BoolArray, Constraint, IntArray, KeptTokens, Request

log = logging.getLogger(__name__)

COMPILED = 256
"""Number of compiled constraints that a sampler keeps."""
SPACES = r"[\x20\x0A\x0D\x09]{0,8}"
"""Whitespace between the parts of JSON: an endless row of spaces would match an unbounded pattern.
A schema's `x-guidance` may set another `whitespace_pattern`."""
KINDS = ("json_object", "json_schema", "regex", "lark", "turn", "choice")
"""Kinds of Constraint."""
CONSTRAINT = "shaping.constraint"
"""The field of a request, for errors."""
MAX_ITEMS = 2**16
"""Maximum alternatives that a grammar may have at one position. llguidance compiles no more symbols
than this; its own default of 2000 fails only at a token."""
LONGEST = 2**20
"""Maximum characters of a constraint."""

Words = NDArray[np.uint32]
"""A mask as bits, [ceil(vocab / 32)]: bit i of word w is token 32 w + i."""


class Grammars:
    """Compiled constraints for the tokens of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab: int) -> None:
        """Read nothing yet.

        Args:
            tokenizer: a data.tokenizer.Tokenizer; None: constraints are refused.
            vocab: number of token ids of the model; ids without a token never match.
        """
        self._tokenizer, self.vocab = tokenizer, vocab
        self._lock = threading.Lock()  # of the dictionary; never held while a grammar compiles
        self._compiled: OrderedDict[Constraint, Future[Any]] = OrderedDict()
        self._prepare_lock = threading.Lock()  # held while the library and the tokens are prepared

    def check(self, request: Request) -> None:
        """Raise RolloutError, with the library's reason, unless the request's constraint can be
        followed. A request without one always passes. Compiles a new constraint on this thread;
        other threads and constraints do not wait for it."""
        constraint = request.constraint
        if constraint is None:
            return
        name = f"request {request.request_id!r}"
        if not request.stop_token_ids:
            raise RequestRefused(
                name,
                CONSTRAINT,
                "needs a stop token, which ends the answer once the text matches. Give "
                "stop_token_ids, such as the tokenizer's end token.",
            )
        if request.forced_length is not None:
            reason = "does not go with forced_length, which ignores the text."
            raise RequestRefused(name, CONSTRAINT, reason)
        self.prepare(constraint, name)

    def prepare(self, constraint: Constraint, name: str = "a request") -> None:
        """Compile a constraint for a later `check`; see ports.PreparesConstraints.
        name: of the request, for errors."""
        try:
            self._matcher(constraint)
        except ValueError as error:
            reason = f"({constraint.kind}) cannot be used: {error}"
            raise RequestRefused(name, CONSTRAINT, reason) from None

    def matching(self, request: Request, token_ids: Sequence[int]) -> "Matching | None":
        """Return the state of a request's constraint after the tokens that it has sampled; None:
        it has no constraint. Raises RolloutError if these do not match."""
        if request.constraint is None:
            return None
        matcher = self._matcher(request.constraint).deep_copy()
        shaping = request.shaping
        assert shaping is not None
        matching = Matching(
            matcher,
            name=request.request_id,
            stop_ids=request.stop_token_ids,
            ends=tuple(self._tokenizer.eos_ids),
            vocab=self.vocab,
            min_tokens=shaping.min_tokens,
        )
        for token in token_ids:
            matching.force()
            matching.take([int(token)])
        return matching

    def _matcher(self, constraint: Constraint) -> Any:
        """Return a constraint's matcher at its start, which is only copied. Compiles it unless it
        is known, or waits for a thread that compiles it. Raises ValueError."""
        with self._lock:
            found = self._compiled.get(constraint)
            is_new = found is None
            if found is None:
                found = self._compiled[constraint] = Future()
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        if is_new:
            try:
                found.set_result(self._compile(constraint))
            except BaseException as error:
                with self._lock:  # a refused one is not kept
                    if self._compiled.get(constraint) is found:
                        del self._compiled[constraint]
                found.set_exception(error)
        return found.result()

    def _compile(self, constraint: Constraint) -> Any:
        """Return a matcher at its start. Raises ValueError."""
        with self._prepare_lock:
            library, tokens = self._named if constraint.kind == "turn" else self._plain
        grammar = _grammar(library.LLMatcher, constraint)
        limits = library.LLParserLimits(max_items_in_row=MAX_ITEMS, step_max_items=16 * MAX_ITEMS)
        matcher = library.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(_reason(matcher.get_error()))
        for warning in matcher.get_grammar_warnings():
            log.warning("a constraint (%s): %s", constraint.kind, _reason(warning))
        return matcher

    @cached_property
    def _plain(self) -> tuple[Any, Any]:
        """llguidance, and the tokenizer in its form: added tokens are text, except special ones."""
        return self._library(names_added=False)

    @cached_property
    def _named(self) -> tuple[Any, Any]:
        """The same, but each added token matches only where a grammar names it."""
        return self._library(names_added=True)

    def _library(self, *, names_added: bool) -> tuple[Any, Any]:
        """Return llguidance, and the tokenizer in its form. Raises ValueError."""
        try:
            import llguidance
        except ImportError:
            raise ValueError(
                "it needs llguidance: pip install 'jaxrl_async[structured]'."
            ) from None
        if self._tokenizer is None:
            raise ValueError(
                "this sampler knows no tokenizer. Give SamplerSettings(tokenizer=...), or a policy "
                "with its tokenizer."
            )
        if not self._tokenizer.writes_bytes:
            raise ValueError(
                "the tokenizer is not byte-level: a text is not just the bytes of its tokens, so "
                "no token can be judged alone. Use a model with a byte-level tokenizer (as of "
                "Llama 3, Qwen, SmolLM or Gemma), or no constraint."
            )
        if not self._tokenizer.eos_ids:
            raise ValueError("the tokenizer names no end token.")
        tokens = _Tokens(self._tokenizer, self.vocab, names_added=names_added)
        wrapped = llguidance.TokenizerWrapper(tokens)
        return llguidance, llguidance.LLTokenizer(wrapped, n_vocab=self.vocab)


class _Tokens:
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab: int, *, names_added: bool) -> None:
        """names_added: tokens that were added to the vocabulary are special, too."""
        self._tokenizer = tokenizer
        self.eos_token_id = int(tokenizer.eos_ids[0])
        known = min(vocab, tokenizer.vocab_size)
        added = {i: text for i, (text, _) in tokenizer.added_tokens.items()}
        special = added if names_added else {**tokenizer.special_tokens}
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)]
        for i in (*special, *tokenizer.eos_ids):
            self.tokens[i] = special.get(i, f"<end {i}>").encode()
        self.tokens += [b""] * (vocab - known)
        self._special = {*special, *tokenizer.eos_ids}
        self.special_token_ids = sorted(self._special)

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text that is certain to come. The name of a special token in it is a text like
        others: its parts are tokenized alone."""
        if isinstance(text, bytes):
            raise TypeError("text, not bytes")  # llguidance asks which one is taken
        ids: list[int] = self._tokenizer.encode(text).tolist()
        if self._special.isdisjoint(ids):
            return ids
        return [i for character in text for i in self._tokenizer.encode(character).tolist()]


def _grammar(library: Any, constraint: Constraint) -> str:
    """Return a constraint as llguidance's grammar. Raises ValueError."""
    kind, text = constraint.kind, constraint.text
    if kind == "regex":
        return str(library.grammar_from_regex(text))
    if kind in ("lark", "turn"):
        return str(library.grammar_from_lark(text))
    if kind == "choice":
        try:
            texts = json.loads(text)
        except ValueError as error:
            raise ValueError(f"its text is not a JSON list: {error}.") from None
        if not (isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts)):
            raise ValueError("its text must be a JSON list of at least one text.")
        # a terminal: alternatives of a rule are slower
        either = " | ".join(map(json.dumps, texts))
        return str(library.grammar_from_lark(f"start: TEXT\nTEXT: {either}"))
    try:
        schema = json.loads(text) if kind == "json_schema" else {"type": "object"}
        return str(library.grammar_from_json_schema(json.dumps(with_spaces(schema))))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its text is no JSON schema: {_reason(str(error))}") from None


def with_spaces(schema: Any) -> Any:
    """Return a JSON schema that allows SPACES between the parts, unless it has its own rule
    (x-guidance)."""
    if schema is True:
        schema = {}
    own = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(own, dict) or own.get("whitespace_flexible") is False:
        return schema
    return {**schema, "x-guidance": {"whitespace_pattern": SPACES, **own}}


def _reason(message: str) -> str:
    if message.startswith("panic: assertion failed: grammar.symbols"):
        return "it has too many parts: llguidance compiles at most about 65,000."
    return in_a_line(ValueError(message), 400)


class Matching:
    """The state of a constraint in one request. Only the sampler's thread uses it.

    Tokens that are certain (a schema's key after its first letter) are forced: each is its
    position's only possible token, of log-prob 0. Which are certain depends on the tokens before
    them alone.
    """

    def __init__(
        self,
        matcher: Any,
        *,
        name: str,
        stop_ids: tuple[int, ...],
        ends: tuple[int, ...],
        vocab: int,
        min_tokens: int,
    ) -> None:
        """Begin before the first token.

        Args:
            matcher: an LLMatcher that nothing else uses.
            name: the request's id, for errors.
            stop_ids: possible where the text matches, and where it needs one as a part of it.
            ends: the tokenizer's end tokens.
            vocab: number of token ids.
            min_tokens: stop tokens are possible from here on, or if no other token is.
        """
        self._matcher, self._name = matcher, name
        self._stop_ids = stop_ids
        self._vocab, self._width, self._least = vocab, -(-vocab // 32), min_tokens
        self._stops = packed_words(np.asarray(stop_ids, np.int32), self._width)
        self._no_ends = ~packed_words(np.asarray(ends, np.int32), self._width)
        self._no_stops = self._no_ends & ~self._stops
        self._num_taken = 0  # tokens taken
        self.forced: list[int] = []  # tokens that come next; the matcher has them already
        self._mask: Words | None = None  # of the token after them
        self._forced_is_known = False  # whether `forced` is of the next token

    def force(self) -> None:
        """Find the tokens that are certain to come next."""
        if self._forced_is_known:
            return
        self._forced_is_known = True
        forced = [int(t) for t in self._matcher.compute_ff_tokens()]
        stop = next((i for i, t in enumerate(forced) if self._is_end(t)), len(forced))
        self.forced = forced[:stop]
        if self.forced and not self._matcher.consume_tokens(self.forced):
            self._fail()

    def mask(self) -> Words:
        """Return the possible tokens after `forced` as bits, [ceil(vocab / 32)]."""
        self.force()
        if self._mask is None:
            words = np.zeros(self._width, "<u4")
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                self._fail()
            accepts = self._matcher.is_accepting()
            others = words & self._no_stops
            early = self._num_taken + len(self.forced) < self._least and others.any()
            stops = self._stops if accepts else words & self._no_ends & self._stops
            self._mask = others if early else others | stops
            if not self._mask.any():
                self._fail()
        return self._mask

    def masks_of(self, count: int) -> list[Words]:
        """Return the masks of the next `count` tokens; at most one comes after `forced`."""
        masks = [packed_words(np.asarray([t]), self._width) for t in self.forced[:count]]
        return masks if count <= len(masks) else [*masks, self.mask()]

    def take(self, token_ids: Sequence[int]) -> None:
        """Note tokens that were sampled. Raises RolloutError for one that does not match."""
        for token in token_ids:
            self._num_taken += 1
            if self.forced:
                if token != self.forced.pop(0):
                    self._fail(token)
                continue
            self._forced_is_known, self._mask = False, None
            if token in self._stop_ids:
                self._forced_is_known = True
            elif not self._matcher.consume_token(token):
                self._fail(token)

    def _is_end(self, token: int) -> bool:
        words = self._no_stops
        return not int(words[token // 32]) >> (token % 32) & 1

    def _fail(self, token: int | None = None) -> None:
        reason = self._matcher.get_error() or "no token can follow"
        where = "" if token is None else f" token {token} does not match:"
        raise RolloutError(
            f"request {self._name!r}: its constraint failed after {self._num_taken} tokens:{where} "
            f"{_reason(reason)}"
        )


class MaskSets:
    """The masks of a request's tokens, each different one stored once."""

    def __init__(self, vocab: int) -> None:
        """vocab: number of token ids; 0: unknown, sets then always hold the possible ids."""
        self._vocab = vocab
        self._ids: list[IntArray] = []  # of each set
        self._left_out: list[bool] = []  # of each set: it holds the impossible ids
        self._which: list[int] = []  # the set of each token
        self._known: dict[bytes, int] = {}  # set by the digest of its words

    def add(self, words: Words) -> None:
        """Add the mask of the next token."""
        digest = hashlib.blake2b(words.astype("<u4").tobytes(), digest_size=16).digest()
        if digest not in self._known:
            self._known[digest] = len(self._ids)
            bits, vocab = unpacked_bits(words), self._vocab
            inverts = 2 * int(np.count_nonzero(bits)) > vocab > 0
            self._left_out.append(inverts)
            listed = ~bits[:vocab] if inverts else bits
            self._ids.append(np.flatnonzero(listed).astype(np.int32))
        self._which.append(self._known[digest])

    def recall(self, kept: KeptTokens) -> None:
        """Add the masks of tokens that were sampled elsewhere."""
        width = -(-max(self._vocab, 1 + int(kept.ids.max(initial=-1))) // 32)
        sets: dict[int, Words] = {}
        sizes = kept.sizes
        for token, number in enumerate(kept.set_of.tolist()):
            if number not in sets:
                every = np.arange(self._vocab, dtype=np.int32)
                ids: IntArray = kept.of(token) if sizes[token] else every
                sets[number] = packed_words(ids, width)
            self.add(sets[number])

    def record(self) -> KeptTokens:
        """Return the masks of all tokens so far."""
        sets, inverts = len(self._ids), any(self._left_out)
        ids = np.concatenate(self._ids) if sets else np.zeros(0, np.int32)
        return KeptTokens(
            ids=ids.astype(np.int32),
            starts=np.cumsum([0, *map(len, self._ids)], dtype=np.int32),
            which=None if len(self._which) == sets else np.asarray(self._which, np.int32),
            left_out=np.asarray(self._left_out, bool) if inverts else None,
            vocab=self._vocab if inverts else 0,
        )


def unpacked_bits(words: object) -> BoolArray:
    """Return the bits of [W] uint32, [32 W] bool."""
    little = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(little, bitorder="little").view(bool)


def packed_words(ids: IntArray, width: int) -> Words:
    """Return token ids as bits, [width] uint32."""
    bits = np.zeros(32 * width, bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
