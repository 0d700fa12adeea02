"""Chooses the defaults that depend on the encoder, for the command line, recipes and Python."""

from __future__ import annotations

from soft_trainer.encoders.hub_files import repository_file
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.declared import changed_options, declared_options
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.terminal import print_on_main

RECIPE = "hard_batches.yaml"


def apply_default_recipe(
    data_args: DataArguments,
    args: SoftInfoNCETrainingArguments,
    profile: EncoderProfile,
    model: str | None,
    revision: str | None = None,
) -> None:
    """Applies `recipes/hard_batches.yaml` if it is known to help the encoder, and prints the options that it sets.

    The recipe helps pretrained encoders that have sentence-transformers files and cosine scores. Such an encoder can
    find and weight similar rows before it is trained. Options that were given keep their values. A run that sets any
    option for batches or weights keeps the usual defaults, and so do all other encoders.

    Args:
        model: the folder or Hub name of the pretrained encoder, or None for an encoder from scratch.
    """
    given = args.named | changed_options(args).keys() | changed_options(data_args).keys()
    declared = declared_options(data_args) | declared_options(args)
    chosen = any(name in declared and declared[name].group in ("weights", "batches") for name in given)
    if not model or not args.do_train or chosen or profile.score_function != "cosine":
        return
    if args.per_device_train_batch_size * args.world_size < 2 * args.group_size:
        return
    if repository_file(model, "modules.json", revision) is None:
        return
    changed = []
    for name, value in read_recipe(RECIPES / RECIPE).items():
        target = next((target for target in (data_args, args) if hasattr(target, name)), None)
        if target is not None and name not in given:
            setattr(target, name, value)
            changed.append(f"--{name} {value}")
    options = " ".join(changed)
    print_on_main(f"This encoder gets hard batches by default: {options}. --estimator bm25 turns them off.")
