"""A baseline: trains an encoder with sentence-transformers' trainer and losses, and measures it like a run of ours."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path

from datasets import Dataset
from transformers import set_seed

from soft_trainer import distributed
from soft_trainer.data.sources import load_data, load_local, needed_splits
from soft_trainer.data.tokens import SIDES, side_texts
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.evaluation_sets import load_evaluation_sets
from soft_trainer.hub.export import export_encoder
from soft_trainer.options.commands import BASELINES, BaselineArguments
from soft_trainer.options.declared import changed_options, declared_options
from soft_trainer.options.fields import DataArguments, SoftInfoNCEOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.record import Run, check_output_dir, default_output_dir
from soft_trainer.trainer import SoftInfoNCETrainer
from soft_trainer.training.building import build_model, build_profile, build_tokenizer
from soft_trainer.training.messages import use_lines

COLUMNS = {"query": "anchor", "code": "positive"}
# Options of training that sentence-transformers' trainer gets as they are.
SHARED = (
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "warmup_steps", "weight_decay", "lr_scheduler_type", "seed", "bf16", "fp16", "use_cpu"),
    *("max_grad_norm", "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_kwargs", "data_seed"),
    *("dataloader_drop_last", "dataloader_num_workers", "logging_strategy", "logging_steps", "logging_first_step"),
    *("disable_tqdm", "run_name"),
)
# Options of training that are about the run as a whole.
OF_THE_RUN = ("output_dir", "overwrite", "do_train", "do_eval", "do_predict", "per_device_eval_batch_size")
# Options of the rows and the estimator that only a run of ours has.
ONLY_OURS = (
    *("estimator", "estimator_model", "estimator_cache_dir", "no_estimator_cache", "mixture_shares"),
    *("mixture_temperatures", "bm25_idf", "bm25_scope", "bm25_document_column", "early_stopping_patience"),
    "push_data_to_hub",
)
NOTHING = (None, False, "no", "none", [], ["none"])  # values that ask for nothing


def train_baseline(
    baseline: BaselineArguments,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: SoftInfoNCETrainingArguments,
) -> None:
    """Trains with sentence-transformers and writes the same output folder as a run of ours.

    Batches have no duplicates (`NO_DUPLICATES`). Queries and codes are cut to the longer of `query_length` and
    `code_length` in training, as that trainer has one length; evaluation cuts each side as ours does.

    Raises:
        UserError: an option of our loss, several processes, or what a run of ours refuses too.
    """
    check_baseline(model_args, data_args, args)
    args.output_dir = args.output_dir or f"{default_output_dir(model_args, data_args, args)}-{baseline.baseline}"
    set_seed(args.seed)
    distributed.use_the_cores()
    check_output_dir(model_args, data_args, args, dataclasses.asdict(baseline))
    needed = needed_splits(data_args, args)
    local = load_local(data_args, needed)
    profile = build_profile(model_args)
    wrong_score = baseline.baseline == "gist" and profile.score_function != "cosine"
    if wrong_score:
        raise UserError("baseline=gist compares by cosine: add --score_function cosine --score_scale 20")
    data = load_data(data_args, profile, Path(args.output_dir) / "data", needed, local)
    sets = load_evaluation_sets(data_args, profile, data.get("codebase"))
    tokenizer = build_tokenizer(model_args, profile, data["train"])
    model = build_model(model_args, profile, tokenizer)
    student, state, seconds = _train(model, tokenizer, profile, data["train"], baseline, args)
    trainer = SoftInfoNCETrainer(student, args, processing_class=tokenizer, encoder=profile)
    trainer.state = state
    trainer.save_model()
    trainer.save_state()
    run = BaselineRun(trainer, data, model_args, data_args, {}, sets)
    run.baseline = baseline
    run.seconds = seconds
    run.measure("trained", data_args.lexical)
    run.finish()


class BaselineRun(Run):
    """Measures a baseline; its record names the loss of sentence-transformers in place of ours."""

    baseline: BaselineArguments
    seconds: float  # of mining

    def record(self) -> dict:
        """Returns the record of the run, as `Run.record`, with the loss and the options of the baseline."""
        record = super().record()
        options = dataclasses.asdict(self.baseline)
        settings = {name: value for name, value in options.items() if value and name != "baseline"}
        return record | {
            "options": record["options"] | options,
            "loss": {"loss": BASELINES[self.baseline.baseline], "estimator": None} | settings,
            "estimator": {"name": "none"},
            "training": record["training"] | {"mining, s": round(self.seconds, 1)},
        }


def check_baseline(model_args: ModelArguments, data_args: DataArguments, args: SoftInfoNCETrainingArguments) -> None:
    """Refuses what sentence-transformers' trainer does not do here."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    values = vars(model_args) | vars(data_args) | vars(args)
    given = getattr(args, "given", frozenset()) & ({*ONLY_OURS, *defaults} - {*SHARED, *OF_THE_RUN})
    ignored = [
        *(name for name in changed_options(args) if name in declared_options(SoftInfoNCEOptions)),
        *(name for name in ("train_sampling_strategy", "lora_r") if values[name] not in ("random", None)),
        *(name for name in sorted(given) if values[name] not in (*NOTHING, defaults.get(name))),
    ]
    if ignored:
        raise UserError(f"{ignored[0]}: an option of our trainer, which the baseline ignores; leave it out")
    several = args.world_size > 1
    if model_args.from_scratch or several:
        raise UserError("the baseline trains a pretrained encoder in one process")


def _train(model, tokenizer, profile: EncoderProfile, rows: Dataset, baseline: BaselineArguments, args) -> tuple:
    """Returns the trained model, the state of its trainer and the seconds of mining."""
    # Imported here, since a study reads these options without training.
    import sentence_transformers
    from sentence_transformers import losses
    from sentence_transformers.util import cos_sim, dot_score

    pairs = Dataset.from_dict({COLUMNS[side]: list(side_texts(rows, side, profile)) for side in SIDES})
    attention = {"attn_implementation": model.config._attn_implementation}
    with tempfile.TemporaryDirectory(prefix="soft-trainer-") as folder:
        export_encoder(model, tokenizer, profile, folder)
        student, guide = (
            sentence_transformers.SentenceTransformer(name, device=str(args.device), model_kwargs=attention)
            for name in (folder, baseline.guide_model or folder)
        )
    start = time.monotonic()
    if baseline.mined_negatives:
        pairs = _with_negatives(pairs, guide, baseline, args)
    seconds = time.monotonic() - start
    if baseline.baseline == "gist":
        settings = {"margin_strategy": "relative", "margin": baseline.guide_margin}
        settings |= {"mini_batch_size": args.per_device_train_batch_size, "temperature": 1 / profile.score_scale}
        loss = losses.CachedGISTEmbedLoss(student, guide, **settings)
    else:
        settings = {"hardness_mode": baseline.hardness_mode, "hardness_strength": baseline.hardness_strength}
        similarity = {"cosine": cos_sim, "dot": dot_score}[profile.score_function]
        loss = losses.MultipleNegativesRankingLoss(student, profile.score_scale, similarity, **settings)
    prompts = {COLUMNS[side]: getattr(profile, f"{side}_prefix") for side in SIDES}
    trainer = sentence_transformers.SentenceTransformerTrainer(
        student,
        sentence_transformers.SentenceTransformerTrainingArguments(
            args.output_dir,
            batch_sampler="no_duplicates",
            prompts={column: prompt for column, prompt in prompts.items() if prompt} or None,
            report_to="none",
            save_strategy="no",
            **{name: getattr(args, name) for name in SHARED},
        ),
        train_dataset=pairs,
        loss=loss,
    )
    use_lines(trainer)
    trainer.train()
    return student.transformers_model, trainer.state, seconds


def _with_negatives(pairs: Dataset, guide, baseline: BaselineArguments, args) -> Dataset:
    """Returns the pairs that have enough negatives, with them."""
    from sentence_transformers.util import mine_hard_negatives  # for the same reason

    number = baseline.mined_negatives
    size = args.per_device_eval_batch_size
    ranks = {"range_max": baseline.mined_ranks, "relative_margin": baseline.guide_margin}
    settings = {"sampling_strategy": "random", "output_format": "n-tuple", "batch_size": size}
    mined = mine_hard_negatives(pairs, guide, num_negatives=number, **ranks, **settings)
    few = f"mined_negatives={number}: {len(mined)} of {len(pairs)} queries have so many, less than a batch"
    if len(mined) < args.per_device_train_batch_size:
        raise UserError(f"{few}; lower guide_margin or raise mined_ranks")
    return mined
