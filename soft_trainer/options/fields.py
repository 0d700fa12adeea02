"""Declares the options of a run: data, loss and training. `model.py` declares the encoder's options.

The field names are the options on the command line and the keys in recipes.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from soft_trainer.options.declared import ReadIf, check_values, option, unset
from soft_trainer.options.removed import RefusesRemoved

CODESEARCHNET_LANGUAGES = ("ruby", "python", "java", "javascript", "php", "go")
CODESEARCHNET = "code-search-net/code_search_net"
# The keys of `soft_trainer.loss_settings.LOSSES`. That module imports torch, and `--help` should not wait for it.
LOSSES = ("soft_info_nce", "info_nce", "weighted_info_nce", "bce", "kl_regularization")
WEIGHTINGS = ("eq4", "positive_aware")
CANCELLATIONS = ("none", "top_k", "ratio")
# The strategies of `soft_trainer.data.global_batches`.
STRATEGIES = ("random", "sequential", "no_duplicates", "group_by_length", "one_language", "similar")

not_in_results = functools.partial(option, results=False)  # affects only what is printed or kept, or the speed
data_option = functools.partial(option, None, group="data", common=True, evaluation=True)
training_option = functools.partial(option, group="training", common=True)
PARTS = ("do_train", "do_eval", "do_predict")  # the parts of a run


def reads_estimator(o) -> bool:
    """Returns True if the loss, the batches or additional negatives may depend on the estimator."""
    loss = o.loss != "info_nce" or o.cancel != "none" or o.distill_weight > 0
    return loss or o.train_sampling_strategy == "similar" or o.negatives_per_query > 0


ESTIMATOR = ReadIf(
    lambda o: o.estimator in (None, "none") or reads_estimator(o),
    "loss=info_nce has no weights, and neither batches nor negatives come from an estimator",
)
BM25 = ReadIf(lambda o: o.estimator == "bm25", "the estimator is not bm25")
OWN_ROWS = ReadIf(lambda o: bool(o.data_dir or o.eval_data_dir), "neither data_dir nor eval_data_dir is given")
MINED = ReadIf(lambda o: o.source_dir is not None and o.history is None, "no source_dir is mined")


@dataclass
class DataArguments(RefusesRemoved):
    """Options for the rows to train and evaluate on, and for the estimator that supplies the weights."""

    language: str | None = data_option(
        f"Programming languages, comma-separated: {', '.join(CODESEARCHNET_LANGUAGES)}. Rows of --data_dir may be in "
        "others. Default: ruby for CodeSearchNet, else what the rows or the source files are in.",
    )
    dataset_name: str = option(
        CODESEARCHNET,
        "Data set on the Hub: CodeSearchNet's, or one that --push_data_to_hub pushed; none, with --do_predict: "
        "--eval_data_dir is measured alone.",
    )
    data_dir: str | None = data_option(
        "Rows: a folder or file of JSON lines, CSV or Parquet, a saved data set, or a name on the Hub; {language} in "
        "it stands for each. Without valid, test and codebase the rows are split.",
    )
    query_column: str | None = data_option("Column of --data_dir that holds the query.", read_if=OWN_ROWS)
    code_column: str | None = data_option("Column of --data_dir that holds the code.", read_if=OWN_ROWS)
    drop_unusable: bool = option(False, "Leave out rows without a text, and print how many.", evaluation=True)
    eval_data_dir: str | None = data_option(
        "Further evaluation sets, comma-separated folders: files of CoSQA or CoSQA+, annotationStore.csv, "
        "relevance.jsonl, or rows as --data_dir takes them, all of which are measured "
        "(soft_trainer.evaluation.evaluation_sets). --data_dir may then hold train alone.",
    )
    source_dir: str | None = data_option(
        "Source tree to mine documented functions from; 'stdlib' is Python's own.",
    )
    extra_source_dir: str | None = unset(
        "Another tree, whose functions are only trained on, without copies of those in valid, test and codebase; "
        "'installed' is the packages of this Python.",
        read_if=MINED,
    )
    history: str | None = unset(
        "Git repository whose commits are rows: what one says, and a function that it changed. With --source_dir, a "
        "folder of its working tree, documented functions are rows too.",
        evaluation=True,
    )
    mining_keep: str | None = unset(
        "Mining rules to skip, comma-separated, such as short_functions.", read_if=MINED, evaluation=True
    )
    filters: str | None = unset(
        "Rules that drop rows, comma-separated: of soft_trainer.mining.rules.RULES, graphcodebert, codesearchnet.",
        evaluation=True,
    )
    split_urls: str | None = unset(
        "Folder with train.txt, valid.txt, test.txt and codebase.txt of urls.", evaluation=True
    )
    push_data_to_hub: str | None = not_in_results(
        None, "USER/NAME: push the rows of --source_dir, --history or --data_dir, as trained on, as a data set."
    )
    max_train_rows: int | None = unset("Train on the first rows only, this many.", least=1, group="data", common=True)
    lexical: bool = not_in_results(
        True, "Also rank by lexical BM25, a baseline that needs no training.", evaluation=True
    )
    model_card: bool = not_in_results(True, "Write README.md, the model card, into the output folder.")
    examples: int = not_in_results(5, "Test queries to show with their top functions at the end.", least=0)
    then_search: str | None = not_in_results(
        None, "After training, index --source_dir with the encoder and search it for this query."
    )
    estimator: str | None = option(
        "bm25",
        "Estimator of the weights: bm25, simcse, trained_model, initial_model (the encoder before training), none, or "
        "module:Class. An encoder of sentence-transformers takes those of the recipe hard_batches.",
        read_if=ESTIMATOR,
        group="weights",
        common=True,
    )
    estimator_model: str | None = unset(
        "Hub name (NAME@REVISION pins one) or folder of the encoder behind simcse or trained_model.", group="weights"
    )
    estimator_cache_dir: str | None = not_in_results(
        None, "Where to keep row embeddings; none keeps nothing. Default: in the Hugging Face home."
    )
    bm25_idf: str = option(
        "okapi", "Inverse document frequency of BM25: okapi, robertson or lucene.", read_if=BM25, group="weights"
    )
    bm25_scope: str = option(
        "batch", "Statistics of BM25 from the batch or the corpus.", read_if=BM25, group="weights"
    )
    bm25_document_column: str | None = unset(
        "Score queries against this column, not other queries.", read_if=BM25, group="weights"
    )

    def __post_init__(self):
        check_values(self)
        if self.language is None and self._reads_codesearchnet:
            self.language = "ruby"
        if self.language is not None:
            self.language = ",".join(name.strip().lower() for name in self.language.split(","))

    @property
    def languages(self) -> list[str]:
        """The given languages, which are trained on together. Empty if the rows specify their own languages."""
        return [] if self.language is None else self.language.split(",")

    @property
    def _reads_codesearchnet(self) -> bool:
        return self.dataset_name == CODESEARCHNET and not (self.data_dir or self.source_dir or self.history)

    @property
    def paper_language(self) -> str | None:
        """The language, if the row counts can be compared with the paper's. Otherwise None, as for rows from other
        sources.
        """
        published = self._reads_codesearchnet and len(self.languages) == 1 and not self.push_data_to_hub
        return self.language if published else None

    @property
    def rows_name(self) -> str:
        """The rows' name on the Hub, or the name of the folder that they come from."""
        own = self.data_dir or self.history or self.source_dir
        if self.push_data_to_hub or not own:
            return self.push_data_to_hub or self.dataset_name
        if own == self.data_dir and "{language}" not in own and not os.path.exists(own):
            return own  # a name on the Hub
        return os.path.basename(os.path.abspath(own.replace("{language}", "")))


TOP_K = ReadIf(lambda o: o.cancel == "top_k", "only cancel=top_k reads it")
RATIO = ReadIf(lambda o: o.cancel == "ratio", "only cancel=ratio reads it")
DISTILLED = ReadIf(lambda o: o.distill_weight > 0, "distill_weight is 0")


def loss_reads(name: str) -> ReadIf:
    """Returns the condition that the loss or its weighting has an argument with this name."""
    return ReadIf(lambda o: name in o.reads, "neither the loss nor its weights read it")


# The default is the estimator's attribute, or 1 if it has none. `LossSettings` itself has BM25's values as defaults.
estimator_default = functools.partial(unset, of_estimator=1.0)
# Options that determine the paper's weights.
weighing = functools.partial(option, group="weights")
weighing_default = functools.partial(estimator_default, group="weights")


@dataclass
class LossOptions(RefusesRemoved):
    """Options for the loss and its weights. They are the fields of `soft_trainer.loss_settings.LossSettings`."""

    loss: str | None = weighing(
        None,
        f"{', '.join(LOSSES)}, or your function as module:name. Default: soft_info_nce with an estimator, info_nce "
        "without.",
        choices=LOSSES,
        own=True,
        common=True,
    )
    alpha: float | None = weighing_default("Weight of the similarity in Eq. 4.", least=0, read_if=loss_reads("alpha"))
    beta: float | None = weighing_default("Constant of Eq. 4.", above=0, read_if=loss_reads("beta"))
    temperature: float | None = weighing_default(
        "Temperature of the softmax of similarities, or of positive_aware weights.",
        least=0,
        read_if=loss_reads("temperature"),
    )
    floor: float = weighing(
        0.1, "Smallest weight of a negative in Eq. 4.", least=0, most=1, read_if=loss_reads("floor")
    )
    weighting: str = weighing(
        "eq4",
        "From similarity to weight: eq4 compares negatives with each other, positive_aware with the positive; or your "
        "function as module:name.",
        choices=WEIGHTINGS,
        own=True,
        common=True,
    )
    margin: float | None = weighing_default(
        "positive_aware: a negative counts fully if it is less similar than the positive by this much.",
        of_estimator=0.0,
        read_if=loss_reads("margin"),
    )
    distill_weight: float = option(
        0.0,
        "Weight of a further loss: KL divergence of the scores over the negatives from the estimator's. 0: none.",
        least=0,
    )
    distill_temperature: float | None = estimator_default(
        "Temperature of the estimator's softmax in that loss.", above=0, read_if=DISTILLED
    )
    infonce_weight: float = weighing(
        1.3, "Weight of InfoNCE in kl_regularization.", least=0, read_if=loss_reads("infonce_weight")
    )
    kl_weight: float = weighing(
        0.7, "Weight of the divergence in kl_regularization.", least=0, read_if=loss_reads("kl_weight")
    )
    cancel: str = weighing("none", "False-negative cancellation: none, top_k or ratio.", choices=CANCELLATIONS)
    cancel_k: int = weighing(3, "How many of the most similar negatives top_k cancels.", least=0, read_if=TOP_K)
    cancel_ratio: float = weighing(
        0.5, "ratio cancels negatives above this share of the positive's similarity.", least=0, read_if=RATIO
    )


SIMILAR = ReadIf(lambda o: o.train_sampling_strategy == "similar", "only train_sampling_strategy=similar reads it")
OWN_NEGATIVES = ReadIf(lambda o: o.negatives_per_query > 0, "negatives_per_query is 0")


@dataclass
class SoftInfoNCEOptions(LossOptions):
    """Options for the loss and its weights, the batches and the negatives."""

    duplicates: str = option(
        "mask",
        "A negative with the query's or the code's text: mask leaves it out, positives counts it as a right answer, "
        "ignore counts it as a negative.",
        choices=("mask", "positives", "ignore"),
        group="batches",
    )
    group_size: int = option(
        8, "train_sampling_strategy similar: rows in a group.", least=1, read_if=SIMILAR, group="batches"
    )
    negatives_per_query: int = option(
        0,
        "Negatives of each query, in addition to those of the batch: of the rows' column `negatives`, or else codes "
        "that the estimator finds similar to it.",
        least=0,
        group="batches",
    )
    negative_ratio: float = option(
        0.95,
        "Largest similarity of a negative that the estimator found, as a share of that of the query's own code.",
        read_if=OWN_NEGATIVES,
        group="batches",
    )
    gather_negatives: bool | None = unset("Take the codes of all processes as negatives. Default: yes.")
    gradient_cache_chunk_size: int | None = training_option(
        None,
        "Encode this many texts at a time and cache the gradient of their embeddings: large batches, little memory.",
        least=1,
    )
    matryoshka_dims: str | None = unset(
        "Use these leading dimensions as embeddings too, such as 768,256,64.", evaluation=True
    )


@dataclass
class TrainingOptions(SoftInfoNCEOptions):
    """The training options that `--help` shows or that other commands share. They do not need `transformers`.

    `SoftInfoNCETrainingArguments` adds the options of `transformers`.
    """

    FULL = "SoftInfoNCETrainingArguments"

    output_dir: str | None = not_in_results(
        None, "Where to write. Default: outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR.", group="output", common=True
    )
    overwrite: bool = not_in_results(
        False, "Write into an output folder that holds the results of another run.", evaluation=True
    )
    per_device_train_batch_size: int = training_option(32, "Pairs in a batch, per process.")
    per_device_eval_batch_size: int = not_in_results(
        64, "Texts encoded at once in evaluation, per process.", evaluation=True, mteb=True
    )
    seed: int = training_option(42, "Seed of everything random: rows, batches, dropout, new weights.")
    bf16: bool = training_option(False, "Train and encode in bfloat16.", evaluation=True)
    use_cpu: bool = not_in_results(False, "Use the CPU even if there is a GPU.", evaluation=True, mteb=True)
    push_to_hub: bool = not_in_results(False, "Push the encoder to the Hub at the end.", group="output", common=True)
    disable_tqdm: bool | None = not_in_results(
        None, "Print lines in place of progress bars, as without a terminal.", evaluation=True, mteb=True
    )
    learning_rate: float = training_option(2e-5, "Peak learning rate of AdamW.")
    num_train_epochs: float = training_option(10.0, "Passes over the training rows.", aliases=("epochs",))
    train_sampling_strategy: str = option(
        "random",
        "How rows are put into batches: random, sequential, no_duplicates (no repeated query or code), "
        "group_by_length, one_language, or similar (groups of rows that an estimator finds similar).",
        choices=STRATEGIES,
        group="batches",
        common=True,
    )
    merge_lora: bool = not_in_results(False, "Save the whole encoder, with the adapter merged into its weights.")
    merge_ratio: float | None = unset(
        "Merge once at the end: this share of the weights after training, the rest of those before, from 0 to 1. "
        "OUTPUT_DIR/unmerged keeps the weights after training.",
        least=0,
        most=1,
    )
