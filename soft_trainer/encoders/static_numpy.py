"""Runs static encoders with only NumPy and `tokenizers`, so that a search needs neither torch nor transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path

import numpy as np

from soft_trainer.encoders.onnx import TOKENIZER, check_dimensions, normalized
from soft_trainer.errors import UserError
from soft_trainer.files import PROFILE_FILE, SETTINGS_FILE, cache_dir, read_json
from soft_trainer.fingerprints import file_fingerprint, fingerprint

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
VECTORS = "word_embedding.weight"  # the name of the tensor
PROBE = "def parseURL(self, *xs):\n\treturn [x_1 for x in xs]  # größer 'a  b'\n"
WORD = re.compile(r"\w+|[^\w\s]")
KEPT_WORDS = 1 << 19
NO_LENGTH = 1_000_000  # tokens; a tokenizer without a maximum length reports a much larger number


def default_static_folder() -> Path:
    """Returns the default output folder of `soft-trainer distil`."""
    return cache_dir() / "static_encoder"


def is_static_config(config: Mapping) -> bool:
    """Returns True if this is the content of a static encoder's `config.json`."""
    return config.get("model_type") == "xlnet" and config.get("n_layer") == 0


def is_static_folder(folder: Path) -> bool:
    """Returns True if `StaticEncoder` can run a folder's encoder: static, with mean pooling and cosine scores."""
    if not all((folder / file).is_file() for file in (CONFIG, WEIGHTS, TOKENIZER, PROFILE_FILE)):
        return False
    profile = read_json(folder / PROFILE_FILE)
    if not is_static_config(read_json(folder / CONFIG)):
        return False
    means = profile["pooling"] == "mean" and profile["include_prompt"]
    unit = profile["normalize"] and not _truncate_dim(folder)
    return means and (unit or profile["score_function"] == "cosine")


def _truncate_dim(folder: Path) -> int:
    """Returns the number of leading dimensions to keep that an encoder's files give, or 0."""
    settings = folder / SETTINGS_FILE
    return (settings.is_file() and read_json(settings).get("truncate_dim")) or 0


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
        # As in `log_weights` in `pooling.py`. A folder of an earlier release does not have the field.
        self._log = self._profile.get("token_weights") == "log"
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
        # Zeros in the sums exclude unknown tokens. An encoder saved by an earlier release has another vector here.
        unknown = self._tokenizer.token_to_id(getattr(self._tokenizer.model, "unk_token", None) or "")
        if unknown is not None:
            vectors[unknown] = 0
        self._vectors = vectors
        self._ids: dict[str, list[int]] = {}  # the token ids of words
        self._splits_words = self._splits()
        check_dimensions(truncate_dim, self._vectors.shape[1])
        self.dimensions = truncate_dim or _truncate_dim(folder) or self._vectors.shape[1]

    def encode(self, texts: Sequence[str], side: str, languages: Sequence[str] | None = None) -> np.ndarray:
        """Embeds texts; see `TextEncoder`."""
        prefix = self._profile[f"{side}_prefix"]
        length = self._profile[f"{side}_length"]
        texts = [prefix + text for text in texts]
        if side == "query":  # a search has one query, which does not need SciPy
            sums = np.array([self._sum(ids[:length]) for ids in self._tokenized(texts)])
        elif self._splits_words and length >= NO_LENGTH:
            sums = self._sums_of_words(texts)
        else:
            rows = [ids[:length] for ids in self._tokenized(texts)]
            sums = self._saturated(_counts(rows, len(self._vectors))) @ self._vectors
        # There is no need to divide the sums by the number of tokens, because embeddings have unit length.
        return normalized(sums.reshape(len(texts), -1)[:, : self.dimensions])

    def _sum(self, ids: list[int]) -> np.ndarray:
        """Sums the token vectors of a text, with the weights of the profile. Returns float32[d]."""
        if not self._log:
            return self._vectors[ids].sum(0)
        tokens, counts = np.unique(np.array(ids, np.int64), return_counts=True)
        return np.log1p(counts, dtype=np.float32) @ self._vectors[tokens]

    def _sums_of_words(self, texts: list[str]) -> np.ndarray:
        """Sums each text's token vectors, with the weights of the profile. Returns float32[n, d].

        The tokens of a distinct word are looked up only once.
        """
        words = [self._words(text) for text in texts]
        distinct = set(chain.from_iterable(words))
        self._learn(distinct)
        tokens = _counts([self._ids[word] for word in distinct], len(self._vectors))
        number = {word: position for position, word in enumerate(distinct)}
        texts_words = _counts([list(map(number.__getitem__, text)) for text in words], len(distinct))
        if self._log:
            return self._saturated(texts_words @ tokens) @ self._vectors
        return texts_words @ (tokens @ self._vectors)

    def _saturated(self, counts):
        """Returns how much each token counts in each text, given how often it occurs there, csr_array[n, tokens]."""
        if self._log:
            counts.sum_duplicates()
            np.log1p(counts.data, out=counts.data)
        return counts

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
