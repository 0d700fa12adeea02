"""Compares a training step: ours, sentence-transformers' trainer, and padding to the maximum as published.

    python benchmarks/step.py --data_dir DIR [--size 256x4 | --model FOLDER] [--lengths 128,256] [--batch_sizes 32,128]
        [--dtype float32,bfloat16] [--device cuda] [--repetitions 7]

All implementations take turns with the same random batches, initial weights, texts, truncation, loss (InfoNCE of
cosines x 20, or of the model's own score), optimizer, gradient clipping, precision and threads. A step is collation,
forward, backward, clipping and optimizer. The first step of each implementation is excluded. Figures with a range
are medians over the repetitions. Ratios are taken within a repetition.

`--size modernbertx6 --lengths 16,2048 --batch_sizes 1 --ways "ours,ours padded"` compares packed with padded passes of
long texts; see `SHAPES` in `starting_point.py`.

"ours" packs the texts of a batch, except on a GPU in float32. "ours padded" is the same with `packing=false`.

"ours is faster" divides the time of an implementation by ours; "without collation" excludes the work of data
workers. "padding" is the percentage of padding among the computed tokens. "of the saving" divides the ratio by the
ratio that the smaller number of tokens would give at a constant cost per token. Useful arithmetic counts the
operations on tokens that are not padding: 6 W T + 12 layers hidden sum(L^2) for W weights without embeddings and T
tokens in texts of L each. All arithmetic includes the padding. Both are percentages of the rate of large matrix
products in the same precision.

One difference remains: sentence-transformers tokenises in its collator. Ours tokenises once before training, so its
steps do not include tokenising.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from measuring import draw, finish, machine, matrix_rate, numbers, parser_of, ratios, set_up, spread, turns
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from starting_point import StartingPoint, add_encoder_options, begin, label
from torch import Tensor
from transformers import Trainer

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.loading import load_encoder, load_tokenizer
from soft_trainer.system.terminal import table
from soft_trainer.training.batches import Batch

CLIP = 1.0  # Trainer's max_grad_norm
TOLERANCE = 1e-5  # between the losses of one batch, without dropout, in float32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Way:
    """A trainer that takes single steps."""

    trainer: Trainer
    collate: Callable[[np.ndarray], dict]
    device: str
    running: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # around each step

    def __post_init__(self):
        trainer = self.trainer
        trainer.create_optimizer()
        trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.model_wrapped = trainer.model
        trainer.current_gradient_accumulation_steps = 1

    def step(self, rows: np.ndarray) -> tuple[float, float, dict]:
        """Runs a step. Returns the seconds of the step and of its collation, and the batch."""
        trainer = self.trainer
        with self.running():
            finish(self.device)
            start = time.perf_counter()
            batch = self.collate(rows)
            collated = time.perf_counter()
            trainer.training_step(trainer.model, batch if isinstance(batch, Batch) else dict(batch))
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), CLIP)
            trainer.optimizer.step()
            trainer.model.zero_grad()
            finish(self.device)
            return time.perf_counter() - start, collated - start, batch

    @torch.no_grad()
    def loss(self, rows: np.ndarray) -> float:
        """Returns the loss of a batch without dropout."""
        self.trainer.model.eval()
        with self.running():
            return float(self.trainer.compute_loss(self.trainer.model, self.collate(rows)))


def our_trainer(
    start: StartingPoint, dtype: str, collator=None, callbacks=(), rows=None, **options
) -> SoftInfoNCETrainer:
    """Makes our trainer with InfoNCE and its default settings, except for `options`."""
    encoder = load_encoder(start.folder, device="cpu")
    defaults = {"loss": "info_nce", "false_negatives": "ignore", "dataloader_drop_last": False}
    defaults |= {"train_sampling_strategy": "random", "warmup_steps": 0}
    options = defaults | start.settings(dtype) | options
    return SoftInfoNCETrainer(
        model=encoder.model,
        args=SoftInfoNCETrainingArguments(**options),
        train_dataset=start.rows if rows is None else rows,
        processing_class=encoder.tokenizer,
        encoder=encoder.profile,
        data_collator=collator,
        callbacks=list(callbacks),
    )


def ours(start: StartingPoint, dtype: str, collator=None, **options) -> Way:
    """Makes our trainer's step."""
    trainer = our_trainer(start, dtype, collator, **options)
    return Way(trainer, trainer.get_train_dataloader().dataset.__getitems__, start.device, trainer.running)


def ours_padded(start: StartingPoint, dtype: str) -> Way:
    """Makes our trainer's step without packing."""
    return ours(start, dtype, packing="false")


def padded_to_maximum(start: StartingPoint, dtype: str) -> Way:
    """Makes our trainer's step with every text padded to the maximum length."""
    pad_token_id = load_tokenizer(start.folder, start.profile).pad_token_id

    def pad(features: list[dict], side: str) -> dict[str, Tensor]:
        """Pads the ids of one side to the maximum length."""
        rows = [feature[f"{side}_ids"] for feature in features]
        ids = np.full((len(rows), getattr(start.profile, f"{side}_length")), pad_token_id, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row_number, row in enumerate(rows):
            ids[row_number, : len(row)], mask[row_number, : len(row)] = row, 1
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}

    return ours(start, dtype, lambda features: {side: pad(features, side) for side in SIDES})


def their_trainer(
    start: StartingPoint, dtype: str, unpads: bool = False, loss_of: Callable | None = None, **options
) -> SentenceTransformerTrainer:
    """Makes sentence-transformers' trainer with its collator, and its default loss or `loss_of(model)`."""
    profile = start.profile
    settings = {"attn_implementation": flash_attention()} if unpads else {}
    model = SentenceTransformer(str(start.folder), device=start.device, model_kwargs=settings)
    if unpads and not model[0].can_flatten_inputs:
        raise RuntimeError(f"sentence-transformers does not unpad with {settings['attn_implementation']}")
    if loss_of is None:
        similarity = {"cosine": cos_sim, "dot": dot_score}[profile.score_function]
        loss = MultipleNegativesRankingLoss(model, scale=profile.score_scale, similarity_fct=similarity)
    else:
        loss = loss_of(model)
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            # The tasks select query_length and document_length of the model's folder.
            router_mapping={"query": "query", "code": "document"},
            prompts={side: prefix for side in SIDES if (prefix := getattr(profile, f"{side}_prefix"))} or None,
            **start.settings(dtype) | options,
        ),
        train_dataset=start.texts,
        loss=loss,
    )


def flash_attention() -> str | None:
    """Returns the flash attention that lets sentence-transformers skip padding, or None if it is not installed."""
    if importlib.util.find_spec("flash_attn"):
        return "flash_attention_2"
    if importlib.util.find_spec("kernels"):
        return "kernels-community/flash-attn2"
    return None


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Turns cuDNN's attention off, as our trainer does."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def sentence_transformers(start: StartingPoint, dtype: str, running=contextlib.nullcontext, **options) -> Way:
    """Makes the step of sentence-transformers' trainer."""
    trainer = their_trainer(start, dtype, **options)
    fetch = trainer.train_dataset.__getitems__
    return Way(trainer, lambda rows: trainer.data_collator(fetch(rows.tolist())), start.device, running)


def sentence_transformers_without_cudnn(start: StartingPoint, dtype: str) -> Way:
    """Makes the same step without cuDNN's attention."""
    return sentence_transformers(start, dtype, without_cudnn_attention)


def sentence_transformers_unpadded(start: StartingPoint, dtype: str) -> Way:
    """Makes the same step without padding, which needs flash-attn or kernels."""
    return sentence_transformers(start, dtype, unpads=True)


WAYS = {
    "ours": ours,
    "sentence-transformers": sentence_transformers,
    "padded to the maximum": padded_to_maximum,
    "ours padded": ours_padded,
    "sentence-transformers without cuDNN": sentence_transformers_without_cudnn,
    "sentence-transformers unpadded": sentence_transformers_unpadded,
}


def passes(batch: Batch | Mapping) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the tokens of each text in every forward pass of a batch, without and with padding."""
    for chunk in batch.passes if isinstance(batch, Batch) else [batch]:
        for name, value in chunk.items():
            if isinstance(value, Mapping):
                yield from passes(value)
            elif name == "borders" or name.endswith("cu_seq_lens_q"):
                yield value.diff(), value.diff()
            elif name.endswith("attention_mask") and value is not None:
                yield value.sum(1), torch.full((len(value),), value.shape[1])


def work(model, batch: Mapping) -> dict[str, float]:
    """Counts the tokens and operations of a step's forward and backward passes, in total and without padding."""
    config = model.config
    lengths, padded = (torch.cat(each).double() for each in zip(*passes(batch), strict=True))
    per_token = 6 * model.num_parameters(exclude_embeddings=True)
    per_pair = 12 * config.num_hidden_layers * config.hidden_size
    return {
        f"{name} {unit}": float(value)
        for name, tokens in (("useful", lengths), ("computed", padded))
        for unit, value in (
            ("tokens", tokens.sum()),
            ("operations", per_token * tokens.sum() + per_pair * (tokens**2).sum()),
        )
    }


def measure(ways: dict[tuple[str, str], Way], batches: list[np.ndarray], count: Callable[[Mapping], dict]) -> dict:
    """Returns the seconds of each way's steps, with and without collation, and `count` of its batches.

    The result is keyed by way, and None if memory ran out.
    """
    results: dict = {name: {"whole": [], "bare": [], "work": []} for name in ways}
    for repetition, name in turns(list(ways), len(batches)):
        if results[name] is None:
            continue
        try:
            whole, collation, batch = ways[name].step(batches[repetition])
        except torch.OutOfMemoryError:
            results[name] = None
            ways[name].trainer.model.zero_grad()
            torch.cuda.empty_cache()
            continue
        if repetition == 0:
            continue  # the first step allocates memory and loads kernels
        for key, value in (("whole", whole), ("bare", whole - collation), ("work", count(batch))):
            results[name][key].append(value)
    return results


def line(batch_size: int, name: tuple[str, str], results: dict, roof: float) -> list:
    """Returns a row of the table."""
    way, dtype = name
    result, base, single = results[name], results[("ours", dtype)], results.get(("ours", "float32"))
    cells = [batch_size, dtype, way]
    if result is None:
        return [*cells, "out of memory"]
    total = {key: sum(step[key] for step in result["work"]) for key in result["work"][0]}
    taken = sum(result["whole"])
    cells.append(spread([batch_size / second for second in result["whole"]], 1))
    if way == "ours" or base is None:
        cells += [None, None, None]
    else:
        faster, bare = ratios(result["whole"], base["whole"]), ratios(result["bare"], base["bare"])
        saving = total["computed tokens"] / sum(step["computed tokens"] for step in base["work"])
        cells += [spread(faster), spread(bare), f"{statistics.median(faster) / saving:.0%}"]
    compared = way == "ours" and dtype != "float32" and single
    return [
        *cells,
        spread(ratios(single["whole"], result["whole"])) if compared else None,
        f"{1 - total['useful tokens'] / total['computed tokens']:.1%}",
        f"{total['useful tokens'] / taken:,.0f}",
        f"{total['useful operations'] / taken / roof:.1%}",
        f"{total['computed operations'] / taken / roof:.1%}",
    ]


HEADERS = ["batch", "precision", "implementation", "examples/s", "ours is faster", "without collation"]
HEADERS += ["of the saving", "than in float32", "padding", "useful tokens/s", "useful arithmetic", "all arithmetic"]


def check_equal(losses: Mapping[tuple[str, str], float]) -> None:
    """Ends the program if the losses of the ways differ in float32, because their times are not comparable then."""
    exact = {way: loss for (way, dtype), loss in losses.items() if dtype == "float32"}
    if exact and max(exact.values()) - min(exact.values()) > TOLERANCE:
        shown = ", ".join(f"{way} {loss:.6f}" for way, loss in exact.items())
        sys.exit(f"the losses of one batch differ by more than {TOLERANCE:g}: {shown}")


def run(arguments: argparse.Namespace, folder: str) -> None:
    """Runs the whole benchmark and prints it."""
    start = begin(arguments, folder)
    # bfloat16 comes last: accelerate has one precision at a time, and the float32 models are prepared before.
    dtypes = sorted(arguments.dtype.split(","), key=list(DTYPES).index)
    ways = {(way, dtype): WAYS[way](start, dtype) for dtype in dtypes for way in arguments.ways.split(",")}
    roofs = {dtype: [matrix_rate(start.device, DTYPES[dtype])] for dtype in dtypes}
    generator, model = np.random.default_rng(0), load_encoder(folder, device="cpu").model
    losses, measured = {}, {}
    for size in numbers(arguments.batch_sizes):
        batches = [draw(len(start.rows), size, generator) for _ in range(arguments.repetitions + 1)]
        if not measured:
            losses = {name: way.loss(batches[0]) for name, way in ways.items()}
            check_equal(losses)
        measured[size] = measure(ways, batches, partial(work, model))
        sys.stderr.write(f"batches of {size} are measured\n")
    for dtype in dtypes:
        roofs[dtype].append(matrix_rate(start.device, DTYPES[dtype]))

    mean = {dtype: statistics.mean(rates) for dtype, rates in roofs.items()}
    lines = [line(size, name, results, mean[name[1]]) for size, results in measured.items() for name in results]
    print(f"## A training step: {label(arguments)}\n\n{machine(start.device)}, {arguments.repetitions} repetitions\n")
    print(table(HEADERS, lines), "\n")
    for dtype, rates in roofs.items():
        print(f"Matrix products in {dtype}: {' and '.join(f'{rate / 1e9:,.0f}' for rate in rates)} GFLOP/s.")
    for dtype in dtypes:
        own = {way: loss for (way, kind), loss in losses.items() if kind == dtype}
        shown = ", ".join(f"{way} {loss:.6f}" for way, loss in own.items())
        print(f"Loss of one batch before training, without dropout, in {dtype}: {shown}; ", end="")
        print(f"largest difference {max(own.values()) - min(own.values()):.1e}.")


def main() -> None:
    """Reads the options and runs."""
    parser = parser_of(__doc__)
    add_encoder_options(parser)
    parser.add_argument("--batch_sizes", default="32,128")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 (autocast), or both by comma")
    parser.add_argument("--ways", default=",".join(list(WAYS)[:3]), help=f"of {', '.join(WAYS)}; ours is needed")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    set_up(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, folder)


if __name__ == "__main__":
    main()
