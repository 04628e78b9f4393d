"""Tokenizers and chat templates in the HTTP process: a pool of threads, a `tokenizers.Tokenizer` copy for each.

transformers' tokenizer classes resolve a model's files into the one Rust tokenizer, once, with torch hidden from transformers (importing
it costs 4.7 s and 245 MB). Only batches are encoded, also a single text: the single call holds the GIL; and without offsets unless a prompt
asks for them. Truncation and padding are never set on the shared object: lengths are cut here, on ids.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec import structs
from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence

from jackfield.client import ModelCard
from jackfield.detokenization import TextStream, token_bytes
from jackfield.errors import BadRequest, ModelError, TokenOutOfVocabulary
from jackfield.pairing import PairFrame, pair_frame
from jackfield.params import SamplingParams
from jackfield.parsers import Dialect
from jackfield.prompts import ChatPrompt, PairPrompt, Prompt, TextPrompt, TokenizedPrompt, TokensPrompt
from jackfield.rendering import ChatRenderer, GuardedTokens, Rendered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transformers import PreTrainedTokenizerFast

__all__ = ["ModelTokenizer", "TokenizerPool", "hide_torch", "pack_ids"]

log = logging.getLogger("jackfield.tokenization")

T = TypeVar("T")

# Up to so many characters a request is encoded on the event loop: a hop to a thread costs 30 us, 100 characters 60 us.
INLINE_CHARS = 400
INLINE_IDS = 2000
# Of a conversation's end, for whoever asks what the template has begun.
TAIL_CHARS = 64


@contextmanager
def hide_torch() -> Iterator[None]:
    """While the block runs, transformers believes that torch is not installed, and remembers it for this process.

    For the process that only tokenizes. Does nothing where torch is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
    level = os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it advises to install torch
    try:
        from transformers.utils import is_torch_available  # noqa: PLC0415  (this is the import that must not see torch)

        is_torch_available()
        yield
    finally:
        importlib.util.find_spec = find_spec
        os.environ["TRANSFORMERS_VERBOSITY"] = level


def pack_ids(token_ids: list[int]) -> bytes:
    """Token ids as the engine takes them: native int32."""
    return array("i", token_ids).tobytes()


class ModelTokenizer:
    """One model's tokenizer: the description of a prompt in, ids out. Methods are synchronous and safe to call from any thread.

    Raises at construction: ModelError when the files hold no fast tokenizer.
    """

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        source = _load(card)
        base: Tokenizer = source.backend_tokenizer
        self.info = _describe(source, base)
        self._source = source
        self.has_chat_template = bool(source.chat_template)
        base.no_truncation()
        base.no_padding()
        if card.lowercase:
            rest = [base.normalizer] if base.normalizer is not None else []
            base.normalizer = NormalizerSequence([Lowercase(), *rest])
        self._serialized = base.to_str()
        self._local = threading.local()
        self._spare = [base]  # for the first thread that encodes: 8 MB for a vocabulary of 30,000
        self.vocab_size = base.get_vocab_size(with_added_tokens=True)
        self._head, self._tail = _special_tokens(card, base)
        self._pair_frame = pair_frame(base)
        # Without this name transformers hands the model no types, and every token is of the first.
        self._has_segments = "token_type_ids" in source.model_input_names
        self._left = source.truncation_side == "left"
        self._special_ids = frozenset(source.all_special_ids)
        self._prefix_lengths: dict[str, int] = {}
        self._control = {token.content: token_id for token_id, token in base.get_added_tokens_decoder().items() if token.special}
        self._special = frozenset(self._control.values())
        templates = source.chat_template.values() if isinstance(source.chat_template, dict) else [source.chat_template]
        self._guarded = GuardedTokens(base, self._serialized, filter(None, templates))
        # To llguidance these are no text: a grammar has to name them by their ids, and free text holds none of them.
        self.tokens_apart = {
            token.content: token_id
            for token_id, token in base.get_added_tokens_decoder().items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self._render = ChatRenderer(card.id, source, self._control, self._guarded.marks)
        self._tokens: dict[int, tuple[str, bytes]] = {}

    def __call__(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """Tokenize all prompts of a request, in order.

        Raises: BadRequest naming the prompt's field, for text that is no text, an id outside the vocabulary, a template's refusal.
        """
        texts: dict[tuple[bool, bool], list[tuple[int, str]]] = {}  # by whether special tokens and offsets are wanted
        pairs: list[tuple[int, PairPrompt]] = []
        tails: dict[int, str] = {}
        results: list[TokenizedPrompt | None] = [None] * len(prompts)
        for position, prompt in enumerate(prompts):
            if isinstance(prompt, TextPrompt):
                wanted = (prompt.add_special_tokens, prompt.with_offsets)
                texts.setdefault(wanted, []).append((position, prompt.prefix + prompt.text))
            elif isinstance(prompt, ChatPrompt):
                rendered = self._render(prompt)
                tails[position] = rendered.tail(TAIL_CHARS)
                if rendered.kept:
                    results[position] = self._trimmed(prompt, self._kept_apart(prompt, rendered), prompt.add_special_tokens)
                else:
                    texts.setdefault((prompt.add_special_tokens, False), []).append((position, rendered.text))
            elif isinstance(prompt, PairPrompt):
                pairs.append((position, prompt))
            elif isinstance(prompt, TokensPrompt):
                self._check_ids(prompt)
                kept = _cut(prompt.token_ids, [], [], self._limit(prompt), self._is_left(prompt))
                results[position] = self._result(prompt, kept, len(prompt.token_ids) - len(kept))
            else:
                raise TypeError(
                    f"preprocess returned {type(prompt).__name__}; TextPrompt, PairPrompt, TokensPrompt or ChatPrompt is expected"
                )
        for (position, _), result in zip(pairs, self._pairs([prompt for _, prompt in pairs]), strict=True):
            results[position] = result
        for (special, with_offsets), chosen in texts.items():
            params = [prompts[position].param for position, _ in chosen]
            encoded = self._encode([text for _, text in chosen], special, params, with_offsets)
            for (position, _), encoding in zip(chosen, encoded, strict=True):
                results[position] = self._text(prompts[position], encoding, special, with_offsets)
        return [
            structs.replace(result, tail=tails[position]) if position in tails else result
            for position, result in enumerate(results)
            if result is not None
        ]

    def _trimmed(self, prompt: Prompt, ids: list[int], special: bool) -> TokenizedPrompt:
        head, tail = (self._head, self._tail) if special else ([], [])
        kept = _cut(ids, head, tail, self._limit(prompt), self._is_left(prompt))
        return self._result(prompt, kept, len(ids) - len(kept))

    def _kept_apart(self, prompt: ChatPrompt, rendered: Rendered) -> list[int]:
        """Ids of a conversation in which a client wrote names of guarded tokens: the template's are tokens, the client's are text.

        As the tokenizer does it, the text is split at tokens and what lies between is encoded by itself; but these are the template's
        alone, and in between there are none.
        """
        pieces, tokens = self._guarded.split(rendered.text)
        between = [rendered.restore(piece) for piece in pieces]
        with self._guarded.as_text(self._tokenizer) as tokenizer:
            encoded = self._encode(between[:1], False, [prompt.param], tokenizer=tokenizer)
            with _no_prefix(tokenizer):
                encoded += self._encode(between[1:], False, [prompt.param] * len(tokens), tokenizer=tokenizer)
        ids = list(encoded[0].ids)
        for token_id, encoding in zip(tokens, encoded[1:], strict=True):
            ids += [token_id, *encoding.ids]
        return [*self._head, *ids, *self._tail] if prompt.add_special_tokens else ids

    def _text(self, prompt: Prompt, encoding: Encoding, special: bool, with_offsets: bool) -> TokenizedPrompt:
        ids = encoding.ids
        result = self._trimmed(prompt, ids, special)
        if not with_offsets:
            return result
        assert isinstance(prompt, TextPrompt)
        head, tail = (self._head, self._tail) if special else ([], [])
        limit, left = self._limit(prompt), self._is_left(prompt)
        offsets = _offsets(encoding.offsets[len(head) : len(ids) - len(tail)], len(prompt.prefix))
        before, after = [None] * len(head), [None] * len(tail)
        return structs.replace(result, offsets=_cut([*before, *offsets, *after], before, after, limit, left))

    def text_stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> TextStream:
        """The text of a choice that will grow, to be used on the calling thread."""
        return TextStream(
            self._tokenizer,
            prompt_ids,
            hidden=self._hidden(params),
            stop=params.stop,
            include_stop=params.include_stop,
        )

    def _hidden(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that the text leaves out."""
        if not params.skip_special_tokens:
            return frozenset()
        return self._special - {self._control[name] for name in params.visible_tokens if name in self._control}

    def token(self, token_id: int) -> tuple[str, bytes]:
        """A token by itself, special ones too: as text (U+FFFD for a part of a character) and as the bytes that it stands for."""
        found = self._tokens.get(token_id)
        if found is None:
            data = token_bytes(self._tokenizer, token_id)
            found = self._tokens[token_id] = (data.decode("utf-8", "replace"), data)
        return found

    def dialect(self) -> Dialect:
        """What parsers of the model's answers are chosen by. The template is the one that tools are rendered with."""
        try:
            template = str(self._source.get_chat_template(None, [])) if self.has_chat_template else ""
        except ValueError:  # of several none is the default, nor for tools
            template = ""
        return Dialect(template=template, special_tokens=frozenset(self._control), tokenizer=self._source)

    def bad_words(self, words: Sequence[str | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Texts as the sequences of tokens that write them, at the begin of a text and within it; ids stay as they are."""
        sequences: list[tuple[int, ...]] = []
        for word in words:
            if isinstance(word, str):
                forms = {word, f" {word.lstrip(' ')}"}
                encoded = self._encode(sorted(forms), False, ["bad_words"] * len(forms))
                sequences += [tuple(encoding.ids) for encoding in encoded if encoding.ids]
            else:
                sequences.append(word)
        return tuple(sequences)

    @property
    def _tokenizer(self) -> Tokenizer:
        """This thread's own copy."""
        tokenizer: Tokenizer | None = getattr(self._local, "tokenizer", None)
        if tokenizer is None:
            try:
                tokenizer = self._spare.pop()
            except IndexError:
                tokenizer = Tokenizer.from_str(self._serialized)
            self._local.tokenizer = tokenizer
        return tokenizer

    def _encode(
        self, texts: list[str], special: bool, params: list[str | None], with_offsets: bool = False, *, tokenizer: Tokenizer | None = None
    ) -> list[Encoding]:
        tokenizer = tokenizer or self._tokenizer
        encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=special)
        except TypeError:
            # tokenizers says only that one of them is no text: half of a surrogate pair has no UTF-8 form.
            for text, param in zip(texts, params, strict=True):
                if not _is_unicode(text):
                    raise BadRequest("The text holds half of a surrogate pair, which is no Unicode text.", param=param) from None
            raise

    def _pairs(self, prompts: list[PairPrompt]) -> list[TokenizedPrompt]:
        """Each text is encoded once, however many pairs it is in."""
        if not prompts:
            return []
        frame = self._pair_frame
        if frame is None:
            raise BadRequest(f"The tokenizer of model `{self.card.id}` has no plain form for pairs of texts, so it takes none.")
        params: dict[str, str | None] = {}
        for prompt in prompts:
            params.setdefault(prompt.text, prompt.first_param or prompt.param)
            params.setdefault(prompt.second, prompt.param)
        encoded = self._encode(list(params), False, list(params.values()))
        ids = {text: encoding.ids for text, encoding in zip(params, encoded, strict=True)}
        return [self._pair(frame, prompt, ids[prompt.text], ids[prompt.second]) for prompt in prompts]

    def _pair(self, frame: PairFrame, prompt: PairPrompt, first: list[int], second: list[int]) -> TokenizedPrompt:
        limit = self._limit(prompt)
        room = len(second) if limit is None else limit - frame.size - len(first)
        if room < 0:
            raise BadRequest(
                f"The first text of the pair has {len(first)} tokens, which with {frame.size} special ones is over the limit of {limit}; "
                "only the second text is cut.",
                param=prompt.first_param or prompt.param,
            )
        if prompt.max_second_tokens is not None:
            room = min(room, prompt.max_second_tokens)
        kept = second[max(len(second) - room, 0) :] if self._is_left(prompt) else second[:room]
        return self._result(prompt, frame.join(first, kept), len(second) - len(kept), frame.segment(first) if self._has_segments else 0)

    def _result(self, prompt: Prompt, ids: list[int], num_cut: int, segment: int = 0) -> TokenizedPrompt:
        if prompt.max_tokens is not None and len(ids) > prompt.max_tokens:
            raise BadRequest(
                f"The text has {len(ids)} tokens, over the request's own max_tokens of {prompt.max_tokens}.", param=prompt.param
            )
        prefix = prompt.prefix if isinstance(prompt, TextPrompt) else ""
        return TokenizedPrompt(
            token_ids=ids,
            prefix_length=self._prefix_length(prefix) if prefix and self.card.exclude_prompt else 0,
            segment=segment,
            num_cut=num_cut,
            text=self._tokenizer.decode(ids, skip_special_tokens=prompt.skip_special_tokens) if prompt.with_text else None,
            token_strs=[self._tokenizer.id_to_token(i) or "" for i in ids] if prompt.with_token_strs else None,
            token_texts=[self.token(i)[0] for i in ids] if prompt.with_token_texts else None,
            param=prompt.param,
        )

    def _prefix_length(self, prefix: str) -> int:
        """Tokens of an instruction with the special tokens before it, as sentence-transformers counts them (base/model.py)."""
        length = self._prefix_lengths.get(prefix)
        if length is None:
            ids = self._tokenizer.encode_batch_fast([prefix])[0].ids
            length = len(ids) - (1 if ids and ids[-1] in self._special_ids else 0)
            if len(self._prefix_lengths) < 1000:
                self._prefix_lengths[prefix] = length
        return length

    def _limit(self, prompt: Prompt) -> int | None:
        if prompt.truncate is None:
            return None
        limit = self.card.max_length
        if prompt.truncate == -1:
            return limit
        if not 1 <= prompt.truncate <= limit:
            raise BadRequest(
                f"truncate_prompt_tokens is {prompt.truncate}; it must be -1 or from 1 to the model's maximum length of {limit}.",
                param="truncate_prompt_tokens",
            )
        return prompt.truncate

    def _is_left(self, prompt: Prompt) -> bool:
        return self._left if prompt.truncation_side is None else prompt.truncation_side == "left"

    def _check_ids(self, prompt: TokensPrompt) -> None:
        size = max(self.vocab_size, self.card.vocab_size) if not prompt.with_text else self.vocab_size
        if prompt.token_ids and not (min(prompt.token_ids) >= 0 and max(prompt.token_ids) < size):
            position, bad = next((i, t) for i, t in enumerate(prompt.token_ids) if not 0 <= t < size)
            raise TokenOutOfVocabulary(token_id=bad, vocab_size=size, param=f"{prompt.param or 'input'}[{position}]")


def _cut(ids: list[T], head: list[T], tail: list[T], limit: int | None, left: bool) -> list[T]:
    """Cut to `limit` tokens (or what there is of each) from one side of the content, keeping the special tokens at both ends."""
    if limit is None or len(ids) <= limit:
        return ids
    room = limit - len(head) - len(tail)
    if room <= 0:
        return [*head, *tail][:limit]
    content = ids[len(head) : len(ids) - len(tail)]
    kept = content[-room:] if left else content[:room]
    return [*head, *kept, *tail]


def _offsets(places: list[tuple[int, int]], prefix: int) -> list[tuple[int, int] | None]:
    """Places in a text from those in the prefix and the text; prefix: its characters. None for what lies in the prefix alone."""
    if not prefix:
        return list(places)
    return [(max(start - prefix, 0), end - prefix) if end > prefix else None for start, end in places]


def _load(card: ModelCard) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer  # noqa: PLC0415  (after hide_torch)

    path = Path(card.path)
    try:
        source = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever transformers raises on third parties' files
        raise ModelError(f"model {card.id!r}: no tokenizer can be loaded from {path}: {error}") from error
    if not getattr(source, "is_fast", False):
        raise ModelError(f"model {card.id!r}: {path} has no fast tokenizer (tokenizer.json), and slow ones are not served")
    names = set(source.vocab_files_names.values())
    if not any((path / name).is_file() for name in names):  # transformers makes an empty tokenizer of nothing
        raise ModelError(f"model {card.id!r}: {path} holds no tokenizer: none of {', '.join(sorted(names))}")
    loaded: PreTrainedTokenizerFast = source
    return loaded


def _special_tokens(card: ModelCard, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text. Raises: ModelError if it is more than a frame around it."""
    probe = "a"
    framed = tokenizer.encode_batch_fast([probe], add_special_tokens=True)[0].ids
    bare = tokenizer.encode_batch_fast([probe], add_special_tokens=False)[0].ids
    for start in range(len(framed) - len(bare) + 1):
        if bare and framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    if not bare:
        raise ModelError(f"model {card.id!r}: its tokenizer gives no token at all for {probe!r}")
    raise ModelError(f"model {card.id!r}: its tokenizer's special tokens are no frame around the text, which is not served")


@contextmanager
def _no_prefix(tokenizer: Tokenizer) -> Iterator[None]:
    """While the block runs, a text counts as the middle of one: it gets no space in front, which some tokenizers give a first word."""
    found = tokenizer.pre_tokenizer
    parts = list(cast("Iterable[object]", found)) if isinstance(found, PreTokenizerSequence) else [found]
    changed = [part for part in parts if isinstance(part, Metaspace) and part.prepend_scheme == "first"]
    for part in changed:
        part.prepend_scheme = "never"
    try:
        yield
    finally:
        for part in changed:
            part.prepend_scheme = "first"


def _describe(source: PreTrainedTokenizerFast, base: Tokenizer) -> dict[str, Any]:
    """The tokenizer's settings without paths and objects: what /tokenizer_info shows."""
    info: dict[str, Any] = {"tokenizer_class": type(source).__name__}
    for key, value in source.init_kwargs.items():
        if key.endswith("_file") or key in ("name_or_path", "tokenizer_object", "local_files_only"):
            continue
        if isinstance(value, (str, int, float, bool, type(None))):
            info[key] = value
        elif hasattr(value, "content"):
            info[key] = value.content
    info |= {name: text for name, text in source.special_tokens_map.items() if isinstance(text, str)}
    continuing = getattr(base.model, "continuing_subword_prefix", None)
    if continuing:
        info["continuing_subword_prefix"] = continuing
    if source.chat_template:
        info["chat_template"] = source.chat_template
    return info


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class TokenizerPool:
    """The threads that tokenize, shared by all models of the server."""

    def __init__(self, num_threads: int) -> None:
        # The engine has the cores: Rust's own parallelism would fight it, and the threads here already work side by side.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._executor = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="tokenizer")

    async def tokenize(self, tokenizer: ModelTokenizer, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """Tokenize on the event loop if it is little, else in a thread. Raises: BadRequest."""
        if _is_little(prompts):
            return tokenizer(prompts)
        return await asyncio.get_running_loop().run_in_executor(self._executor, tokenizer, prompts)

    def close(self) -> None:
        """Wait for the threads to end; what they have not begun is dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _is_little(prompts: Sequence[Prompt]) -> bool:
    chars = ids = 0
    for prompt in prompts:
        if isinstance(prompt, TextPrompt):
            chars += len(prompt.text) + len(prompt.prefix)
        elif isinstance(prompt, PairPrompt):
            chars += len(prompt.text) + len(prompt.second)
        elif isinstance(prompt, TokensPrompt):
            ids += len(prompt.token_ids)
        else:
            return False
        if chars > INLINE_CHARS or ids > INLINE_IDS:
            return False
    return True
