"""Fine-tune a code-search encoder and measure how well it finds functions, before and after.

soft-trainer train --language ruby
soft-trainer train --config quickstart
accelerate launch -m soft_trainer.cli train --language ruby
"""

from __future__ import annotations

import run_codesearch
from soft_trainer.options.parse import OF_A_RUN

OPTIONS = OF_A_RUN
check = run_codesearch.check
DEFAULTS = None
run = run_codesearch.run
