"""Evaluates encoders and rows of this package with mteb, the embedding benchmark. Needs the extra `mteb`.

import mteb
from soft_trainer.mteb import MtebEncoder

mteb.evaluate(MtebEncoder("USER/NAME"), mteb.get_benchmark("MTEB(Code, v1)"))
"""

from soft_trainer.mteb.model import MtebEncoder
from soft_trainer.mteb.tasks import EvaluationSetTask

__all__ = ["EvaluationSetTask", "MtebEncoder"]
