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
from soft_trainer.options.parse import OF_A_RUN, parse
from soft_trainer.shell.sources import check_sources
from soft_trainer.system.terminal import exit_on_user_error, one_line_errors, print_on_main, quiet_libraries


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the options of the command line and runs."""
    run(*parse(OF_A_RUN, argv, description=__doc__, check=check))


def check(model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions) -> None:
    """Checks what the package's options refer to, before torch is imported."""
    check_sources(data_args)


def run(model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions) -> None:
    """Loads the rows, trains an encoder on them, measures it before and after, and pushes it."""
    # Imported here, so that --help need not wait for them.
    from soft_trainer import SoftInfoNCETrainer
    from soft_trainer.hub.background import check_push
    from soft_trainer.options.resolve import check_options
    from soft_trainer.shell.opening import open_run, search_command
    from soft_trainer.system import distributed

    args.report = True
    with one_line_errors():
        check_options(args)
        check_push(args)
        distributed.use_the_cores()
        encoder, rows = open_run(model_args, data_args, args)
        trainer = SoftInfoNCETrainer(
            model=encoder,
            args=args,
            train_dataset=rows.train,
            eval_dataset=rows.valid,
            _details=rows,
        )
    with one_line_errors(until=lambda: trainer.state.global_step > 0), trainer.opened():
        if args.do_train:
            trainer.train()
            command = search_command(data_args, trainer.args.output_dir)
            if command and not trainer.folder.done:
                print_on_main(command)
        else:
            trainer.measure()
    if args.push_to_hub:
        print_on_main(f"Pushed: {trainer.push_to_hub()}")
    distributed.close()


if __name__ == "__main__":
    quiet_libraries()
    with exit_on_user_error():
        main()
