#!/usr/bin/env python
"""Fine-tune a code-search encoder and measure how well it finds functions.

accelerate launch run_codesearch.py --language ruby
python run_codesearch.py --config recipes/quickstart.yaml
python run_codesearch.py --help
"""

from __future__ import annotations

import gc
from pathlib import Path

from soft_trainer.arguments import parse
from soft_trainer.terminal import exit_on_user_error


def main() -> None:
    """Parse, load, measure, train, measure again, report, push. Imports wait until the options are known good."""
    from soft_trainer.arguments import DataArguments, ModelArguments, SoftInfoNCETrainingArguments

    # ---- Options ----
    model_args, data_args, args = parse((ModelArguments, DataArguments, SoftInfoNCETrainingArguments))

    from transformers import EarlyStoppingCallback, set_seed

    from soft_trainer import EstimatorCallback, SoftInfoNCETrainer, distributed
    from soft_trainer.data.sources import load_data, needed_splits
    from soft_trainer.data.statistics import data_statistics, statistics_table
    from soft_trainer.estimators.registry import choose_estimator
    from soft_trainer.evaluation.evaluation_sets import load_evaluation_sets
    from soft_trainer.evaluation.results import METRICS
    from soft_trainer.data.codesearchnet import by_language
    from soft_trainer.files import last_checkpoint
    from soft_trainer.hub.data import push_data
    from soft_trainer.hub.publishing import check_pushes
    from soft_trainer.studies.run import Run, default_output_dir
    from soft_trainer.terminal import print_on_main
    from soft_trainer.training.building import build_model, build_profile, build_tokenizer
    from soft_trainer.training.checks import check_run, measured_metrics
    from soft_trainer.training.options import check_options

    gc.enable()
    check_options(args)
    args.output_dir = args.output_dir or default_output_dir(model_args, data_args, args)
    set_seed(args.seed)
    distributed.use_the_cores()

    # ---- Rows ----
    check_pushes(data_args, args)
    profile = build_profile(model_args)
    estimator = choose_estimator(data_args, profile.query_columns)
    with args.main_process_first(desc="loading data"):
        needed = needed_splits(data_args, args, bool(model_args.from_scratch))
        data = load_data(data_args, profile, Path(args.output_dir) / "data", needed)
        evaluation_sets = load_evaluation_sets(data_args, profile, data.get("codebase"))
        valid, corpus = (by_language(data.get(split), data_args.languages) for split in ("valid", "codebase"))
        metrics = measured_metrics(METRICS, valid)
        check_run(args, estimator, data.get("train"), data_args.early_stopping_patience, metrics)
        checkpoint = last_checkpoint(args.resume_from_checkpoint, args.output_dir)
        tokenizer = build_tokenizer(model_args, profile, data.get("train"))
        statistics = data_statistics(data, profile, tokenizer)
    push_data(data, data_args, args)
    if statistics:
        print_on_main(statistics_table(statistics, data_args.paper_language))

    # ---- Trainer ----
    callbacks = [EstimatorCallback(estimator)] if estimator is not None else []
    if data_args.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(data_args.early_stopping_patience))
    trainer = SoftInfoNCETrainer(
        model=build_model(model_args, profile, tokenizer),
        args=args,
        train_dataset=data.get("train"),
        eval_dataset=valid,
        codebase=corpus,
        processing_class=tokenizer,
        encoder=profile,
        callbacks=callbacks,
    )

    # ---- Before, train, after ----
    run = Run(trainer, data, model_args, data_args, statistics, evaluation_sets)
    run.measure("untrained")
    if args.do_train:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.save_state()
        run.measure("trained")
    if data_args.lexical:
        run.measure_lexical()

    # ---- Report ----
    run.finish()
    if args.push_to_hub:
        trainer.push_to_hub()
    distributed.close()


if __name__ == "__main__":
    gc.disable()  # importing makes no garbage, and looking for some would take a tenth of its time
    try:
        with exit_on_user_error():
            main()
    finally:
        gc.freeze()  # nor does the end of the process need to look for any
