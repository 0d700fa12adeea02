#!/usr/bin/env python
"""Fine-tune a code-search encoder and measure how well it finds functions.

accelerate launch run_codesearch.py --language ruby
python run_codesearch.py --config recipes/quickstart.yaml
python run_codesearch.py --help

`soft-trainer train` is the same code.
"""

from __future__ import annotations

from collections.abc import Sequence

from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.parse import parse
from soft_trainer.terminal import exit_on_user_error, one_line_errors, print_on_main, quiet_libraries

OPTIONS = (ModelArguments, DataArguments, TrainingOptions)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the options of the command line and runs."""
    run(*parse(OPTIONS, argv, description=__doc__))


def run(model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions) -> None:
    """Loads, measures, trains, measures again, reports and pushes."""
    # Imported here, so that --help need not wait for it.
    from soft_trainer import distributed

    options = (model_args, data_args, args)
    with one_line_errors():
        rows, estimator, folder = load(*options)
    with folder:
        if folder.done:
            push_again(data_args, args, rows.splits)
        else:
            with one_line_errors():
                trainer, measurements = prepare(*options, rows, estimator, folder)
            with one_line_errors(until=lambda: trainer.state.global_step > 0):
                train_and_measure(trainer, measurements, data_args, folder)
            if args.push_to_hub:
                print_on_main(f"Pushed: {trainer.push_to_hub()}")
    distributed.close()


def load(model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions):
    """Checks the options, loads the rows and opens the output folder. Returns rows, estimator and locked folder."""
    # Imported here, so that --help and a wrong option need not wait for them.
    from transformers import set_seed

    from soft_trainer import distributed
    from soft_trainer.estimators.registry import estimator_of_run
    from soft_trainer.hub.background import check_pushes
    from soft_trainer.options.resolve import check_options
    from soft_trainer.run.folder import RunFolder
    from soft_trainer.run.opening import complete_options, load_run, open_run

    check_options(args)
    profile, sources = open_run(model_args, data_args, args)
    complete_options(model_args, data_args, args, profile)
    check_pushes(data_args, args)
    set_seed(args.seed)
    distributed.use_the_cores()
    estimator = None
    if args.do_train:
        estimator = estimator_of_run(args, profile, model_args.trust_remote_code)
    rows = load_run(model_args, data_args, args, profile, sources)
    return rows, estimator, RunFolder.open((model_args, data_args, args), rows)


def prepare(model_args, data_args, args: TrainingOptions, rows, estimator, folder):
    """Returns the trainer with its rows, and the `Measurements` that write its results."""
    # Imported here for the same reason.
    from soft_trainer.data.statistics import data_statistics, statistics_table
    from soft_trainer.hub.dataset import push_data
    from soft_trainer.options.option_spec import Values, unread_options
    from soft_trainer.run.building import build_tokenizer
    from soft_trainer.run.opening import check_before_loading
    from soft_trainer.run.record import measurements_of_run

    with args.main_process_first(desc="loading the tokenizer"):
        check_before_loading(model_args, data_args, args, estimator, rows)
        tokenizer = build_tokenizer(model_args, rows.profile, rows.splits.get("train"))
        statistics = data_statistics(rows.splits, rows.profile, tokenizer)
    if statistics:
        print_on_main(statistics_table(statistics, data_args.paper_language, complete=not data_args.sources))
    for line in unread_options([data_args, model_args], Values(data_args, model_args, args)):
        print_on_main(line)
    trainer = build_trainer(model_args, args, rows, estimator, tokenizer, folder)
    push_data(rows.splits, data_args, args)
    trainer.report = measurements_of_run(trainer, rows, model_args, data_args, statistics, folder)
    return trainer, trainer.report


def train_and_measure(trainer, run, data_args: DataArguments, folder) -> None:
    """Measures the encoder, trains it unless only measuring was asked for, measures it again, and reports."""
    # Imported here for the same reason.
    from soft_trainer.training.interruption import explaining_interruption

    with explaining_interruption(trainer.args, lambda: trainer.state.global_step):
        run.measure("untrained", data_args.lexical and not trainer.args.do_train)
        if trainer.args.do_train:
            trainer.train(resume_from_checkpoint=folder.checkpoint or False)  # the folder has decided
            folder.save_encoder(trainer)
            run.measure("trained", data_args.lexical)
        run.finish()


def push_again(data_args: DataArguments, args: TrainingOptions, splits) -> None:
    """Pushes what a finished run was asked to push."""
    # Imported here for the same reason.
    from soft_trainer import distributed
    from soft_trainer.hub.background import Publisher
    from soft_trainer.hub.dataset import push_data

    print_on_main(f"{args.output_dir}: already done; overwrite=true trains again")
    push_data(splits, data_args, args)
    if args.push_to_hub and distributed.rank_and_world_size()[0] == 0:
        print_on_main(f"Pushed: {Publisher(args).push('End of training')}")


def build_trainer(model_args, args: TrainingOptions, rows, estimator, tokenizer, folder):
    """Returns the trainer with its model, its rows and its callbacks."""
    # Imported here for the same reason.
    from soft_trainer import EstimatorCallback, SoftInfoNCETrainer
    from soft_trainer.run.building import build_model
    from soft_trainer.run.folder import RemoveEarlierCheckpoints
    from soft_trainer.run.rows import evaluated

    callbacks = [RemoveEarlierCheckpoints(folder)]
    if estimator is not None:
        callbacks.append(EstimatorCallback(estimator))
    return SoftInfoNCETrainer(
        model=build_model(model_args, rows.profile, tokenizer),
        args=args,
        train_dataset=rows.splits.get("train") if args.do_train else None,
        eval_dataset=evaluated(rows.splits, "valid"),
        processing_class=tokenizer,
        encoder=rows.profile,
        callbacks=callbacks,
        depends_on=folder.fingerprint,
    )


if __name__ == "__main__":
    quiet_libraries()
    with exit_on_user_error():
        main()
