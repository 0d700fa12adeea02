"""Words before the first step: a table of the settings, and lines about those that look unintended."""

from __future__ import annotations

import json

import torch

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.transformer import profile_warnings
from soft_trainer.options.refused import ignored_options
from soft_trainer.terminal import table
from soft_trainer.training.adapters import adapter_settings, adapter_warnings


def banner(trainer) -> str:
    """Returns the settings of a training as a table."""
    args, plan, encoder = trainer.args, trainer.plan, trainer.encoder
    rows = {
        "batch per process": plan.batch_size,
        "processes": f"{plan.processes} ({trainer.accelerator.distributed_type.value})",
        "codes a query meets (N)": plan.global_batch_size,
        "accumulated batches": args.gradient_accumulation_steps,
        "estimator": "none" if trainer.estimator is None else type(trainer.estimator).__name__,
        **plan.effective_loss,
        "batches": plan.strategy,
        **plan.effective_batches,
        "score": f"{encoder.score_function} x {encoder.score_scale:g}, {encoder.pooling} pooling",
        **_prompts(encoder),
        "precision": trainer.precision,
        **adapter_settings(trainer.model),
    }
    if plan.dims:
        rows["trained dimensions"] = ", ".join(map(str, plan.dims))
    return table(("training", ""), list(rows.items()))


def _prompts(encoder: EncoderProfile) -> dict[str, str]:
    """Returns the texts before queries and codes, {} where there are none."""
    note = "" if encoder.include_prompt else ", not pooled"
    prefixes = {"query": encoder.query_prefix, "code": encoder.code_prefix}
    return {f"before every {side}": json.dumps(prefix) + note for side, prefix in prefixes.items() if prefix}


def warnings_of(trainer) -> list[str]:
    """Returns lines about settings that work, but probably not as intended."""
    plan, encoder, model = trainer.plan, trainer.encoder, trainer.model
    warnings = [*ignored_options(trainer.args), *plan.unread(trainer.args, bool(trainer.guards.sets))]
    if encoder.score_function == "cosine" and encoder.score_scale == 1:
        warnings.append(
            "warning: cosine scores lie between -1 and 1, too close together for a softmax to learn from: set "
            "score_scale (20 is usual)"
        )
    half = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.float16, torch.bfloat16}
    if half:
        name = str(half.pop()).removeprefix("torch.")
        warnings.append(
            f"warning: the weights themselves are {name}, so small updates are lost: load the model in "
            "float32 (--dtype float32) and use autocast instead, --bf16 true or --fp16 true"
        )
    warnings += [*profile_warnings(model, encoder), *adapter_warnings(model, trainer.args)]
    dims, size = plan.dims, model.config.hidden_size
    if dims and dims[0] < size:
        warnings.append(
            f"warning: matryoshka_dims leaves {size} out, so the dimensions after the first {dims[0]} do not learn: "
            f"add {size}, unless only shorter embeddings are wanted"
        )
    return warnings
