"""Runs the training script with sharded weights on CPUs, because `accelerate` shards only on GPUs.

accelerate launch --config_file recipes/accelerate/fsdp.yaml tests/sharded.py OPTIONS
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "training"))

import without_bf16  # noqa: F401 - in float32, like the process that it is compared with
from worker import shard_on_cpus

from run_codesearch import main

if __name__ == "__main__":
    shard_on_cpus()
    main()
