"""Merging at the end of a training: the weights before it are kept, a ratio is chosen, and the model is merged."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from soft_trainer.encoders.adapters import adapter_state, has_adapter, set_adapter_state
from soft_trainer.encoders.profiles import PROFILE_FILE
from soft_trainer.errors import UserError
from soft_trainer.hub.push import UNMERGED
from soft_trainer.merging import RATIOS, RatioResult, check_ratio, choose_ratio, interpolate, scale_adapter
from soft_trainer.terminal import print_on_main, table
from soft_trainer.training.checkpoints import save_encoder
from soft_trainer.training.guard_sets import DIFFERENCE, difference

AUTO = "auto"


def parse_ratio(value: str | float | None) -> float | str | None:
    """Returns `merge_ratio` as a number, "auto", or None.

    Raises:
        UserError: it is neither, or outside its range.
    """
    if value is None or value == AUTO:
        return value
    try:
        ratio = float(value)
    except (TypeError, ValueError):
        raise UserError(f"merge_ratio={value}: a number from 0 to 1, or auto") from None
    check_ratio(ratio, "merge_ratio")
    return ratio


def check_merging(args, has_guards: bool, has_valid: bool) -> None:
    """Refuses options of merging that cannot work.

    Args:
        args: `TrainingArguments`; `merge_ratio` is read if there is one.

    Raises:
        UserError: the option, and what works.
    """
    ratio = parse_ratio(getattr(args, "merge_ratio", None))
    missing = "valid queries (eval_dataset)" if has_guards else "queries that must not get worse: --guard DIR"
    if ratio == AUTO and not (has_guards and has_valid):
        raise UserError(f"merge_ratio=auto: the ratio is chosen by {missing}; name them, or a number, such as 0.5")
    if ratio is not None and (args.fsdp or args.deepspeed):
        raise UserError(
            "merge_ratio: no process of FSDP or DeepSpeed has all weights; use soft-trainer merge after it"
        )


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns a copy of a model's weights, or of its adapter's."""
    state = adapter_state(model) if has_adapter(model) else model.state_dict()
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


class MergeAtEnd:
    """Keeps the weights before a training and merges them with those after it; reports on the guards too.

    Attributes:
        record: of the last training: the ratio, the base, the folder of the unmerged encoder and, with "auto", the
            figures of all ratios. None if nothing was merged.
    """

    def __init__(self):
        self.record: dict | None = None
        self._before: dict[str, Tensor] | None = None

    def begin(self, trainer, resumed: bool) -> None:
        """Copies the weights before training if they will be merged, and measures the guards.

        Args:
            resumed: a checkpoint will be loaded. If the trainer has trained already, its start stays what it was.

        Raises:
            UserError: the weights before training are gone, or the adapter cannot be scaled.
        """
        model = trainer.model
        trained = trainer.state.global_step > 0
        if parse_ratio(getattr(trainer.args, "merge_ratio", None)) is None:
            self._before = None
        elif resumed and trained:
            lost = "merge_ratio: this trainer has trained the encoder; resume with a new trainer"
            if self._before is None:
                raise UserError(lost)
        else:
            self._before = weights_of(model)
            if has_adapter(model):
                scale_adapter(model, 1.0)  # refuses one that cannot be scaled
                old = any(tensor.any() for name, tensor in self._before.items() if "lora_B" in name)
                only_new = "merge_ratio: the adapter is trained already, and only a new one can be scaled to nothing"
                if old:
                    raise UserError(only_new)
        if trained and not resumed:
            trainer.guards.forget("untrained")
        trainer.guards.outputs("untrained")

    def finish(self, trainer) -> None:
        """Merges the model after the last step, and prints the guards before and after."""
        if self._before is None:
            self.record = None
            earlier = Path(trainer.args.output_dir) / UNMERGED
            if trainer.args.should_save and (earlier / PROFILE_FILE).is_file():
                shutil.rmtree(earlier)  # an earlier run into this folder merged
        else:
            self.record = _merge(trainer, self._before)
        if trainer.guards.sets:
            trainer.guards.forget("trained")
            trainer.guards.report(getattr(trainer.args, "guard_tolerance", 0.0))


def _merge(trainer, before: Mapping[str, Tensor]) -> dict:
    """Saves the unmerged encoder, chooses the ratio, and gives the model the merged weights."""
    args = trainer.args
    ratio = parse_ratio(trainer.args.merge_ratio)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if callable(getattr(trainer.optimizer, "eval", None)):  # schedule-free optimizers hold two sets of weights
        trainer.optimizer.eval()
    if args.should_save:
        save_encoder(trainer, Path(args.output_dir) / UNMERGED, merge=args.merge_lora)
    after = weights_of(model)
    record = {"base": model.config._name_or_path or "the start", "models": [UNMERGED]}
    if ratio == AUTO:
        results = _measure_ratios(trainer, model, before, after)
        ratio = choose_ratio(results, args.guard_tolerance)
        print_on_main(f"{ratio:g} has the best valid MRR with guards that fell by at most {args.guard_tolerance:g}")
        record["ratios"] = [{"ratio": each.ratio, "valid": each.valid, **each.guards} for each in results]
    set_merged(model, before, after, ratio)
    print_on_main(f"Merged: {ratio:g} x the weights after training + {1 - ratio:g} x those before it.")
    if ratio == 0:
        print_on_main(f"warning: this is the encoder before training; {UNMERGED} holds the trained one")
    return {"ratio": ratio} | record


@torch.no_grad()
def set_merged(
    model: PreTrainedModel, before: Mapping[str, Tensor], after: Mapping[str, Tensor], ratio: float
) -> None:
    """Gives a model the weights between those before and after training, or its adapter a share of `after`."""
    if has_adapter(model):
        set_adapter_state(model, after, "merge_ratio")
        set_adapter_state(model, scale_adapter(model, ratio), "merge_ratio")
    else:
        model.load_state_dict(interpolate(before, [after], ratio))


def _measure_ratios(trainer, model: PreTrainedModel, before: Mapping, after: Mapping) -> list[RatioResult]:
    """Measures the encoder merged at each ratio, and prints the table."""
    start = trainer.guards.reciprocal_ranks("untrained")
    results = []
    rows = []
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {None: trainer.eval_dataset}
    for ratio in RATIOS:
        set_merged(model, before, after, ratio)
        guards = trainer.guards.reciprocal_ranks() if ratio else start
        outputs = (trainer.predict(queries, trainer.corpus_of(key), "valid") for key, queries in sets.items())
        valid = float(np.mean([output.metrics["valid_mrr"] for output in outputs]))
        results.append(RatioResult(ratio, valid, {name: float(ranks.mean()) for name, ranks in guards.items()}))
        rows.append((f"{ratio:g}", valid, *(difference(start[name], guards[name]) for name in start)))
    titles = (f"guard {name}, {DIFFERENCE}" for name in start)
    print_on_main(table(["merge ratio", "valid MRR", *titles], rows, floats=".4f"))
    return results
