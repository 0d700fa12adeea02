"""Runs static encoders with only NumPy and `tokenizers`, so that a search needs neither torch nor transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.files import read_json
from soft_trainer.fingerprints import file_fingerprint, fingerprint
from soft_trainer.search.index.store import cache_dir

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
PROFILE = "soft_trainer.json"
VECTORS = "word_embedding.weight"  # the name of the tensor
PROBE = "def parseURL(self, *xs):\n\treturn [x_1 for x in xs]  # größer 'a  b'\n"
WORD = re.compile(r"\w+|[^\w\s]")
KEPT_WORDS = 1 << 19
NO_LENGTH = 1_000_000  # tokens, as in the profiles of encoders; importing their module would be slow


def default_static_folder() -> Path:
    """Returns the default output folder of `soft-trainer distil`."""
    return cache_dir() / "static_encoder"


def static_folder(name: str) -> Path | None:
    """Returns the folder of a static encoder, or None if the encoder is not static.

    Args:
        name: a folder, or a Hub name whose files are cached.
    """
    folder = Path(name)
    if not folder.is_dir():
        # An encoder that is not in the cache is downloaded when torch loads it for the first time.
        from huggingface_hub import try_to_load_from_cache

        cached = None
        with suppress(ValueError):
            cached = try_to_load_from_cache(name, CONFIG)
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    if not all((folder / file).is_file() for file in (CONFIG, WEIGHTS, TOKENIZER, PROFILE)):
        return None
    config = read_json(folder / CONFIG)
    if config.get("model_type") != "xlnet" or config.get("n_layer") != 0:
        return None
    return folder


class StaticSearchEncoder:
    """A static encoder for search. Its embeddings, float32[n, d], have length one and are compared by dot product.

    Args:
        name: the folder or Hub name that identifies the encoder in an index.
        folder: the folder that contains its files.
        truncate_dim: the number of leading dimensions to keep. By default, all.

    Raises:
        UserError: a file cannot be read, or the encoder has fewer dimensions than `truncate_dim`.
    """

    def __init__(self, name: str, folder: Path, truncate_dim: int | None = None):
        # Imported here, so that a search by words does not wait for them.
        from safetensors import SafetensorError, safe_open
        from tokenizers import Tokenizer

        self.name = name
        self.truncate_dim = truncate_dim
        self._profile = read_json(folder / PROFILE)
        files = [file_fingerprint(folder / file) for file in (WEIGHTS, TOKENIZER)]
        self.identity = fingerprint("static", files, json.dumps(self._profile, sort_keys=True))
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        try:
            with safe_open(folder / WEIGHTS, framework="numpy") as file:
                self._vectors = file.get_tensor(VECTORS)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / WEIGHTS}: cannot be read: {error}") from error
        self._ids: dict[str, list[int]] = {}  # the token ids of words
        self._splits_words = self._splits()
        dimensions = self._vectors.shape[1]
        if truncate_dim is not None and not 1 <= truncate_dim <= dimensions:
            raise UserError(f"truncate_dim={truncate_dim}: must be a whole number from 1 to {dimensions}")

    def queries(self, texts: list[str]) -> np.ndarray:
        """Embeds queries."""
        length = self._profile["query_length"]
        rows = self._tokenized([self._profile["query_prefix"] + text for text in texts])
        return self._normalized(np.array([self._vectors[ids[:length]].sum(0) for ids in rows]))

    def codes(self, texts: list[str], languages: list[str]) -> np.ndarray:
        """Embeds pieces of code. Languages are ignored."""
        length = self._profile["code_length"]
        texts = [self._profile["code_prefix"] + text for text in texts]
        if not self._splits_words or length < NO_LENGTH:
            return self._normalized(_sums([ids[:length] for ids in self._tokenized(texts)], self._vectors))
        # The vectors of a word are added up only once for all texts.
        words = [WORD.findall(text) for text in texts]
        distinct = set(chain.from_iterable(words))
        self._learn(distinct)
        word_vectors = _sums([self._ids[word] for word in distinct], self._vectors)
        number = {word: place for place, word in enumerate(distinct)}
        return self._normalized(_sums([list(map(number.__getitem__, text)) for text in words], word_vectors))

    def _normalized(self, sums: np.ndarray) -> np.ndarray:
        """Scales sums of vectors to length one. The sums need not be divided by the number of tokens first."""
        embeddings = sums[:, : self.truncate_dim]
        norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
        return embeddings / np.maximum(norms, 1e-12)

    def _tokenized(self, texts: list[str]) -> list[list[int]]:
        """Returns the token ids of each text. Every distinct word is tokenised once, which is three times as fast."""
        if not self._splits_words:
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        words = [WORD.findall(text) for text in texts]
        self._learn(set(chain.from_iterable(words)))
        return [list(chain.from_iterable(map(self._ids.__getitem__, each))) for each in words]

    def _learn(self, words: set[str]) -> None:
        """Tokenises the words that have not been seen before."""
        if len(self._ids) > KEPT_WORDS:
            self._ids.clear()
        self._add(sorted(word for word in words if word not in self._ids))

    def _add(self, words: list[str]) -> None:
        """Tokenises words in a single call, which is five times as fast as one call per word."""
        encoding = self._tokenizer.encode(" ".join(words), add_special_tokens=False)
        starts = np.fromiter(map(itemgetter(0), encoding.offsets), np.int64, len(encoding.ids))
        ends = np.cumsum([len(word) + 1 for word in words])
        tokens = encoding.ids
        first = 0
        for word, last in zip(words, np.searchsorted(starts, ends).tolist(), strict=True):
            self._ids[word] = tokens[first:last]
            first = last

    def _splits(self) -> bool:
        """Returns True if a text's ids are the concatenated ids of its words."""
        words = [self._tokenizer.encode(word, add_special_tokens=False).ids for word in WORD.findall(PROBE)]
        return self._tokenizer.encode(PROBE, add_special_tokens=False).ids == list(chain.from_iterable(words))


def _sums(rows: Sequence[Sequence[int]], vectors: np.ndarray) -> np.ndarray:
    """Sums vectors, float32[rows, d]. Each row is a list of indices into `vectors`."""
    from scipy.sparse import csr_array  # slow to import, and a search has too few to need it

    ends = np.cumsum([0, *map(len, rows)])
    numbers = np.fromiter(chain.from_iterable(rows), np.int32, ends[-1])
    counts = csr_array((np.ones(len(numbers), np.float32), numbers, ends), shape=(len(rows), len(vectors)))
    return counts @ vectors
