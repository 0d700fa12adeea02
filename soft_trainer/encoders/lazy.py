"""An encoder that is loaded on first use, for callers that start without torch and may never need it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from soft_trainer.dataflow import LANGUAGES
from soft_trainer.errors import UserError


class LazyEncoder:
    """An encoder of `soft_trainer.encoders` that is loaded when first needed, because loading takes seconds.

    Args:
        name: folder or Hub name.
        truncate_dim: keep this many dimensions of every embedding; None keeps those that `load_encoder` keeps.
    """

    def __init__(self, name: str, truncate_dim: int | None = None):
        self.name, self.truncate_dim = name, truncate_dim

    @cached_property
    def loaded(self):
        """The loaded encoder; raises UserError if it cannot be loaded."""
        from transformers.utils import logging

        from soft_trainer.encoders.loading import load_encoder  # imports torch and transformers

        # a report on the weights does not belong in a search's output
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            return load_encoder(self.name, truncate_dim=self.truncate_dim)
        except UserError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UserError(f"{self.name}: its code comes with it, and a search never runs such code") from error

    @cached_property
    def identity(self) -> str:
        """A hash of everything that the embeddings depend on; see `Encoder.identity`."""
        return self.loaded.identity()

    def queries(self, texts: list[str]) -> np.ndarray:
        """Embeddings float32[n, d] of queries, ready for dot products."""
        return self._comparable(self.loaded.encode_queries(texts))

    def codes(self, texts: list[str], languages: list[str]) -> np.ndarray:
        """Embeddings float32[n, d] of pieces, ready for dot products with those of queries."""
        # Text in another language has no data flow: it is read like Python that does not parse.
        known = [language if language in LANGUAGES else "python" for language in languages]
        return self._comparable(self.loaded.encode_codes(texts, known))

    def _comparable(self, embeddings) -> np.ndarray:
        from soft_trainer.encoders.encoding import comparable  # imports torch

        return comparable(self.loaded.profile, embeddings).float().cpu().numpy()
