"""Checks a run from the shell once its rows are known, before its model is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from soft_trainer.data.split import Split
from soft_trainer.encoders import adapters
from soft_trainer.encoders.encoding import check_dims
from soft_trainer.encoders.hub_files import saved_adapter
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.scratch import parse_size
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.resolve import resolve
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.building import model_name, pretrained_config
from soft_trainer.run.rows import evaluated
from soft_trainer.training.preflight import check_metric, check_rows_of


def check_before_loading(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: SoftInfoNCETrainingArguments,
    estimator,
    splits: Mapping[str, Split],
    profile: EncoderProfile,
) -> None:
    """Checks a command-line run once its rows are known, before its model is loaded.

    Raises:
        UserError: a setting cannot work. The message gives values that work.
    """
    plan = resolve(args, estimator)
    scratch = model_args.from_scratch
    dims = plan.dims or profile.matryoshka_dims
    if not dims:
        size = 0
    elif scratch:
        size, _ = parse_size(scratch)
    else:
        size = pretrained_config(model_args).hidden_size
    check_dims(dims, size)
    check_metric(args, [dim for dim in dims if dim < size], evaluated(splits, "valid"))
    check_new_adapter(model_args, args.merge_lora)
    if scratch and isinstance(estimator, InitialModelEstimator):
        raise UserError(
            f"estimator=initial_model: with from_scratch={scratch} the encoder starts at random, "
            "and so would the weights; use bm25, simcse or trained_model"
        )
    if args.do_train:
        check_rows_of(plan, args, estimator, splits["train"])


def check_new_adapter(model_args: ModelArguments, merge: bool) -> None:
    """Checks the LoRA options against the encoder before it is loaded.

    Raises:
        UserError: `lora_r` is set for an encoder from scratch or for an existing adapter, or `merge` is set without
            an adapter.
    """
    new = model_args.lora_r is not None
    saved = None
    if new:
        adapters.import_peft()
    if model_args.from_scratch:
        if new:
            raise UserError("lora_r: an encoder from scratch has no trained weights to freeze; drop lora_r")
    else:
        name = model_name(model_args)
        saved = saved_adapter(name, model_args.model_revision)
        if new and saved:
            raise UserError(
                f"lora_r: {name} is already an adapter; training continues from it, so drop the LoRA options"
            )
    if merge and not (new or saved):
        raise UserError("merge_lora: no adapter to merge; set lora_r, 16 for example")
