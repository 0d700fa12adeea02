"""Runs static encoders with only NumPy and `tokenizers`, so that a search needs neither torch nor transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from soft_trainer.encoders.onnx import TOKENIZER, check_dimensions, normalized
from soft_trainer.errors import UserError
from soft_trainer.system.files import PROFILE_FILE, SETTINGS_FILE, cache_dir, read_json
from soft_trainer.system.fingerprints import file_fingerprint, fingerprint
from soft_trainer.system.packaged import VECTORS, WEIGHTS

if TYPE_CHECKING:
    from scipy.sparse import csr_array

CONFIG = "config.json"
MODEL_TYPE = "soft_trainer_static"
FIRST, HALF = 8.0, 4.0  # the weight of a function's first token, and the position that has half of it
PROBE = "def parseURL(self, *xs):\n\treturn [x_1 for x in xs]  # größer 'a  b'\n"
WORD = re.compile(r"\w+|[^\w\s]")
KEPT_WORDS = 1 << 19
NO_LENGTH = 1_000_000  # tokens; a tokenizer without a maximum length reports a much larger number


def default_static_folder() -> Path:
    """Returns the default output folder of `soft-trainer distil`."""
    return cache_dir() / "static_encoder"


def is_static_config(config: Mapping) -> bool:
    """Returns True if this is the content of a static encoder's `config.json`."""
    return config.get("model_type") == MODEL_TYPE


def is_static_folder(folder: Path) -> bool:
    """Returns True if this is the folder of a static encoder."""
    files = (CONFIG, WEIGHTS, TOKENIZER, PROFILE_FILE)
    return all((folder / file).is_file() for file in files) and is_static_config(read_json(folder / CONFIG))


def _truncate_dim(folder: Path) -> int:
    """Returns the number of leading dimensions to keep that an encoder's files give, or 0."""
    settings = folder / SETTINGS_FILE
    return (settings.is_file() and read_json(settings).get("truncate_dim")) or 0


def token_weights(
    rows: Sequence[Sequence[int]], size: int, side: str, unknown: int | None = None, prompt_length: int = 0
) -> csr_array:
    """Computes how much each token counts in each text: log(1 + c), where c sums the weights of its occurrences.

    In a query or a chunk, each occurrence weighs 1. What a function does stands first, in its name and signature, so
    an occurrence at position p weighs `FIRST` / (1 + p / `HALF`). Unknown tokens are not counted.

    Args:
        rows: each text's token ids.
        size: the number of tokens in the vocabulary.
        side: "query", "code" or "chunk".
        unknown: the id of the unknown token, or None.
        prompt_length: the number of known tokens before the text of a function, which weigh 1 each.

    Returns:
        Sparse, float32[rows, size].
    """
    from scipy.sparse import csr_array  # slow to import, and a search has too few texts to need it

    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    tokens = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
    known = np.ones(len(tokens), bool) if unknown is None else tokens != unknown
    tokens = tokens[known]
    lengths = np.bincount(np.repeat(np.arange(len(rows)), lengths)[known], minlength=len(rows))
    starts = np.cumsum([0, *lengths])
    weights = np.ones(len(tokens))
    if side == "code":
        positions = np.arange(len(tokens)) - np.repeat(starts[:-1], lengths) - prompt_length
        weights = np.where(positions < 0, 1, FIRST / (1 + positions.clip(min=0) / HALF))
    counts = csr_array((weights, tokens, starts), shape=(len(rows), size))
    return _saturated(counts)


class StaticEncoder:
    """A static `TextEncoder` that runs without torch. Its embeddings have unit length.

    Args:
        folder: the encoder's folder.
        truncate_dim: the number of leading dimensions to keep. By default, all dimensions.

    Raises:
        UserError: a file cannot be read, or the encoder has fewer dimensions than `truncate_dim`.
    """

    runtime = "static"

    def __init__(self, folder: Path, truncate_dim: int | None = None):
        # Imported here, so that a search by words does not wait for them.
        from safetensors import SafetensorError, safe_open
        from tokenizers import Tokenizer

        self._profile = read_json(folder / PROFILE_FILE)
        config = read_json(folder / CONFIG)
        self._unknown = config["unk_token_id"]
        self._prompt_length = config["prompt_length"]
        files = [file_fingerprint(folder / file) for file in (WEIGHTS, TOKENIZER)]
        self.fingerprint = fingerprint("static", files, json.dumps(self._profile, sort_keys=True))
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        self._added = re.compile("|".join(map(re.escape, added)) or "$^", re.IGNORECASE)
        try:
            with safe_open(folder / WEIGHTS, framework="numpy") as file:
                vectors = file.get_tensor(VECTORS)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / WEIGHTS}: cannot be read: {error}") from error
        if self._unknown is not None:
            vectors[self._unknown] = 0
        self._vectors = vectors
        self._ids: dict[str, list[int]] = {}  # the token ids of words
        self._splits_words = self._splits()
        check_dimensions(truncate_dim, self._vectors.shape[1])
        self.dimensions = truncate_dim or _truncate_dim(folder) or self._vectors.shape[1]

    def encode(self, texts: Sequence[str], side: str, languages: Sequence[str] | None = None) -> np.ndarray:
        """Embeds texts; see `TextEncoder`."""
        kind = "query" if side == "query" else "code"
        prefix = self._profile[f"{kind}_prefix"]
        length = self._profile[f"{kind}_length"]
        texts = [prefix + text for text in texts]
        if side == "query":  # a search has one query, which does not need SciPy
            sums = np.array([self._sum(ids[:length]) for ids in self._tokenized(texts)])
        elif side == "chunk" and self._splits_words and length >= NO_LENGTH:
            sums = self._sums_of_words(texts)
        else:
            rows = [ids[:length] for ids in self._tokenized(texts)]
            sums = token_weights(rows, len(self._vectors), side, self._unknown, self._prompt_length) @ self._vectors
        # There is no need to divide the sums by the number of tokens, because embeddings have unit length.
        return normalized(sums.reshape(len(texts), -1)[:, : self.dimensions])

    def _sum(self, ids: list[int]) -> np.ndarray:
        """Sums the token vectors of a query. Returns float32[d]."""
        tokens, counts = np.unique(np.array(ids, np.int64), return_counts=True)
        return np.log1p(counts, dtype=np.float32) @ self._vectors[tokens]

    def _sums_of_words(self, texts: list[str]) -> np.ndarray:
        """Sums each text's token vectors, weighed as in queries. Returns float32[n, d].

        The tokens of a distinct word are looked up only once.
        """
        words = [self._words(text) for text in texts]
        distinct = set(chain.from_iterable(words))
        self._learn(distinct)
        tokens = _counts([self._ids[word] for word in distinct], len(self._vectors))
        number = {word: position for position, word in enumerate(distinct)}
        texts_words = _counts([list(map(number.__getitem__, text)) for text in words], len(distinct))
        return _saturated(texts_words @ tokens) @ self._vectors

    def _tokenized(self, texts: list[str]) -> list[list[int]]:
        """Returns each text's token ids. Tokenizing each distinct word only once is three times as fast."""
        if not self._splits_words:
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        words = [self._words(text) for text in texts]
        self._learn(set(chain.from_iterable(words)))
        return [list(chain.from_iterable(map(self._ids.__getitem__, each))) for each in words]

    def _words(self, text: str) -> list[str]:
        """Splits a text into words. A text that contains a special token, such as `[MASK]`, counts as one word."""
        if self._added.search(text):
            return [text]
        return WORD.findall(text)

    def _learn(self, words: set[str]) -> None:
        """Tokenizes the words that are not in the cache yet, and adds their ids to the cache."""
        if len(self._ids) > KEPT_WORDS:
            self._ids.clear()
        new = sorted(word for word in words if word not in self._ids)
        for text in filter(self._added.search, new):
            self._ids[text] = self._tokenizer.encode(text).ids
        words = [word for word in new if word not in self._ids]
        # A single call is five times as fast as one call per word.
        encoding = self._tokenizer.encode(" ".join(words), add_special_tokens=False)
        starts = np.fromiter(map(itemgetter(0), encoding.offsets), np.int64, len(encoding.ids))
        ends = np.cumsum([len(word) + 1 for word in words])
        tokens = encoding.ids
        first = 0
        for word, last in zip(words, np.searchsorted(starts, ends).tolist(), strict=True):
            self._ids[word] = tokens[first:last]
            first = last

    def _splits(self) -> bool:
        """Returns True if tokenizing a text word by word gives the same ids as tokenizing the whole text."""
        words = [self._tokenizer.encode(word, add_special_tokens=False).ids for word in WORD.findall(PROBE)]
        return self._tokenizer.encode(PROBE).ids == list(chain.from_iterable(words))


def _counts(rows: Sequence[Sequence[int]], size: int):
    """Counts each row's numbers, which are below `size`. Returns a sparse csr_array, float32[rows, size]."""
    from scipy.sparse import csr_array  # slow to import, and a search has too few to need it

    ends = np.cumsum([0, *map(len, rows)])
    numbers = np.fromiter(chain.from_iterable(rows), np.int32, ends[-1])
    return csr_array((np.ones(len(numbers), np.float32), numbers, ends), shape=(len(rows), size))


def _saturated(counts):
    """Returns log(1 + c) for each sum c of a text's equal tokens, float32[n, tokens]."""
    counts.sum_duplicates()
    np.log1p(counts.data, out=counts.data)
    return counts.astype(np.float32)
