"""The hooks of a `Trainer` whose inputs are `Batch` objects and no dicts of tensors."""

from __future__ import annotations

import dataclasses

from soft_trainer import distributed
from soft_trainer.arguments import SoftInfoNCEOptions
from soft_trainer.data.batches import Batch
from soft_trainer.data.collator import PairCollator
from soft_trainer.data.tokens import SIDES
from soft_trainer.training.retrieval import RetrievalTrainer


class BatchTrainer(RetrievalTrainer):
    """A `Trainer` that takes `Batch` objects from its data loader.

    Attributes:
        options: the options of the loss; a subclass has them.
    """

    options: SoftInfoNCEOptions

    @property
    def gathers(self) -> bool:
        """True if the codes of every process are negatives."""
        gather = self.options.gather_negatives
        return self.args.world_size > 1 and (gather is None or gather)

    @property
    def precision(self) -> str:
        """The number format of the forward pass, chosen by the launcher, the arguments or the model."""
        mixed = self.accelerator.mixed_precision
        return str(self.model.dtype).removeprefix("torch.") if mixed == "no" else mixed

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Moves the batch to this process's device; with a user's collator, equalises the forward passes too."""
        if self.args.world_size > 1 and not isinstance(self.data_collator, PairCollator):
            passes = distributed.largest([len(getattr(inputs, side).chunks) for side in SIDES])
            sides = {side: getattr(inputs, side).with_passes(n) for side, n in zip(SIDES, passes, strict=True)}
            inputs = dataclasses.replace(inputs, **sides)
        return inputs.to(self.args.device)

    def _get_num_items_in_batch(self, batch_samples: list, device) -> None:
        """None: the loss is a mean over a batch, not over tokens."""

    def floating_point_ops(self, inputs: Batch) -> int:
        """6 x parameters x computed tokens, padding included."""
        return 6 * inputs.count_tokens(padding=True) * self.model.num_parameters(exclude_embeddings=True)

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Counts the tokens of both sides, as `include_num_input_tokens_seen` says."""
        kind = self.args.include_num_input_tokens_seen
        if kind != "no":
            tokens = inputs.count_tokens(padding=kind != "non_padding")
            self.state.num_input_tokens_seen += sum(distributed.gather_numbers(tokens))
