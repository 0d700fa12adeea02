"""Declares the training arguments for editors. `python docs/options_reference.py` writes this file."""

from dataclasses import dataclass

from transformers import TrainingArguments

from soft_trainer.options.fields import TrainingOptions

@dataclass
class SoftInfoNCETrainingArguments(TrainingOptions, TrainingArguments):
    """The arguments of `transformers`, extended with options for the loss, the batches and the negatives.

    None stands for the default of any option. The learning rate, the epochs, the warm-up, the batch size, the weights
    and the batches are None until a trainer is made; its `args` have the defaults for its encoder
    (`options/defaults.py`). Some other defaults differ from the defaults of `transformers`: the last
    incomplete batch is dropped, the best model is the model with the highest `mrr`, NaN losses appear in the log, and
    DDP does not broadcast buffers.

    Args:
        output_dir: Output folder. Default: outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR.
        per_device_train_batch_size: Batch size per process, in pairs. Default: 32; 128 for base and if static; 512
            for distilled encoders.
        num_train_epochs: Passes over the training rows. Default: 10; 1 for search encoders; 5 for base.
        learning_rate: Peak learning rate of AdamW. Default: 2e-5; 6e-5 for search encoders; 3e-3 if static or
            distilled; 1e-3 for base and from scratch; 1e-4 for adapters (LoRA).
        bf16: Train and encode in bfloat16. Default: yes if the GPU or CPU computes in it, not if static.
        disable_tqdm: Print lines instead of progress bars. Default: only without a terminal.
        per_device_eval_batch_size: Number of texts that each process encodes at once during evaluation. On a GPU,
            more texts if they are short.
        push_to_hub: Push the encoder to the Hub at the end.
        seed: Random seed for rows, batches, dropout and new weights.
        use_cpu: Use the CPU even if there is a GPU.
        train_sampling_strategy: How rows are grouped into batches: random, sequential, no_duplicates (no query or
            function twice), group_by_length, one_language, or similar. Default: similar for search encoders,
            otherwise random.
        estimator: Estimator for weights and similar rows: none, bm25, trained_model, simcse, initial_model, scores,
            or module:Class. initial_model is the encoder before training. Default: initial_model for search encoders,
            the teacher of distilled ones, otherwise bm25.
        estimator_model: Encoder for simcse or trained_model: a folder, a Hub name, or NAME@REVISION.
        estimator_cache_dir: Folder for cached row embeddings, or none for no cache. Default: in the Hugging Face
            home.
        bm25_idf: Inverse document frequency of BM25: okapi, robertson or lucene.
        bm25_scope: Where BM25's statistics come from: batch or corpus.
        bm25_document_column: Column that bm25 scores queries against, instead of other queries.
        loss: soft_info_nce, info_nce, weighted_info_nce, bce, kl_regularization, or your own function as module:name.
            Default: soft_info_nce with an estimator, otherwise info_nce.
        weighting: How similarities become weights: linear compares negatives with each other (Eq. 4), positive_aware
            compares them with the positive; or your own function as module:name. Default: positive_aware for search
            encoders, otherwise linear.
        alpha: weighting=linear: weight of the similarity in Eq. 4. Default: the estimator's.
        beta: weighting=linear: constant in Eq. 4. Default: the estimator's.
        temperature: Temperature of the softmax of similarities, or of positive_aware weights. It belongs to the
            weights: the scores in the loss have score_scale. Default: the estimator's.
        floor: weighting=linear: smallest weight of a negative in Eq. 4. Default: 0.1.
        margin: weighting=positive_aware: a negative has weight 1 if it is less similar than the positive by this
            much. Default: the estimator's.
        distill_weight: Weight of an additional loss, the KL divergence between the estimator's scores and the
            encoder's over the negatives. 0 turns it off. Default: 0.3 with a teacher, otherwise 0.
        distill_temperature: Temperature of the estimator's softmax in the loss that distill_weight adds. Default: the
            estimator's.
        infonce_weight: Weight of InfoNCE in kl_regularization.
        kl_weight: Weight of the divergence in kl_regularization.
        cancel: False-negative cancellation: none, top_k or ratio.
        cancel_k: cancel=top_k: number of negatives to exclude, the most similar ones.
        cancel_ratio: cancel=ratio: negatives are excluded if their similarity is above this fraction of the
            positive's.
        teacher: A stronger encoder or cross-encoder to learn from: a folder or Hub name. Short for
            estimator=trained_model, estimator_model=NAME, loss=info_nce and distill_weight=0.3.
        false_negatives: What to do with a negative whose query or function has the same text as the positive's: mask
            excludes it, positives treats it as a relevant function, ignore treats it as a negative.
        group_size: Number of similar rows in a group, for train_sampling_strategy=similar. Default: 8.
        negatives_per_query: Hard negatives for each query, in addition to the other functions in the batch. They come
            from the rows' columns of negatives or, without such a column, from the functions that the estimator finds
            most similar. 0 uses none. Default: as many as the columns name, at most 4; none without such a column.
        negative_ratio: With negatives_per_query: maximum similarity of a negative that the estimator finds, relative
            to the query's positive.
        gather_negatives: Use the functions of all processes as negatives. Default: yes.
        gradient_cache_chunk_size: Encode this many texts at a time and cache the gradients of their embeddings, for
            large batches in little memory.
        matryoshka_dims: Also use the first N dimensions of each embedding as an embedding, for each N in a list such
            as 768,256,64.
        overwrite: Start over and replace the run in the output folder, instead of continuing it.
        packing: Join the texts of a batch without padding, so that a step is one forward pass: auto (if the encoder
            and the run support it), true (otherwise an error) or false, for every encoder of the run.
        early_stopping_patience: Stop after this many evaluations in a row without a better metric_for_best_model.
            Default: never.
        report: In Python: evaluate eval_dataset before and after training and with lexical BM25, print a table of the
            results at the end, and write the encoder, its card, run.json and the ranks. The command line always does.
        lexical: Also rank by lexical BM25, a baseline that needs no training.
        examples: Number of test queries to show at the end, with their top functions.
        model_card: Write README.md, the model card, beside a saved encoder.
        merge_lora: Save the whole encoder, with the adapter merged into its weights.
        merge_ratio: At the end, average the weights before and after training. The ratio, from 0 to 1, is the weight
            of the trained encoder. OUTPUT_DIR/unmerged keeps the trained encoder.

    Attributes:
        from_command_line: True if `parse` made the arguments.
        by_encoder: after `apply_defaults`, the names of the options whose values it chose.
    """

    output_dir: str | None = None
    """Output folder. Default: outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR."""
    per_device_train_batch_size: int | None = None
    """Batch size per process, in pairs. Default: 32; 128 for base and if static; 512 for distilled encoders. Values: 1
    or more."""
    num_train_epochs: float | None = None
    """Passes over the training rows. Default: 10; 1 for search encoders; 5 for base. Values: above 0."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW. Default: 2e-5; 6e-5 for search encoders; 3e-3 if static or distilled; 1e-3 for base
    and from scratch; 1e-4 for adapters (LoRA). Values: 0 or more."""
    bf16: bool | None = None
    """Train and encode in bfloat16. Default: yes if the GPU or CPU computes in it, not if static."""
    disable_tqdm: bool | None = None
    """Print lines instead of progress bars. Default: only without a terminal."""
    per_device_eval_batch_size: int = 64
    """Number of texts that each process encodes at once during evaluation. On a GPU, more texts if they are short.
    Values: 1 or more. Default: 64."""
    push_to_hub: bool = False
    """Push the encoder to the Hub at the end. Default: False."""
    seed: int = 42
    """Random seed for rows, batches, dropout and new weights. Values: 0 or more. Default: 42."""
    use_cpu: bool = False
    """Use the CPU even if there is a GPU. Default: False."""
    train_sampling_strategy: str | None = None
    """How rows are grouped into batches: random, sequential, no_duplicates (no query or function twice),
    group_by_length, one_language, or similar. Default: similar for search encoders, otherwise random."""
    estimator: str | None = None
    """Estimator for weights and similar rows: none, bm25, trained_model, simcse, initial_model, scores, or
    module:Class. initial_model is the encoder before training. Default: initial_model for search encoders, the teacher
    of distilled ones, otherwise bm25."""
    estimator_model: str | None = None
    """Encoder for simcse or trained_model: a folder, a Hub name, or NAME@REVISION."""
    estimator_cache_dir: str | None = None
    """Folder for cached row embeddings, or none for no cache. Default: in the Hugging Face home."""
    bm25_idf: str = "okapi"
    """Inverse document frequency of BM25: okapi, robertson or lucene. Default: 'okapi'."""
    bm25_scope: str = "batch"
    """Where BM25's statistics come from: batch or corpus. Default: 'batch'."""
    bm25_document_column: str | None = None
    """Column that bm25 scores queries against, instead of other queries."""
    loss: str | None = None
    """soft_info_nce, info_nce, weighted_info_nce, bce, kl_regularization, or your own function as module:name.
    Default: soft_info_nce with an estimator, otherwise info_nce."""
    weighting: str | None = None
    """How similarities become weights: linear compares negatives with each other (Eq. 4), positive_aware compares them
    with the positive; or your own function as module:name. Default: positive_aware for search encoders, otherwise
    linear."""
    alpha: float | None = None
    """weighting=linear: weight of the similarity in Eq. 4. Default: the estimator's. Values: 0 or more."""
    beta: float | None = None
    """weighting=linear: constant in Eq. 4. Default: the estimator's. Values: above 0."""
    temperature: float | None = None
    """Temperature of the softmax of similarities, or of positive_aware weights. It belongs to the weights: the scores
    in the loss have score_scale. Default: the estimator's. Values: 0 or more."""
    floor: float | None = None
    """weighting=linear: smallest weight of a negative in Eq. 4. Default: 0.1. Values: from 0 to 1."""
    margin: float | None = None
    """weighting=positive_aware: a negative has weight 1 if it is less similar than the positive by this much. Default:
    the estimator's."""
    distill_weight: float | None = None
    """Weight of an additional loss, the KL divergence between the estimator's scores and the encoder's over the
    negatives. 0 turns it off. Default: 0.3 with a teacher, otherwise 0. Values: 0 or more."""
    distill_temperature: float | None = None
    """Temperature of the estimator's softmax in the loss that distill_weight adds. Default: the estimator's. Values:
    above 0."""
    infonce_weight: float = 1.3
    """Weight of InfoNCE in kl_regularization. Values: 0 or more. Default: 1.3."""
    kl_weight: float = 0.7
    """Weight of the divergence in kl_regularization. Values: 0 or more. Default: 0.7."""
    cancel: str = "none"
    """False-negative cancellation: none, top_k or ratio. Default: 'none'."""
    cancel_k: int = 3
    """cancel=top_k: number of negatives to exclude, the most similar ones. Values: 0 or more. Default: 3."""
    cancel_ratio: float = 0.5
    """cancel=ratio: negatives are excluded if their similarity is above this fraction of the positive's. Values: 0 or
    more. Default: 0.5."""
    teacher: str | None = None
    """A stronger encoder or cross-encoder to learn from: a folder or Hub name. Short for estimator=trained_model,
    estimator_model=NAME, loss=info_nce and distill_weight=0.3."""
    false_negatives: str = "mask"
    """What to do with a negative whose query or function has the same text as the positive's: mask excludes it,
    positives treats it as a relevant function, ignore treats it as a negative. Default: 'mask'."""
    group_size: int | None = None
    """Number of similar rows in a group, for train_sampling_strategy=similar. Default: 8. Values: 1 or more."""
    negatives_per_query: int | None = None
    """Hard negatives for each query, in addition to the other functions in the batch. They come from the rows' columns
    of negatives or, without such a column, from the functions that the estimator finds most similar. 0 uses none.
    Default: as many as the columns name, at most 4; none without such a column. Values: 0 or more."""
    negative_ratio: float = 0.95
    """With negatives_per_query: maximum similarity of a negative that the estimator finds, relative to the query's
    positive. Default: 0.95."""
    gather_negatives: bool | None = None
    """Use the functions of all processes as negatives. Default: yes."""
    gradient_cache_chunk_size: int | None = None
    """Encode this many texts at a time and cache the gradients of their embeddings, for large batches in little
    memory. Values: 1 or more."""
    matryoshka_dims: str | None = None
    """Also use the first N dimensions of each embedding as an embedding, for each N in a list such as 768,256,64."""
    overwrite: bool = False
    """Start over and replace the run in the output folder, instead of continuing it. Default: False."""
    packing: str = "auto"
    """Join the texts of a batch without padding, so that a step is one forward pass: auto (if the encoder and the run
    support it), true (otherwise an error) or false, for every encoder of the run. Default: 'auto'."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without a better metric_for_best_model. Default: never. Values: 1 or
    more."""
    report: bool = False
    """In Python: evaluate eval_dataset before and after training and with lexical BM25, print a table of the results
    at the end, and write the encoder, its card, run.json and the ranks. The command line always does. Default:
    False."""
    lexical: bool = True
    """Also rank by lexical BM25, a baseline that needs no training. Default: True."""
    examples: int = 5
    """Number of test queries to show at the end, with their top functions. Values: 0 or more. Default: 5."""
    model_card: bool = True
    """Write README.md, the model card, beside a saved encoder. Default: True."""
    merge_lora: bool = False
    """Save the whole encoder, with the adapter merged into its weights. Default: False."""
    merge_ratio: float | None = None
    """At the end, average the weights before and after training. The ratio, from 0 to 1, is the weight of the trained
    encoder. OUTPUT_DIR/unmerged keeps the trained encoder."""
