"""The encoder that a training starts from. Its profile and size are known at once; its weights are loaded later.

The trainer checks rows and settings against the profile and the size, so that a mistake shows before weights load.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from soft_trainer.data.columns import row_texts, text_column
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.adapters import add_lora, has_adapter, import_peft
from soft_trainer.encoders.loading import given_encoder, load_config, load_model, load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, check_lengths, resolve_profile
from soft_trainer.encoders.scratch import kept_tokenizer, parse_size, random_model
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.hub.files import base_of, published_name, reading, reading_base, saved_adapter
from soft_trainer.options.model import ModelArguments
from soft_trainer.run.fingerprint import STARTING_WEIGHTS, content_of
from soft_trainer.system.fingerprints import model_fingerprint, rows_fingerprint


class StartingEncoder:
    """An encoder in memory, as a user passes it to the trainer.

    Attributes:
        profile: how it encodes texts.
        name: the folder or Hub name that it came from, or None.
        label: a short name for folders and tables.
        revision: the revision of `name` on the Hub.
        from_scratch: the size of an encoder that starts with random weights, or None.
        adapter: whether an adapter is trained instead of all weights.
        trust_remote_code: whether code that comes with it may run.
    """

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    revision: str | None = None
    from_scratch: str | None = None
    trust_remote_code = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, profile: EncoderProfile):
        self.model = model
        self.tokenizer = tokenizer
        self.profile = profile
        self.name = model.config._name_or_path or None
        self.label = short_name(self.name)
        self.adapter = has_adapter(model)
        self.config = model.config

    @property
    def size(self) -> int:
        """The number of dimensions of an embedding."""
        return self.profile.truncate_dim or self.config.hidden_size

    def check(self, merge: bool, estimator=None) -> None:
        """Checks the options before weights are loaded.

        Args:
            merge: the option `merge_lora`.
            estimator: the estimator of the training, or None.

        Raises:
            UserError: the encoder has no adapter to merge, or the options don't suit it.
        """
        if merge and not self.adapter:
            raise UserError(
                "merge_lora: the encoder has no adapter to merge; set lora_r, for example to 16 (in Python, add one "
                "with model.add_adapter)"
            )

    def fingerprint(self) -> dict[str, object]:
        """Returns what tells this encoder from others, if no option does. Call it before `load`."""
        return {STARTING_WEIGHTS: model_fingerprint(self.model, dict(self.model.named_parameters()))}

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Hands over the model and its tokenizer: a model that `model_init` replaces must not stay in memory."""
        model = self.model
        self.model = None
        return model, self.tokenizer


class PretrainedEncoder(StartingEncoder):
    """An encoder in a folder or on the Hub.

    Args:
        compare: whether to compare it with sentence-transformers (see `load_model`).
        options: its revision, how to load its weights, and a new adapter.
    """

    def __init__(
        self,
        name: str | Path,
        profile: EncoderProfile,
        compare: bool,
        tokenizer: PreTrainedTokenizerBase | None = None,
        options: ModelArguments | None = None,
    ):
        self.options = options or ModelArguments()
        self.profile = profile
        self.name = str(name)
        self.label = short_name(self.name)
        self.revision = self.options.model_revision
        self.trust_remote_code = self.options.trust_remote_code
        self.tokenizer = tokenizer
        self.compare = compare
        self.saved_adapter = saved_adapter(name, self.revision)
        self.adapter = bool(self.options.lora_r or self.saved_adapter)

    @property
    def config(self):
        """The configuration of the encoder or, if it is an adapter, of its base."""
        base = base_of(self.name, self.revision)
        with nullcontext() if base[0] == self.name else reading_base(self.name), reading(*base):
            return load_config(*base, self.trust_remote_code)

    def check(self, merge: bool, estimator=None) -> None:
        """Raises UserError if a new adapter does not fit, too."""
        super().check(merge)
        if self.options.lora_r is not None:
            import_peft()
            if self.saved_adapter:
                raise UserError(
                    f"lora_r: {self.name} is already an adapter; training continues from it, so drop the LoRA options"
                )

    def fingerprint(self) -> dict[str, object]:
        """Returns the content and the revision that the name refers to."""
        return {"model_name_or_path": content_of("encoder", self.name), "model_revision": self.revision}

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Loads the model and its tokenizer. Adds a LoRA adapter if `lora_r` is set."""
        options = self.options
        source = self.name, self.profile, self.revision, self.trust_remote_code
        tokenizer = self.tokenizer or load_tokenizer(*source)
        check_lengths(self.config.to_dict(), self.profile)
        model = load_model(*source, options.attn_implementation, options.dtype, self.compare)
        if options.lora_r is not None:
            add_lora(model, options, self.revision)
        return model, tokenizer


class EncoderFromScratch(StartingEncoder):
    """A small RoBERTa with random weights, whose tokenizer is trained on the training rows.

    Args:
        size: HIDDENxLAYERS.
    """

    name = None
    adapter = False
    rows: Split  # the training rows; they are loaded after the profile is known

    def __init__(self, size: str, profile: EncoderProfile, vocabulary_size: int, label: str):
        self.from_scratch = size
        self.profile = profile
        self.vocabulary_size = vocabulary_size
        self.label = label

    @property
    def size(self) -> int:
        """The number of dimensions of an embedding."""
        return parse_size(self.from_scratch)[0]

    def check(self, merge: bool, estimator=None) -> None:
        """Raises UserError if the estimator needs a trained encoder, too."""
        super().check(merge)
        if isinstance(estimator, InitialModelEstimator):
            raise UserError(
                f"estimator=initial_model: with from_scratch={self.from_scratch}, the encoder starts with random "
                "weights, so its similarities mean nothing; use bm25, simcse or trained_model"
            )

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Trains the tokenizer, and creates the model."""
        pairs = self.rows.to_pairs()
        columns = [text_column(pairs, getattr(self.profile, f"{side}_columns"), side) for side in SIDES]
        texts = chain.from_iterable(row_texts(pairs, column) for column in columns)
        ends = parse_size(self.from_scratch)[1] > 0
        made_from = rows_fingerprint(pairs, columns)
        tokenizer = kept_tokenizer(texts, made_from, self.profile, self.vocabulary_size, ends)
        return random_model(self.from_scratch, tokenizer, self.profile), tokenizer


def short_name(name: str | None) -> str:
    """Returns a short name of an encoder for folders and tables, such as `unixcoder-base`."""
    return "scratch" if name is None else published_name(name).rsplit("/", 1)[-1]


def starting_encoder(model, tokenizer=None, profile: EncoderProfile | Mapping | None = None) -> StartingEncoder:
    """Returns the encoder that a user passes to the trainer: a model, an `Encoder`, a folder or a name on the Hub.

    Args:
        tokenizer, profile: see `given_encoder`.
    """
    if isinstance(model, StartingEncoder):
        return model
    if isinstance(model, str | Path):
        compare = profile is None or isinstance(profile, Mapping)
        if compare:
            profile = resolve_profile(model).changed(profile or {})
        return PretrainedEncoder(model, profile, compare, tokenizer)
    return StartingEncoder(*given_encoder(model, tokenizer, profile))
