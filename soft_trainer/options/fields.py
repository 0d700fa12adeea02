"""The options of a run: model, data, training. Field names are the options of the command line and of recipes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

from transformers import TrainingArguments

from soft_trainer.encoders.lora import LoraOptions
from soft_trainer.encoders.options import PretrainedOptions
from soft_trainer.encoders.profiles import POOLINGS, PROFILES, SCORE_FUNCTIONS
from soft_trainer.errors import UserError

LANGUAGES = ("ruby", "python", "java", "javascript", "php", "go")
SMALLEST_VOCABULARY = 300  # the 256 bytes and the special tokens
CODESEARCHNET = "code-search-net/code_search_net"


def option(default, help: str, **metadata):
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class ModelArguments(LoraOptions, PretrainedOptions):
    """The encoder, and how it reads texts. The encoder's profile fills in what is None."""

    model_name_or_path: str | None = option(
        None, "Encoder to fine-tune: a Hub name or a folder. Default: microsoft/unixcoder-base."
    )
    model_revision: str | None = option(None, "Branch, tag or commit of the encoder on the Hub.")
    from_scratch: str | None = option(
        None, "HIDDENxLAYERS, for example 256x4: start a small RoBERTa with a tokenizer trained on the training rows."
    )
    vocabulary_size: int = option(16384, "Tokens of the tokenizer that --from_scratch trains.")
    profile: str | None = option(None, f"Encoder profile: {', '.join(PROFILES)}. Default: known from the model.")
    pooling: str | None = option(None, f"One embedding from token vectors: {', '.join(POOLINGS)}.")
    query_prefix: str | None = option(None, "Text before every query, special tokens included.")
    code_prefix: str | None = option(None, "Text before every code, special tokens included.")
    query_prompt: str | None = option(None, "Text before every query, after special tokens that the encoder needs.")
    code_prompt: str | None = option(None, "Text before every code, after special tokens that the encoder needs.")
    include_prompt: bool | None = option(None, "Pool the tokens of prompts and prefixes too. Default: yes.")
    query_length: int | None = option(None, "Tokens kept of a query, special tokens included.")
    code_length: int | None = option(None, "Tokens kept of a code, special tokens included.")
    data_flow_length: int | None = option(None, "Data-flow nodes after the code tokens (GraphCodeBERT).")
    score_function: str | None = option(None, f"Score of two embeddings: {', '.join(SCORE_FUNCTIONS)}.")
    score_scale: float | None = option(None, "Factor on every score; 20 is usual with cosine.")
    query_columns: str | None = option(None, "Columns to read the query from, by comma; the first that exists.")
    code_columns: str | None = option(None, "Columns to read the code from, by comma; the first that exists.")

    def __post_init__(self):
        LoraOptions.__post_init__(self)
        PretrainedOptions.__post_init__(self)
        for side in ("query", "code"):
            if getattr(self, f"{side}_prompt") is not None and getattr(self, f"{side}_prefix") is not None:
                raise UserError(f"{side}_prompt, {side}_prefix: give only one; a prefix holds the prompt too")
        if self.vocabulary_size < SMALLEST_VOCABULARY:
            raise UserError(f"vocabulary_size={self.vocabulary_size}: must be {SMALLEST_VOCABULARY} or more")


@dataclass
class DataArguments:
    """The rows to train and evaluate on, and the estimator of the weights."""

    language: str = option("ruby", f"Programming languages, by comma: {', '.join(LANGUAGES)}.")
    dataset_name: str = option(
        CODESEARCHNET,
        "Data set on the Hub: CodeSearchNet's, or one that --push_data_to_hub pushed; none, with --do_predict: "
        "--eval_data_dir is measured alone.",
    )
    data_dir: str | None = option(
        None, "Folder with train, valid, test and codebase as .jsonl or .jsonl.gz; {language} in it stands for each."
    )
    eval_data_dir: str | None = option(
        None,
        "Further evaluation sets, folders by comma: files of CoSQA or CoSQA+, annotationStore.csv, relevance.jsonl, "
        "or test and codebase as .jsonl (soft_trainer.evaluation.evaluation_sets). --data_dir may then hold train "
        "alone.",
    )
    guard: str | None = option(
        None,
        "Queries that must not get worse, folders by comma as for --eval_data_dir: measured before, during and after "
        "training.",
    )
    source_dir: str | None = option(None, "Source tree to mine documented functions from; 'stdlib' is Python's own.")
    mining_keep: str | None = option(
        None, "Rules of mining not to apply, by comma, for example short_functions (functions under 3 lines)."
    )
    filters: str | None = option(
        None,
        "Rules that drop rows, by comma: names of soft_trainer.mining.rules.RULES, graphcodebert, codesearchnet.",
    )
    split_urls: str | None = option(None, "Folder with train.txt, valid.txt, test.txt and codebase.txt of urls.")
    push_data_to_hub: str | None = option(
        None, "USER/NAME: push the rows of --source_dir or --data_dir, as they are trained on, as a data set."
    )
    max_train_rows: int | None = option(None, "Train on this many rows only, the first ones.")
    lexical: bool = option(True, "Also rank by lexical BM25, a baseline that needs no training.")
    model_card: bool = option(True, "Write README.md, the model card, into the output folder.")
    examples: int = option(5, "Test queries to show with their top functions at the end.")
    early_stopping_patience: int | None = option(None, "Stop after this many evaluations without a better metric.")
    estimator: str | None = option(
        "bm25",
        "Estimator of the weights: bm25, simcse, trained_model, initial_model (the encoder before training), none, a "
        "mixture a+b, or module:Class. An encoder of sentence-transformers takes those of the recipe hard_batches.",
    )
    estimator_model: str | None = option(
        None, "Hub name (NAME@REVISION pins one) or folder of the encoder behind simcse or trained_model; by comma."
    )
    estimator_cache_dir: str | None = option(None, "Where row embeddings are kept. Default: in the Hugging Face home.")
    no_estimator_cache: bool = option(False, "Compute row embeddings in every run and keep none.")
    mixture_shares: str | None = option(None, "Share of each member of a mixture, by comma. Default: equal.")
    mixture_temperatures: str | None = option(None, "Temperature of each member, by comma. Default: its own.")
    bm25_idf: str = option("okapi", "Inverse document frequency of BM25: okapi, robertson or lucene.")
    bm25_scope: str = option("batch", "Statistics of BM25 from the batch or the corpus.")
    bm25_document_column: str | None = option(None, "Score queries against this column instead of other queries.")

    def __post_init__(self):
        if self.max_train_rows is not None and self.max_train_rows < 1:
            raise UserError(f"max_train_rows={self.max_train_rows}: must be 1 or more")
        if self.examples < 0:
            raise UserError(f"examples={self.examples}: must be 0 or more")

    @property
    def languages(self) -> list[str]:
        """The languages that are trained together."""
        return [name.strip() for name in self.language.split(",")]

    @property
    def paper_language(self) -> str | None:
        """The language whose row counts in the paper compare, None for rows that are not CodeSearchNet's."""
        published = self.rows_name == CODESEARCHNET and len(self.languages) == 1
        return self.language if published else None

    @property
    def rows_name(self) -> str:
        """The name of the rows: their name on the Hub, or that of their folder."""
        own = self.data_dir or self.source_dir
        return self.push_data_to_hub or (_folder_name(own) if own else self.dataset_name)


def _folder_name(folder: str) -> str:
    """The folder's own name, also of `.` and `..`."""
    return os.path.basename(os.path.abspath(folder.replace("{language}", "")))


@dataclass
class SoftInfoNCEOptions:
    """The loss and its weights. None means the estimator's default."""

    loss: str | None = option(
        None,
        "soft_info_nce, info_nce, weighted_info_nce, bce or kl_regularization. Default: soft_info_nce with an "
        "estimator, info_nce without.",
    )
    alpha: float | None = option(None, "Weight of the similarity in Eq. 4. Default: the estimator's.")
    beta: float | None = option(None, "Constant of Eq. 4. Default: the estimator's.")
    temperature: float | None = option(
        None, "Temperature of the softmax of similarities, or of positive_aware weights. Default: the estimator's."
    )
    floor: float = option(0.1, "Smallest weight of a negative in Eq. 4.")
    weighting: str = option(
        "eq4", "From similarity to weight: eq4 compares negatives with each other, positive_aware with the positive."
    )
    margin: float | None = option(
        None, "positive_aware: a negative counts fully if it is less similar than the positive by this much."
    )
    order_loss_weight: float = option(0.0, "Weight of a further loss: order negatives as the estimator does. 0: none.")
    order_loss_scale: float = option(1.0, "Factor on the differences of scores in the order loss.")
    distill_weight: float = option(
        0.0, "Weight of a further loss: KL divergence of the scores over the negatives from the estimator's. 0: none."
    )
    distill_temperature: float | None = option(
        None, "Temperature of the estimator's softmax in that loss. Default: that of the estimator's own distribution."
    )
    infonce_weight: float = option(1.3, "Weight of InfoNCE in kl_regularization.")
    kl_weight: float = option(0.7, "Weight of the divergence in kl_regularization.")
    cancel: str = option("none", "False-negative cancellation: none, top_k or ratio.")
    cancel_k: int = option(3, "How many of the most similar negatives top_k cancels.")
    cancel_ratio: float = option(0.5, "ratio cancels negatives above this share of the positive's similarity.")
    clamp_negative_scores: bool = option(False, "Raise negative scores to 0, as the proof of Theorem 1 does.")
    duplicates: str = option(
        "mask",
        "A negative with the query's or the code's text: mask leaves it out, positives counts it as a right answer, "
        "ignore counts it as a negative.",
    )
    mask_duplicates: bool | None = option(None, "Earlier name: true means --duplicates mask, false ignore.")
    group_size: int = option(8, "train_sampling_strategy similar: rows in a group of similar rows.")
    random_share: float = option(0.0, "train_sampling_strategy similar: share of random rows in a batch, from 0 to 1.")
    nearest_apart: int = option(
        0, "train_sampling_strategy similar: this many nearest neighbours of a row never share its batch."
    )
    equal_texts_apart: bool = option(
        False, "train_sampling_strategy similar: rows with the same query or code never share a batch."
    )
    neighbours: int = option(32, "train_sampling_strategy similar: neighbours that are known of each row.")
    similar_by: str = option(
        "estimator", "train_sampling_strategy similar: neighbours by estimator, or by bm25 (queries, without a model)."
    )
    negatives_per_query: int = option(0, "Negatives of its own for each query, beside those of the batch.")
    negatives: str | None = option(
        None,
        "File of negatives (soft-trainer mine-negatives, or mined by sentence-transformers), or column for the column "
        "`negatives` of the rows. Default: that column if there is one, else the run's estimator mines them first.",
    )
    negatives_meet: str = option("own", "Queries that own negatives meet: own (the query they belong to) or all.")
    negative_candidates: int = option(64, "Candidates that are mined for each query.")
    negative_ranks: str | None = option(
        None, "FIRST,LAST: candidates of these ranks may be drawn, from 0, LAST left out."
    )
    negative_max_score: float | None = option(None, "Largest similarity of an own negative.")
    negative_margin: float | None = option(None, "An own negative is less similar than the positive by this much.")
    negative_ratio: float | None = option(None, "Largest share of the positive's similarity of an own negative.")
    negative_temperature: float | None = option(
        None,
        "Own negatives are drawn with the softmax of similarity / temperature; 0 takes the most similar ones. "
        "Default: all candidates are equally likely.",
    )
    gather_negatives: bool | None = option(
        None, "Take the codes of all processes as negatives. Default: yes, with several processes."
    )
    gradient_cache_chunk_size: int | None = option(
        None,
        "Encode this many texts at a time and cache the gradient of their embeddings: large batches, little memory.",
    )
    chunk_by_length: bool = option(True, "Encode a batch in chunks of similar length, with the same result.")
    matryoshka_dims: str | None = option(None, "Train these first dimensions as embeddings too, such as 768,256,64.")


@dataclass
class SoftInfoNCETrainingArguments(SoftInfoNCEOptions, TrainingArguments):
    """`transformers.TrainingArguments` with the options of the loss.

    Defaults that differ: batches of 32, 10 epochs, `learning_rate` 2e-5, the last short batch dropped, the model with
    the best `mrr` counts as best, NaN is never filtered from the log, unused columns stay, buffers are not broadcast.
    """

    output_dir: str | None = option(None, "Where to write. Default: outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR.")
    overwrite: bool = option(False, "Write into an output folder that holds the results of another run.")
    per_device_train_batch_size: int = option(32, "Pairs in a batch, per process.")
    per_device_eval_batch_size: int = option(64, "Texts encoded at once in evaluation, per process.")
    learning_rate: float = option(2e-5, "Peak learning rate of AdamW.")
    num_train_epochs: float = option(10.0, "Passes over the training rows.")
    logging_steps: float = option(50, "Steps between two lines of the log.")
    logging_nan_inf_filter: bool = option(False, "Hide NaN and infinite losses from the log.")
    save_strategy: str = option("epoch", "When to save a checkpoint: no, steps, epoch or best.")
    save_total_limit: int | None = option(2, "How many checkpoints to keep.")
    dataloader_drop_last: bool = option(True, "Leave out the last batch of an epoch if it is not full.")
    dataloader_num_workers: int = option(-1, "Processes that prepare batches. -1: none on a CPU, up to 4 on a GPU.")
    remove_unused_columns: bool = option(False, "Not used: the columns of a pair are always kept.")
    ddp_broadcast_buffers: bool | None = option(False, "Broadcast buffers before every forward pass.")
    train_sampling_strategy: str = option(
        "random",
        "How rows are put into batches: random, sequential, no_duplicates (of a query or a code), group_by_length, "
        "one_language, or similar (groups of rows that an estimator finds alike).",
    )
    restore_callback_states_from_checkpoint: bool = option(True, "Resume early stopping where it was.")
    metric_for_best_model: str | None = option("mrr", "Metric that tells the best model.")
    merge_lora: bool = option(False, "Save the whole encoder, with the adapter merged into its weights.")
    merge_ratio: str | None = option(
        None,
        "Merge once at the end: this share of the weights after training, the rest of those before, from 0 to 1; auto "
        "chooses by valid and --guard. OUTPUT_DIR/unmerged keeps the weights after training.",
    )
    guard_tolerance: float = option(0.005, "How far the MRR of a guard may fall for merge_ratio auto.")

    def __post_init__(self):
        if not (self.do_train or self.do_eval or self.do_predict):
            self.do_train = self.do_eval = self.do_predict = True
        if self.mask_duplicates is not None:
            self.duplicates = "mask" if self.mask_duplicates else "ignore"
        workers, self.dataloader_num_workers = self.dataloader_num_workers, max(self.dataloader_num_workers, 0)
        for name in self._VALID_DICT_FIELDS:
            _check_json(name, getattr(self, name, None))
        folder = self.output_dir
        super().__post_init__()
        self.output_dir = folder  # stays None, so that the script can fill it in
        if workers < 0 and self.device.type != "cpu":
            self.dataloader_num_workers = 4


def _check_json(name: str, value) -> None:
    """Refuses a text that begins like a JSON mapping but is not valid JSON."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            json.loads(value)
        except ValueError as error:
            raise UserError(f"{name}={value}: not valid JSON: {error}") from error
