"""Runs a training script, and stops it with a signal to all its processes, as a terminal does on Ctrl-C.

Usage: stopped.py SIGNAL SCRIPT [OPTIONS]. SIGINT and SIGTERM arrive during step 5. For SIGKILL, steps are slow and a
checkpoint is due after a second; the signal arrives two steps after the first one. "none" lets the script end.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from soft_trainer import SoftInfoNCETrainer
from soft_trainer.run import interruption

STEP = 5


def main() -> None:
    name, script, *options = sys.argv[1:]
    os.setsid()  # so that the signal does not reach the tests
    training_step = SoftInfoNCETrainer.training_step
    killed_at = []

    def signalled(self, *args, **kwargs):
        step = self.state.global_step + 1
        if name == "SIGKILL":
            time.sleep(0.3)
            if not killed_at and any(Path(self.args.output_dir).glob("checkpoint-*/complete.json")):
                killed_at.append(step + 1)
            if step in killed_at:
                os.killpg(os.getpgrp(), signal.SIGKILL)
        elif name != "none" and step == STEP:
            os.killpg(os.getpgrp(), signal.Signals[name])
        return training_step(self, *args, **kwargs)

    SoftInfoNCETrainer.training_step = signalled
    if name == "SIGKILL":
        interruption.ROLLING_SECONDS = 1.0
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
