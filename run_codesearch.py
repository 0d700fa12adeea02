#!/usr/bin/env python
"""Fine-tune a code-search encoder and measure how well it finds functions.

accelerate launch run_codesearch.py --language ruby
accelerate launch run_codesearch.py --config recipes/quickstart.yaml
python run_codesearch.py --help
"""

from __future__ import annotations

from pathlib import Path

from soft_trainer.command_line import errors_for_people, parse


def main() -> None:
    from soft_trainer.arguments import DataArguments, ModelArguments, SoftInfoNCETrainingArguments

    # ---- Options ----
    model_args, data_args, args = parse((ModelArguments, DataArguments, SoftInfoNCETrainingArguments))

    from transformers import EarlyStoppingCallback, set_seed

    from soft_trainer import EstimatorCallback, SoftInfoNCETrainer, distributed
    from soft_trainer.console import say
    from soft_trainer.data.codesearchnet import check_language
    from soft_trainer.data.sources import load_data
    from soft_trainer.data.statistics import data_statistics, statistics_table
    from soft_trainer.encoders.building import build_model, build_profile, build_tokenizer
    from soft_trainer.estimators.choosing import choose_estimator
    from soft_trainer.preflight import check_run
    from soft_trainer.runs import Run, default_output_dir, last_checkpoint

    args.output_dir = args.output_dir or default_output_dir(model_args, data_args, args)
    set_seed(args.seed)
    distributed.use_the_cores()

    # ---- Rows ----
    check_language(data_args.language)
    profile = build_profile(model_args)
    estimator = choose_estimator(data_args, profile.query_columns)
    with args.main_process_first(desc="loading data"):
        data = load_data(data_args, profile, mined_dir=Path(args.output_dir) / "data")
        check_run(args, estimator, data["train"], data_args.early_stopping_patience)
        checkpoint = last_checkpoint(args)
        tokenizer = build_tokenizer(model_args, profile, data["train"])
        statistics = data_statistics(data, profile, tokenizer)
    say(statistics_table(statistics, data_args.paper_language))

    # ---- Trainer ----
    callbacks = [EstimatorCallback(estimator)] if estimator is not None else []
    if data_args.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(data_args.early_stopping_patience))
    trainer = SoftInfoNCETrainer(
        model=build_model(model_args, profile, tokenizer),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["valid"],
        codebase=data["codebase"],
        processing_class=tokenizer,
        encoder=profile,
        callbacks=callbacks,
    )

    # ---- Before, train, after ----
    run = Run(trainer, data, model_args, data_args, statistics)
    run.measure("untrained")
    if data_args.lexical:
        run.measure_lexical()
    if args.do_train:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.save_state()
        run.measure("trained")

    # ---- Report ----
    run.finish()
    if args.push_to_hub:
        trainer.push_to_hub()
    distributed.close()


if __name__ == "__main__":
    with errors_for_people():
        main()
