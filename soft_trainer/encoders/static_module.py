"""Runs static encoders in `SentenceTransformer(folder, trust_remote_code=True)`, with equal embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from sentence_transformers.base.modules import InputModule
from torch import Tensor

from soft_trainer.encoders.encoding import Encoder, tokenize
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder


class StaticModule(InputModule):
    """The only module of a static encoder, which `modules.json` names.

    `encode_document` weighs tokens as in functions, every other method as in queries.
    """

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = encoder
        self.auto_model = encoder.model  # registers the parameters
        self.tokenizer = encoder.tokenizer
        self.max_seq_length = max(encoder.profile.query_length, encoder.profile.code_length)

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, task: str | None = None, **options
    ) -> dict[str, Tensor]:
        """Tokenizes texts, and weighs their tokens."""
        side = "code" if task == "document" else "query"
        length = min(self.encoder.profile.max_tokens(side), self.max_seq_length)
        rows = tokenize(self.tokenizer, inputs, prompt or "", length)
        return self.auto_model.weigh.after(self.tokenizer, prompt or "").padded(rows, side)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds the embeddings."""
        return features | {"sentence_embedding": self.auto_model(**features).pooler_output}

    def get_embedding_dimension(self) -> int:
        """Returns the number of dimensions of an embedding."""
        return self.encoder.dimensions

    def save(self, output_path: str, *args, **options) -> None:
        """Writes the encoder's files."""
        export_encoder(self.auto_model, self.tokenizer, self.encoder.profile, output_path)

    @classmethod
    def load(cls, model_name_or_path: str, revision: str | None = None, **options) -> StaticModule:
        """Loads an encoder from a folder or the Hub."""
        return cls(load_encoder(model_name_or_path, revision, "cpu"))
