"""The defaults for an encoder that is trained for search or similarity: hard batches with soft weights."""

from __future__ import annotations

import dataclasses

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.repository import repository_file
from soft_trainer.options.fields import DataArguments, SoftInfoNCEOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.terminal import print_on_main
from soft_trainer.training.building import model_name

RECIPE = "hard_batches.yaml"
# Whoever names one of these has chosen the batches and the weights.
CHOICES = {"estimator", "estimator_model", "train_sampling_strategy", "bm25_idf", "bm25_scope", "bm25_document_column"}
CHOICES |= {"mixture_shares", "mixture_temperatures"} | {
    field.name for field in dataclasses.fields(SoftInfoNCEOptions)
}
# These change how a batch is computed, which dimensions are trained or what is added to the loss, and leave the
# choice open.
CHOICES -= {"chunk_by_length", "gradient_cache_chunk_size", "gather_negatives", "matryoshka_dims"}
CHOICES -= {"distill_weight", "distill_temperature"}


def take_default_recipe(
    model_args: ModelArguments, data_args: DataArguments, args: SoftInfoNCETrainingArguments, profile: EncoderProfile
) -> None:
    """Sets the options of `recipes/hard_batches.yaml` that nobody gave, where it is known to help, and says so.

    That is for a pretrained encoder with the files of sentence-transformers and cosine scores: it finds similar rows
    and weighs them before training. All other encoders, and runs that name their batches or weights, keep theirs.
    """
    given = getattr(data_args, "given", None)
    if given is None or given & CHOICES or model_args.from_scratch or not args.do_train:
        return
    if profile.score_function != "cosine" or args.per_device_train_batch_size * args.world_size < 2 * args.group_size:
        return
    if repository_file(model_name(model_args), "modules.json", model_args.model_revision) is None:
        return
    changed = []
    for name, value in read_recipe(RECIPES / RECIPE).items():
        target = next((target for target in (data_args, args) if hasattr(target, name)), None)
        if target is not None and name not in given:
            setattr(target, name, value)
            changed.append(f"--{name} {value}")
    options = " ".join(changed)
    print_on_main(f"This encoder gets hard batches by default: {options}. --estimator bm25 turns them off.")
