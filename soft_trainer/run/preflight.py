"""Checks the settings against the rows and the encoder before training. `options` checks the settings alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import number_of_arguments

from soft_trainer.data.split import Split
from soft_trainer.encoders import adapters
from soft_trainer.encoders.comparing import LARGEST_COMPARED
from soft_trainer.encoders.encoding import check_dims
from soft_trainer.encoders.loading import check_model, given_encoder, load_model
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, NeighbourEstimator
from soft_trainer.evaluation.results import METRICS
from soft_trainer.evaluation.retrieval import MAP, NDCG, shorter_metric
from soft_trainer.options.choices import FIND_NEIGHBOURS
from soft_trainer.options.defaults import LARGEST_BATCH
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.resolve import Plan, check_codes, resolve
from soft_trainer.options.spec import option_specs
from soft_trainer.run.starting import StartingEncoder, starting_encoder
from soft_trainer.source.extra import needed
from soft_trainer.system import distributed
from soft_trainer.system.terminal import nearest, print_on_main
from soft_trainer.training.negatives import negatives_to_draw
from soft_trainer.training.prepared_rows import make_sampler
from soft_trainer.training.sampler import languages_of

DYNAMIC = "ACCELERATE_DYNAMO_USE_DYNAMIC"
BASE_COMPARED = "_base_compared"  # this attribute of a model with an adapter says that the base was compared


def check_rows_of(plan: Plan, args, estimator, split: Split) -> None:
    """Checks that batches are large enough, that the estimator can read the rows, and that there are hard negatives.

    Raises:
        UserError: a check fails. The message says what is missing.
    """
    strategy = plan.train_sampling_strategy
    if strategy == "similar" and not isinstance(estimator, NeighbourEstimator):
        problem = "needs an estimator"
        if estimator is not None:
            problem = f"{type(estimator).__name__} cannot find similar rows"
        raise UserError(f"train_sampling_strategy=similar: {problem}; use {FIND_NEIGHBOURS}")
    languages = ()
    if strategy == "one_language":
        languages = languages_of(split.to_pairs())
    pairs = len(split.judgments)
    make_sampler(pairs, plan, args, languages=languages)  # raises UserError if the rows lack a column
    check_codes(plan.criterion, min(plan.global_batch_size, pairs if plan.gathers else pairs // plan.processes))
    if isinstance(estimator, Estimator):
        estimator.check(split)
    number, negatives = negatives_to_draw(plan.options, split.judgments)
    if getattr(estimator, "partial", False) and plan.criterion.needs_similarity and not number:
        raise UserError(
            f"{type(estimator).__name__} compares each query with its hard negatives alone: set negatives_per_query "
            "above 0, with a column of negatives in the rows"
        )
    if number and negatives is None and not isinstance(estimator, NeighbourEstimator):
        raise UserError(
            "negatives_per_query: add a column 'negatives' to the rows, or use an estimator that finds similar "
            f"functions: {FIND_NEIGHBOURS}"
        )


def check_metric(args, dims: Iterable[int], eval_dataset, tried: Callable[[], Mapping] | None = None) -> None:
    """Checks that evaluation computes `metric_for_best_model`.

    Args:
        dims: the truncated embedding sizes to measure in addition to full embeddings.
        eval_dataset: the evaluation rows, or a dict of several sets, each with its own metrics.
        tried: evaluates a few rows, with the user's `compute_metrics`, or None if there is no such function.

    Raises:
        UserError: evaluation does not compute the metric. The message suggests a similar one.
    """
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no":
        return
    name = metric.removeprefix("eval_")
    if name == "loss":  # the default of `TrainingArguments` with load_best_model_at_end
        raise UserError(
            'metric_for_best_model="loss": there is no eval_loss, because estimators know only the training rows; set '
            'metric_for_best_model="mrr"'
        )
    names = [*METRICS, *map(shorter_metric, dims), MAP, NDCG]
    measured = list(names)
    if isinstance(eval_dataset, Mapping):
        for key in eval_dataset:
            measured += [f"{key}_{each}" for each in names]
    if name not in measured and tried is not None:
        try:
            measured += [each.removeprefix("eval_") for each in tried()]
        except Exception:  # the user's function may need all rows
            return
    if name not in measured:
        hint = nearest(name, measured, f"use {names[0]!r} or another of {', '.join(measured)}")
        raise UserError(f"metric_for_best_model={metric!r}: this metric is not measured{hint}")
    if name not in names and tried is not None:
        better = "larger" if args.greater_is_better else "smaller"
        print_on_main(f"metric_for_best_model={metric}: taken as better when {better} (greater_is_better)")


def make_plan(of, batch_size: int | None = None) -> Plan:
    """Makes the plan of some settings, and checks it against the rows and the encoder's size.

    Args:
        of: a `Setup`, or a trainer, whose settings may have changed since.
        batch_size: the batch size per process, if it is not the one in the arguments.

    Raises:
        UserError: the settings are incompatible, or a check fails.
    """
    plan = resolve(of.args, of.estimator, batch_size)
    size = of.starting.size
    dims = plan.dims or of.encoder.matryoshka_dims
    if dims:
        check_dims(dims, size)
    if of.compute_metrics is None:
        check_metric(of.args, [dim for dim in dims if dim < size], of.eval_dataset)
    if of.train_split is not None:
        check_rows_of(plan, of.args, of.estimator, of.train_split)
    return plan


def check_encoder(model: PreTrainedModel, tokenizer, profile: EncoderProfile) -> None:
    """Checks that the encoder fits its profile, and has a vector for each token of its tokenizer.

    Raises:
        UserError: a check fails.
    """
    check_model(model, profile)
    vectors = getattr(model.get_input_embeddings(), "num_embeddings", None)
    tokens = max([len(tokenizer) - 1, *tokenizer.get_added_vocab().values()]) + 1
    if vectors is not None and tokens > vectors:
        raise UserError(
            f"processing_class: the tokenizer has {tokens:,} tokens, but the model has vectors for only {vectors:,}; "
            f"call model.resize_token_embeddings({tokens})"
        )
    if profile.data_flow_length:
        needed("tree_sitter")
    if profile.data_flow_length and None in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        raise UserError(
            f"data_flow_length={profile.data_flow_length}: the tokenizer has no tokens that begin and end a function "
            "before its data flow (cls_token, sep_token); set data_flow_length=0"
        )


def rows_of_steps(args) -> int | None:
    """Returns how many training rows `max_steps` can read at most, or None without it. No default batch is larger."""
    if args is None or args.max_steps <= 0:
        return None
    size = max(args.per_device_train_batch_size or 0, LARGEST_BATCH)
    return args.max_steps * size * args.gradient_accumulation_steps * args.world_size


def check_own_collator(plan: Plan, prompt_lengths: Mapping[str, int], model: PreTrainedModel) -> None:
    """Checks that a user's data collator works with the other settings.

    Raises:
        UserError: there are several processes, hard negatives, or prompts that pooling skips, or a static encoder.
    """
    if hasattr(model, "weigh"):
        raise UserError("data_collator: a static encoder weighs tokens in its own collator; drop data_collator")
    if plan.processes > 1:
        raise UserError(f"data_collator: a custom collator works in one process, not in {plan.processes}")
    if plan.options.negatives_per_query:
        raise UserError(
            "data_collator: a custom collator reads only pairs, so it does not support negatives_per_query"
        )
    if any(prompt_lengths.values()):
        raise UserError(
            "data_collator: a custom collator cannot tell which tokens belong to the prompt; set include_prompt=True"
        )


def complete_launch(args, model: PreTrainedModel, profile: EncoderProfile) -> None:
    """Replaces settings of `transformers` and `accelerate launch` that suit other models.

    DDP looks for parameters without gradients only if the model has a pooler that its profile does not read.
    `torch.compile` compiles for any length, because `accelerate launch` asks for one length unless told otherwise.
    """
    if args.ddp_find_unused_parameters is None:
        has_pooler = getattr(model, "pooler", None) is not None
        args.ddp_find_unused_parameters = has_pooler and profile.pooling != "pooler"
    if args.torch_compile and os.environ.get(DYNAMIC) == "False":
        del os.environ[DYNAMIC]


def pads(args, own_collator: bool, accelerator, pooling: str) -> str | None:
    """Returns why a run pads its forward passes, whatever the model, or None.

    Args:
        own_collator: True if the user's data collator makes the model inputs.
        accelerator: the trainer's `Accelerator`.
        pooling: the pooling of the encoder's profile.
    """
    kind = accelerator.distributed_type.value
    reasons = {
        "a custom data_collator pads": own_collator,
        "DeepSpeed is not supported": kind == "DEEPSPEED",
        "FSDP 1 is not supported": kind == "FSDP" and not accelerator.is_fsdp2,
        # A packed pass calls the pooler after the forward pass, when its weights may be divided again.
        "FSDP is not supported with pooling=pooler": kind == "FSDP" and pooling == "pooler",
        "torch_compile is not supported": args.torch_compile,
        # `transformers` divides the noise by the number of tokens in a row, which in a packed pass holds all texts.
        "neftune_noise_alpha adds noise by the length of a row": args.neftune_noise_alpha is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def check_adapter(model: PreTrainedModel, args, profile: EncoderProfile) -> None:
    """Checks that the model's adapter, if any, can be trained, saved, loaded again and merged.

    Args:
        args: the training arguments, with or without `merge_lora`.
        profile: the encoder's profile.

    Raises:
        UserError: a check fails. The message says why, and how to fix it.
    """
    if not adapters.has_adapter(model):
        return
    adapters.check_apart_from_base(model, args.output_dir, "output_dir=")
    _check_saved(model)
    if not getattr(args, "merge_lora", False):
        _check_loadable(model, args.push_to_hub)
        if not hasattr(model, BASE_COMPARED) and distributed.is_main():
            _check_base(model, profile)
            setattr(model, BASE_COMPARED, True)
    elif args.fsdp or args.deepspeed:
        raise UserError("merge_lora: FSDP and DeepSpeed save only the adapter; merge it after training")


def _check_saved(model: PreTrainedModel) -> None:
    """Raises UserError if the adapter is frozen, or if weights outside the adapter are trained but not saved."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(
            "model: the adapter is frozen, because AutoModel freezes adapters that it loads. Load the base, "
            "then call model.load_adapter(FOLDER, is_trainable=True), or make it trainable with requires_grad_"
        )
    adapter = adapters.active_adapter(model)
    saved = adapters.adapter_state(model)
    for name in trained:
        # Saved names lack the adapter's name, and the saved names of DoRA's magnitudes also lack ".weight".
        names = {name}
        for own in (f".modules_to_save.{adapter}", f".{adapter}.weight", f".{adapter}"):
            names.add(name.replace(own, ""))
        if names.isdisjoint(saved):
            raise UserError(
                f"model: {name} is trained but is not part of the adapter, so it would not be saved; freeze it, or "
                "add its module to modules_to_save"
            )


def _check_loadable(model: PreTrainedModel, pushes: bool) -> None:
    """Raises UserError if the saved adapter could not be loaded together with its base, here or from the Hub."""
    base = adapters.base_name(model)
    if not base:
        raise UserError(
            "model: the base has neither a folder nor a name on the Hub, so the saved adapter could not be loaded. "
            "Save and load the base first, or set merge_lora"
        )
    if pushes and Path(base).is_dir():
        raise UserError(
            f"push_to_hub: the adapter needs its base, {base}, which exists only on this machine; set "
            "merge_lora=True, or push the base and train from its name on the Hub"
        )


def _check_base(model: PreTrainedModel, profile: EncoderProfile) -> None:
    """Raises UserError if an adapter's base differs from what the base's name loads, for example after fine-tuning.

    The saved adapter contains only the name, so the changes would be lost. Very large models are not compared.
    """
    quantized = getattr(model.config, "quantization_config", None) is not None
    if quantized or model.num_parameters() > LARGEST_COMPARED or is_deepspeed_zero3_enabled():
        return
    base = adapters.base_name(model)
    revision = model.peft_config[adapters.active_adapter(model)].revision
    has_code = type(model).__module__.startswith("transformers_modules")
    try:
        saved = load_model(base, profile, revision, trust_remote_code=has_code)
    except UserError as error:
        raise UserError(
            f"model: the adapter's base cannot be loaded, so the saved adapter could not be either: {error}. To "
            "save a whole model, set merge_lora=True"
        ) from error
    if adapters.has_adapter(saved):
        saved = adapters.merge_adapter(saved)
    expected = saved.state_dict()
    for name, tensor in model.state_dict().items():
        plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        if plain not in expected:
            continue  # a weight of the adapter
        tensor = tensor.cpu()
        other = expected[plain].to(tensor.dtype)
        if tensor.shape != other.shape or not torch.equal(tensor, other):
            raise UserError(
                f"model: {plain} is not what {base} contains, and the saved adapter would only name {base}. Save the "
                "model without the adapter and load it from its folder first, or set merge_lora=True"
            )


def check_evaluated(args, eval_dataset, stops_early: bool) -> None:
    """Checks that there are evaluation rows, and metrics for an `EarlyStoppingCallback`, if training needs them.

    Args:
        stops_early: True if there is such a callback.

    Raises:
        UserError: something is missing.
    """
    if stops_early and args.eval_strategy == "no":
        raise UserError(
            "early_stopping_patience, EarlyStoppingCallback: set eval_strategy to steps or epoch, which yield metrics"
        )
    if stops_early and args.metric_for_best_model is None:
        raise UserError('EarlyStoppingCallback: set metric_for_best_model, for example to "mrr"')
    if eval_dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
        raise UserError("eval_strategy, eval_on_start: pass eval_dataset= (rows with a url and a query)")


def first_encoder(
    model, tokenizer, profile: EncoderProfile | Mapping[str, object] | None, arguments: dict
) -> StartingEncoder:
    """Turns the `model` or `model_init` that a user passes to the trainer into the encoder to start from.

    `model_init` is called once, and then replaced in `arguments` with a function that returns plain encoders.

    Args:
        model: see `starting_encoder`. None if `model_init` creates it.
        arguments: the keyword arguments for `Trainer`, which are changed.

    Raises:
        UserError: an argument is invalid or unsupported. The message suggests an alternative.
    """
    for name in arguments:
        if name in option_specs(ModelArguments):
            raise UserError(
                f"{name}: an option of the encoder; pass encoder={{{name!r}: VALUE}}, or set it in the model"
            )
    make = arguments.pop("model_init", None)
    if (model is None) == (make is None):
        raise UserError("model: pass either an encoder or its name, or a function model_init= that creates one")
    if arguments.get("compute_loss_func") is not None:
        raise UserError("compute_loss_func is not supported: set args.loss, or override compute_loss")
    if arguments.get("preprocess_logits_for_metrics") is not None:
        raise UserError("preprocess_logits_for_metrics is not supported: compute_metrics gets the ranks of a corpus")
    if "estimator" in arguments:
        raise UserError("estimator is not an argument: pass the estimator in callbacks=[...]")
    if make is not None:
        model = _made_model(make)
        # `Trainer` calls `model_init` at once. This first call returns the model that exists already.
        waiting = [model]
        arguments["model_init"] = lambda trial=None: waiting.pop() if waiting else _made_model(make, trial)
    starting = starting_encoder(model, tokenizer, profile)
    if starting.model is not None and starting.tokenizer is None:
        raise UserError("processing_class: SoftInfoNCETrainer needs the encoder's tokenizer")
    return starting


def _made_model(make: Callable, trial=None) -> PreTrainedModel:
    """Calls a user's `model_init`, passing the trial if the function takes an argument. Returns the plain encoder."""
    if number_of_arguments(make):
        model = make(trial)
    else:
        model = make()
    return given_encoder(model)[0]
