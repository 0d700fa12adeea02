#!/usr/bin/env python
"""Fine-tune a code-search encoder and measure how well it finds functions.

accelerate launch run_codesearch.py --language ruby
python run_codesearch.py --config recipes/quickstart.yaml
python run_codesearch.py --help

`soft-trainer train` is the same code.
"""

from __future__ import annotations

from collections.abc import Sequence

from soft_trainer.errors import messages_for_shell
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.parse import parse
from soft_trainer.terminal import exit_on_user_error, one_line_errors, print_on_main, quiet_libraries

OPTIONS = (ModelArguments, DataArguments, TrainingOptions)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the options of the command line and runs."""
    with messages_for_shell():
        run(*parse(OPTIONS, argv, description=__doc__))


def run(model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions) -> None:
    """Loads, measures, trains, measures again, reports and pushes."""
    from soft_trainer import distributed  # imported here, so that --help need not wait for it

    with one_line_errors(getattr(args, "given", {})) as beginning:
        opening, checkpoint = check(model_args, data_args, args)
        trainer, measurements = prepare(model_args, data_args, args, opening, checkpoint)
        beginning.over = lambda: trainer.state.global_step > 0
        train_and_measure(trainer, measurements, data_args, checkpoint)
    if args.push_to_hub:
        print_on_main(f"Pushed: {trainer.push_to_hub()}")
    distributed.close()


def check(model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions):
    """Checks options and local rows, before the Hub is asked for anything. Returns them, and where to resume from."""
    # Imported here, so that --help and a wrong option need not wait for them.
    from transformers import set_seed

    from soft_trainer import distributed
    from soft_trainer.hub.background import check_pushes
    from soft_trainer.options.defaults import apply_default_recipe
    from soft_trainer.options.resolve import check_options
    from soft_trainer.run.building import model_name
    from soft_trainer.run.opening import open_run
    from soft_trainer.run.record import check_output_dir, default_output_dir
    from soft_trainer.training.checkpoints import last_checkpoint

    check_options(args)
    opening = open_run(model_args, data_args, args)
    pretrained = None if model_args.from_scratch else model_name(model_args)
    apply_default_recipe(data_args, args, opening.profile, pretrained, model_args.model_revision)
    args.output_dir = args.output_dir or default_output_dir(model_args, data_args, args)
    set_seed(args.seed)
    distributed.use_the_cores()
    checkpoint = last_checkpoint(args.resume_from_checkpoint, args.output_dir)
    if checkpoint is None:
        check_output_dir(model_args, data_args, args)
    check_pushes(data_args, args)
    return opening, checkpoint


def prepare(model_args, data_args, args: TrainingOptions, opening, checkpoint: str | None):
    """Returns the trainer with its rows, and the `Run` that measures it."""
    # Imported here for the same reason.
    from soft_trainer.data.statistics import data_statistics, statistics_table
    from soft_trainer.hub.dataset import push_data
    from soft_trainer.options.declared import Values, unread_options
    from soft_trainer.run.building import build_tokenizer
    from soft_trainer.run.checks import check_before_loading
    from soft_trainer.run.estimator import choose_estimator
    from soft_trainer.run.folder import RunFolder
    from soft_trainer.run.opening import load_run
    from soft_trainer.run.record import Run

    files = RunFolder(args.output_dir, resumes=checkpoint is not None)
    profile = opening.profile
    estimator = choose_estimator(data_args, profile.query_columns, model_args.trust_remote_code)
    data, evaluation_sets = load_run(opening, data_args, args)
    with args.main_process_first(desc="loading the tokenizer"):
        check_before_loading(model_args, data_args, args, estimator, data, profile)
        tokenizer = build_tokenizer(model_args, profile, data.tables.get("train"))
        statistics = data_statistics(data.tables, profile, tokenizer)
    if statistics:
        print_on_main(statistics_table(statistics, data_args.paper_language, complete=not data.sources))
    for line in unread_options([data_args, model_args], Values(data_args, model_args, args)):
        print_on_main(line)
    trainer = build_trainer(model_args, data_args, args, data, profile, estimator, tokenizer)
    files.take_over(args.do_train)  # as late as possible: an earlier run's files stay if this one cannot begin
    push_data(data.tables, data_args, args)
    return trainer, Run(trainer, data, model_args, data_args, statistics, evaluation_sets, files)


def train_and_measure(trainer, run, data_args: DataArguments, checkpoint: str | None) -> None:
    """Measures the encoder, trains it unless only measuring was asked for, measures it again, and reports."""
    # Imported here for the same reason.
    from soft_trainer.training.interruption import explaining_interruption

    with explaining_interruption(trainer.args):
        run.measure("untrained", data_args.lexical and not trainer.args.do_train)
        if trainer.args.do_train:
            trainer.train(resume_from_checkpoint=checkpoint)
            trainer.save_model()
            trainer.save_state()
            run.measure("trained", data_args.lexical)
        run.finish()


def build_trainer(model_args, data_args, args, data, profile, estimator, tokenizer):
    """Returns the trainer with its model, its rows and its callbacks."""
    # Imported here for the same reason.
    from soft_trainer import EstimatorCallback, SoftInfoNCETrainer
    from soft_trainer.run.building import build_model

    callbacks = [EstimatorCallback(estimator)] if estimator is not None else []
    return SoftInfoNCETrainer(
        model=build_model(model_args, profile, tokenizer),
        args=args,
        train_dataset=data.splits.get("train") if args.do_train else None,
        eval_dataset=data.evaluated("valid", data_args.languages),
        processing_class=tokenizer,
        encoder=profile,
        callbacks=callbacks,
    )


if __name__ == "__main__":
    quiet_libraries()
    with exit_on_user_error():
        main()
