"""Declares the options of a run: data, loss and training. `model.py` declares the encoder's options.

The field names are the options on the command line and the keys in recipes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from soft_trainer.errors import UserError
from soft_trainer.options.choices import ESTIMATORS, WITHOUT_ESTIMATOR
from soft_trainer.options.loss_options import TEACHER_WEIGHT, LossOptions
from soft_trainer.options.spec import check_values, documented, option, unset
from soft_trainer.source.languages import CODESEARCHNET_LANGUAGES

CODESEARCHNET = "code-search-net/code_search_net"
# The strategies of `soft_trainer.training.sampler`.
STRATEGIES = ("random", "sequential", "no_duplicates", "group_by_length", "one_language", "similar")

not_in_results = functools.partial(option, results=False)  # affects only what is printed or kept, or the speed
output_option = functools.partial(not_in_results, group="output")
data_option = functools.partial(option, None, group="data", common=True)
training_option = functools.partial(option, group="training", common=True)
COLUMN_OPTIONS = ("query_column", "code_column", "id_column", "negatives_column", "group_column")
# The options of `transformers` that have an effect only if a strategy is `steps`: the strategy and its default.
STEPS = {"save_steps": ("save_strategy", "epoch"), "eval_steps": ("eval_strategy", "no")}
PARTS = ("do_train", "do_eval", "do_predict")  # the parts of a run


@documented
@dataclass
class DataArguments:
    """Options for the rows to train and evaluate on.

    Args:
    OPTIONS
    """

    language: str | None = data_option(
        f"Programming languages, comma-separated: {', '.join(CODESEARCHNET_LANGUAGES)}. --data_dir may contain other "
        "languages. Default: ruby for CodeSearchNet, otherwise the language of the rows or source files.",
    )
    dataset_name: str = option(
        CODESEARCHNET,
        "Data set on the Hub. With --do_predict, the value none evaluates only the sets in --eval_data_dir.",
        refers_to="rows",
    )
    data_dir: str | None = data_option(
        "Rows: a file or folder of JSON lines, CSV or Parquet, a saved data set, or a name on the Hub. {language} is "
        "replaced by each language. Rows without valid, test and codebase are split.",
        refers_to="rows",
    )
    query_column: str | None = data_option("Column of --data_dir with the query.")
    code_column: str | None = data_option("Column of --data_dir with the code.")
    id_column: str | None = data_option(
        "Column of --data_dir with the function's id. Default: url in CodeSearchNet's columns, otherwise its text.",
        common=False,
    )
    negatives_column: str | None = data_option(
        "Column of --data_dir with hard negatives: texts, or lists of texts.",
        common=False,
    )
    group_column: str | None = data_option(
        "Column of --data_dir whose values stay within one split, if the rows are split.",
        common=False,
    )
    test_fraction: float = option(
        0.1,
        "Share of the rows in test, and share in valid, if the rows of --data_dir are split.",
        above=0,
        below=0.5,
        group="data",
    )
    split_seed: int = option(
        0,
        "Seed for splitting the rows of --data_dir.",
        least=0,
        group="data",
    )
    drop_unusable: bool = option(
        False, "Drop rows whose query or function is empty, and print how many.", chooses_rows=True
    )
    eval_data_dir: str | None = data_option(
        "Additional evaluation sets, comma-separated: folders with relevance.jsonl, "
        "or any rows that --data_dir accepts (soft_trainer.shell.evaluation_sets). "
        "--data_dir then needs only training rows.",
        refers_to="rows",
        several=True,
    )
    source_dir: str | None = data_option(
        "Source tree to mine documented functions from. 'stdlib' stands for Python's standard library.",
        refers_to="tree",
    )
    mining_keep: str | None = unset(
        "With --source_dir: mining rules to skip, comma-separated, such as short_functions.",
    )
    split_urls: str | None = unset(
        "Folder with lists of urls: train.txt, valid.txt, test.txt and codebase.txt.",
        chooses_rows=True,
        refers_to="rows",
    )
    max_train_rows: int | None = unset(
        "Train on only the first N training rows of each language.", least=1, group="data", common=True
    )

    def __post_init__(self):
        check_values(self)
        for name in ("data_dir", "eval_data_dir", "source_dir", "split_urls"):
            if paths := getattr(self, name):
                paths = map(os.path.expanduser, paths.split(",") if name == "eval_data_dir" else [paths])
                setattr(self, name, ",".join(paths))
        own = self.data_dir or self.source_dir
        if self.language is None and self.dataset_name == CODESEARCHNET and not own:
            self.language = "ruby"
        if self.language is not None:
            self.language = ",".join(name.strip().lower() for name in self.language.split(","))

    @property
    def languages(self) -> list[str]:
        """The languages of the run. One encoder is trained on all of them. Empty if the rows have their language."""
        return [] if self.language is None else self.language.split(",")

    @property
    def from_hub(self) -> bool:
        """True if the rows come from the Hub rather than from local files."""
        if self.data_dir:
            return "{language}" not in self.data_dir and not os.path.exists(self.data_dir)
        return not self.source_dir

    @property
    def rows_name(self) -> str:
        """The name of the rows on the Hub, or the name of the folder that the rows come from."""
        own = self.data_dir or self.source_dir
        if not own:
            return self.dataset_name
        if self.from_hub:
            return own
        return os.path.basename(os.path.abspath(own.replace("{language}", "")))


@dataclass
class SoftInfoNCEOptions(LossOptions):
    """Options for the loss and its weights, the batches and the negatives."""

    teacher: str | None = unset(
        "A stronger encoder or cross-encoder to learn from: a folder or Hub name. Short for "
        f"estimator=trained_model, estimator_model=NAME, loss=info_nce and distill_weight={TEACHER_WEIGHT}.",
        group="weights",
        refers_to="encoder",
        common=True,
    )
    false_negatives: str = option(
        "mask",
        "What to do with a negative whose query or function has the same text as the positive's: mask excludes it, "
        "positives treats it as a relevant function, ignore treats it as a negative.",
        choices=("mask", "positives", "ignore"),
        group="batches",
    )
    group_size: int = option(
        8,
        "Number of similar rows in a group, for train_sampling_strategy=similar. Default: 8.",
        least=1,
        group="batches",
    )
    negatives_per_query: int | None = unset(
        "Hard negatives for each query, in addition to the other functions in the batch. They come from the rows' "
        "columns of negatives or, without such a column, from the functions that the estimator finds most similar. "
        "0 uses none. Default: as many as the columns name, at most 4; none without such a column.",
        least=0,
        group="batches",
    )
    negative_ratio: float = option(
        0.95,
        "With negatives_per_query: maximum similarity of a negative that the estimator finds, relative to the query's "
        "positive.",
        group="batches",
    )
    gather_negatives: bool | None = unset("Use the functions of all processes as negatives. Default: yes.")
    gradient_cache_chunk_size: int | None = training_option(
        None,
        "Encode this many texts at a time and cache the gradients of their embeddings, for large batches in little "
        "memory.",
        least=1,
    )
    matryoshka_dims: str | None = unset(
        "Also use the first N dimensions of each embedding as an embedding, for each N in a list such as 768,256,64.",
    )


@dataclass
class EstimatorOptions:
    """Options for the estimator, which supplies the weights and finds similar rows."""

    estimator: str | None = option(
        "bm25",
        f"Estimator for weights and similar rows: {', '.join(ESTIMATORS)}, or module:Class. "
        "initial_model is the encoder before training. Default: initial_model for search encoders, the teacher of "
        "distilled ones, otherwise bm25.",
        choices=tuple(ESTIMATORS),
        own=True,
        refers_to="code",
        group="weights",
        common=True,
    )
    estimator_model: str | None = unset(
        "Encoder for simcse or trained_model: a folder, a Hub name, or NAME@REVISION.",
        group="weights",
        refers_to="encoder",
    )
    estimator_cache_dir: str | None = not_in_results(
        None,
        "Folder for cached row embeddings, or none for no cache. Default: in the Hugging Face home.",
        refers_to="folder",
    )
    bm25_idf: str = option(
        "okapi",
        "Inverse document frequency of BM25: okapi, robertson or lucene.",
        group="weights",
    )
    bm25_scope: str = option(
        "batch",
        "Where BM25's statistics come from: batch or corpus.",
        group="weights",
    )
    bm25_document_column: str | None = unset(
        "Column that bm25 scores queries against, instead of other queries.",
        group="weights",
    )


def open_option(kind: type, name: str):
    """Returns the field of an inherited option, with None as its value until a trainer is made."""
    return field(default=None, metadata=kind.__dataclass_fields__[name].metadata)


@dataclass
class TrainingOptions(SoftInfoNCEOptions, EstimatorOptions):
    """The training options that `--help` or other commands need. Declaring them does not import `transformers`.

    What depends on the encoder or on another option is None until a trainer is made (`options/defaults.py`).

    `SoftInfoNCETrainingArguments` adds the options of `transformers`.
    """

    output_dir: str | None = output_option(
        None,
        "Output folder. Default: outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR.",
        common=True,
        refers_to="folder",
    )
    overwrite: bool = output_option(
        False,
        "Start over and replace the run in the output folder, instead of continuing it.",
        common=True,
    )
    estimator: str | None = open_option(EstimatorOptions, "estimator")
    weighting: str | None = open_option(SoftInfoNCEOptions, "weighting")
    floor: float | None = open_option(SoftInfoNCEOptions, "floor")
    distill_weight: float | None = open_option(SoftInfoNCEOptions, "distill_weight")
    group_size: int | None = open_option(SoftInfoNCEOptions, "group_size")
    per_device_train_batch_size: int | None = training_option(
        None,
        "Batch size per process, in pairs. Default: 32; 128 for base and if static; 512 for distilled encoders.",
        aliases=("batch_size",),
        least=1,
    )
    per_device_eval_batch_size: int = not_in_results(
        64,
        "Number of texts that each process encodes at once during evaluation. On a GPU, more texts if they are short.",
        least=1,
    )
    seed: int = training_option(42, "Random seed for rows, batches, dropout and new weights.", least=0)
    bf16: bool | None = not_in_results(  # the precision itself counts
        None,
        "Train and encode in bfloat16. Default: yes if the GPU or CPU computes in it, not if static.",
        group="training",
        common=True,
    )
    packing: str = not_in_results(
        "auto",
        "Join the texts of a batch without padding, so that a step is one forward pass: auto (if the encoder and the "
        "run support it), true (otherwise an error) or false, for every encoder of the run.",
        choices=("auto", "true", "false"),
    )
    use_cpu: bool = not_in_results(False, "Use the CPU even if there is a GPU.")
    push_to_hub: bool = output_option(False, "Push the encoder to the Hub at the end.", common=True)
    disable_tqdm: bool | None = output_option(
        None,
        "Print lines instead of progress bars. Default: only without a terminal.",
    )
    learning_rate: float | None = training_option(
        None,
        "Peak learning rate of AdamW. Default: 2e-5; 6e-5 for search encoders; 3e-3 if static or distilled; 1e-3 for "
        "base and from scratch; 1e-4 for adapters (LoRA).",
        aliases=("lr",),
        least=0,
    )
    num_train_epochs: float | None = training_option(
        None,
        "Passes over the training rows. Default: 10; 1 for search encoders; 5 for base.",
        aliases=("epochs",),
        above=0,
    )
    train_sampling_strategy: str | None = option(
        None,
        "How rows are grouped into batches: random, sequential, no_duplicates (no query or function twice), "
        "group_by_length, one_language, or similar. Default: similar for search encoders, otherwise random.",
        choices=STRATEGIES,
        group="batches",
        common=True,
    )
    early_stopping_patience: int | None = unset(
        "Stop after this many evaluations in a row without a better metric_for_best_model. Default: never.",
        least=1,
        group="training",
    )
    report: bool = output_option(
        False,
        "In Python: evaluate eval_dataset before and after training and with lexical BM25, print a table of the "
        "results at the end, and write the encoder, its card, run.json and the ranks. The command line always does.",
    )
    lexical: bool = not_in_results(
        True,
        "Also rank by lexical BM25, a baseline that needs no training.",
    )
    examples: int = output_option(
        5,
        "Number of test queries to show at the end, with their top functions.",
        least=0,
    )
    model_card: bool = output_option(True, "Write README.md, the model card, beside a saved encoder.")
    merge_lora: bool = output_option(False, "Save the whole encoder, with the adapter merged into its weights.")
    merge_ratio: float | None = unset(
        "At the end, average the weights before and after training. The ratio, from 0 to 1, is the weight of the "
        "trained encoder. OUTPUT_DIR/unmerged keeps the trained encoder.",
        group="training",
        common=True,
        least=0,
        most=1,
    )

    def reads_estimator(self, split=None) -> bool:
        """Returns True if the loss, the batches or the additional negatives use the estimator.

        Args:
            split: the training rows, if known: their negatives are drawn instead of similar functions.
        """
        loss = self.loss not in WITHOUT_ESTIMATOR or self.cancel != "none" or self.distill_weight > 0
        finds = bool(self.negatives_per_query) and (split is None or split.judgments.negatives is None)
        return loss or self.train_sampling_strategy == "similar" or finds


def check_steps(options: Mapping[str, object]) -> None:
    """Raises UserError if an option in `STEPS` is set, but its strategy is not `steps`."""
    for name, (strategy, default) in STEPS.items():
        chosen = options.get(strategy, default)
        chosen = getattr(chosen, "value", chosen)
        if options.get(name) is not None and chosen != "steps":
            raise UserError(f"{name}={options[name]:g}: has no effect with {strategy}={chosen}; set it to steps")
