"""Loads a static encoder in AutoModel and SentenceTransformer, with the installed soft_trainer."""

from soft_trainer.encoders.static_module import StaticModule
from soft_trainer.encoders.static_torch import StaticConfig, StaticModel

__all__ = ["StaticConfig", "StaticModel", "StaticModule"]
