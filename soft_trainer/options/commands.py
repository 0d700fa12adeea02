"""The options of single commands: `baseline`, `simcse` and `weights`."""

from __future__ import annotations

from dataclasses import dataclass

from soft_trainer.errors import UserError
from soft_trainer.options.declared import check_values, option
from soft_trainer.options.fields import CODESEARCHNET, LANGUAGES
from soft_trainer.options.model import PretrainedOptions

# Losses of sentence-transformers.
BASELINES = {"mnrl": "MultipleNegativesRankingLoss", "gist": "CachedGISTEmbedLoss"}
HARDNESS_MODES = ("in_batch_negatives", "hard_negatives", "all_negatives")
PAPER_MODEL = "sentence-transformers/msmarco-distilbert-dot-v5"  # the paper's SimCSE estimator starts from it


@dataclass
class BaselineArguments:
    """The loss of sentence-transformers, and its negatives."""

    baseline: str = option(
        "mnrl", f"Loss: {', '.join(f'{key} ({name})' for key, name in BASELINES.items())}.", choices=tuple(BASELINES)
    )
    hardness_mode: str | None = option(
        None, f"mnrl: which negatives weigh more if similar: {', '.join(HARDNESS_MODES)}.", choices=HARDNESS_MODES
    )
    hardness_strength: float = option(0.0, "mnrl: factor on the cosine of those negatives; 9 and 5 are published.")
    guide_model: str | None = option(None, "Encoder that mines and guides. Default: the encoder before training.")
    guide_margin: float = option(0.05, "Relative margin of mining and of gist.")
    mined_negatives: int = option(0, "Hard negatives of each query, mined by the guide.", least=0)
    mined_ranks: int = option(20, "Negatives are mined from this many nearest codes.")

    def __post_init__(self):
        check_values(self)
        if self.hardness_mode is not None and (self.baseline != "mnrl" or not self.hardness_strength > 0):
            raise UserError("hardness_mode: needs baseline=mnrl and a hardness_strength above 0")
        if self.mined_negatives > self.mined_ranks:
            raise UserError(f"mined_negatives={self.mined_negatives}: from 0 to mined_ranks={self.mined_ranks}")


@dataclass
class SimCSEArguments(PretrainedOptions):
    """The encoder to start from, and the queries to train on."""

    model_name_or_path: str = option(PAPER_MODEL, "Encoder to start from: a Hub name or a folder.")
    model_revision: str | None = option(None, "Branch, tag or commit of the encoder on the Hub.")
    query_length: int = option(128, "Maximum tokens of a query, special tokens included.")
    data_dirs: list[str] | None = option(None, "Folders with train and valid .jsonl[.gz]. Default: CodeSearchNet.")
    languages: list[str] | None = option(None, f"Languages to take from the Hub. Default: {' '.join(LANGUAGES)}.")
    dataset_name: str = option(CODESEARCHNET, "Data set on the Hub, in CodeSearchNet's columns.")
    query_columns: str | None = option(
        None, "Columns that may hold the query, comma-separated; the first there is read."
    )
    max_train_rows: int | None = option(None, "Train on this many distinct queries only, drawn by --seed.", least=1)
    max_eval_rows: int = option(2048, "Held-out queries that alignment and uniformity are measured on.", least=2)


@dataclass
class SimCSETrainingOptions:
    """The options of the training that this package declares: the published run's, with twenty evaluations."""

    FULL = "SimCSETrainingArguments"

    output_dir: str | None = option("outputs/simcse", "Where to write.")
    temperature: float = option(0.07, "Temperature of InfoNCE: cosines are divided by it.", above=0)
    per_device_train_batch_size: int = option(256, "Queries in a batch, per process.")
    per_device_eval_batch_size: int = option(256, "Queries encoded at once in evaluation, per process.")
    learning_rate: float = option(5e-4, "Peak learning rate of AdamW.")
    num_train_epochs: float = option(10.0, "Passes over the queries.")
    logging_steps: float = option(50, "Steps between two lines of the log.")
    logging_nan_inf_filter: bool = option(False, "Hide NaN and infinite losses from the log.")
    eval_strategy: str = option("steps", "When to measure alignment and uniformity: no, steps or epoch.")
    eval_steps: float | None = option(0.05, "Steps between two measurements; below 1 a share of all steps.")
    eval_on_start: bool = option(True, "Measure before the first step.")
    save_strategy: str = option("epoch", "When to save a checkpoint: no, steps, epoch or best.")
    save_total_limit: int | None = option(1, "How many checkpoints to keep.")
    dataloader_drop_last: bool = option(True, "Leave out the last batch of an epoch if it is not full.")
    ddp_find_unused_parameters: bool | None = option(False, "Look for parameters without gradient in every step.")


@dataclass
class WeightPlotArguments:
    """The batch and the estimators."""

    data_dir: str | None = option(None, "Folder with train.jsonl or train.jsonl.gz to draw a batch from.")
    pairs: str | None = option(None, "Instead: JSON lines with docstring and code, one batch. The first is the query.")
    estimators: str = option("bm25", "Estimators, comma-separated, as in --estimator of a training run.")
    estimator_model: str | None = option(
        None, "Comma-separated encoders of simcse and trained_model, in the order in which --estimators needs them."
    )
    trust_remote_code: bool = option(False, "Run the code that comes with an encoder of --estimator_model.")
    batch_size: int = option(32, "Rows in the batch.", least=1)
    seed: int = option(0, "Draws the batch.", least=0)
    query: int | None = option(None, "Row of the batch, from 0, to show. Default: where the weights differ most.")
    negatives: int = option(8, "Number of negatives to show.", least=1)
    output: str = option("weights.png", "File of the picture; none draws no picture.")

    def __post_init__(self):
        check_values(self)
