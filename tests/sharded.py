"""The script with sharded weights on CPUs; `accelerate` itself shards on GPUs only.

accelerate launch --config_file recipes/accelerate/fsdp.yaml tests/sharded.py OPTIONS
"""

import sys
from pathlib import Path

from accelerate import state

sys.path.insert(0, str(Path(__file__).parents[1]))

from run_codesearch import main

start = state.PartialState.__init__


def start_as_on_gpus(self, *arguments, **options) -> None:
    """Reports several processes as `accelerate` does on GPUs, since it only looks for the sharding plugin there."""
    start(self, *arguments, **options)
    if self.distributed_type == state.DistributedType.MULTI_CPU:
        self.distributed_type = state.DistributedType.MULTI_GPU


if __name__ == "__main__":
    state.PartialState.__init__ = start_as_on_gpus
    main()
