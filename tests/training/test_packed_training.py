"""Training with packed passes gives the losses, gradients and metrics of padded ones."""

import copy
import os
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from refusals import refused
from trainings import OWN, batches_of, bm25, gradients, initial, still
from transformers import TrainerCallback

from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.adapters import add_lora
from soft_trainer.encoders.encoding import pad
from soft_trainer.encoders.packing import PACKED
from soft_trainer.encoders.scratch import random_model
from soft_trainer.errors import UserError
from soft_trainer.estimators import frozen_encoder
from soft_trainer.options.model import ModelArguments
from soft_trainer.run.folder import mark_complete
from soft_trainer.run.preflight import DYNAMIC, complete_launch, pads
from soft_trainer.run.record import setup_table
from soft_trainer.system import distributed

PROMPTS = {"query_prefix": "find: ", "code_prefix": "code: ", "include_prompt": False}
# What differs from the usual training -> changes of the profile, and training arguments.
CASES = {
    "mean": ({}, {}),
    "cls": ({"pooling": "cls"}, {}),
    "last token": ({"pooling": "last_token"}, {}),
    "pooler": ({"pooling": "pooler"}, {}),
    "prompts": (PROMPTS, {}),
    "normalised": ({"normalize": True}, {}),
    "Matryoshka": ({}, {"matryoshka_dims": "32,8"}),
    "LoRA": ({}, {"merge_lora": True}),
    "checkpointing": ({}, {"gradient_checkpointing": True}),
    "gradient caching": ({}, {"gradient_cache_chunk_size": 3}),
    "hard negatives": ({}, OWN),
    "several positives": ({}, {"false_negatives": "positives"}),
    "estimator": ({}, {"loss": "soft_info_nce"}),
}
FAST = ("mean", "gradient caching", "hard negatives")  # the others are tried with the slow tests


@pytest.fixture
def make(trainer_of, tokenizer, profile, rows):
    """Returns a function that makes a float64 trainer for a case, on rows of which two share a query."""
    rows = [*rows[:23], rows[23] | {"docstring_tokens": rows[0]["docstring_tokens"]}]

    def trainer(name: str, **options):
        changes, settings = CASES[name]
        encoder = profile.replace(**changes)
        torch.manual_seed(0)
        model = still(random_model("32x2", tokenizer, encoder))
        if name == "LoRA":
            add_lora(model, ModelArguments(lora_r=2, lora_dropout=0.0))
        arguments = {"model": model, "encoder": encoder, "train_dataset": Dataset.from_list(rows)}
        settings = {"per_device_train_batch_size": 12, "train_sampling_strategy": "sequential"} | settings
        return trainer_of(
            estimator=initial() if name == "hard negatives" else bm25(), arguments=arguments, **settings | options
        )

    return trainer


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in CASES]
)
def test_a_packed_step_equals_a_padded_one(make, name):
    steps = []
    for packing in ("false", "true"):
        trainer = make(name, packing=packing)
        assert trainer.passes.why_padded == (None if packing == "true" else "packing=false")
        batch = batches_of(trainer)[1]
        assert all(("borders" in inputs) == (packing == "true") for inputs in batch.passes)
        assert (len(batch.passes) == 1) == (packing == "true" and name != "gradient caching")
        if packing == "true":
            tokens = sum(inputs["input_ids"].numel() for inputs in batch.passes)
            assert tokens == sum(map(len, tokens_of(trainer, batch)))
        with trainer.running():
            steps.append(gradients(trainer, batch))
    (expected_loss, expected), (loss, found) = steps
    assert loss == pytest.approx(expected_loss, abs=1e-6) and expected_loss > 0.01
    assert sum(bool(each.any()) for each in expected.values()) >= 2
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def tokens_of(trainer, batch) -> list:
    """Returns the token ids of a batch's queries and codes."""
    tokens = trainer._train_batches().tokens
    queries = [tokens["query"][int(row)] for row in batch.query_rows]
    return queries + [tokens["code"][int(row)] for row in batch.code_rows]


def test_a_packed_step_is_one_forward_pass_and_training_restores_the_attention(make):
    passes = []

    class Counting(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            assert model.config._attn_implementation == PACKED
            self.hook = model.register_forward_hook(lambda *_: passes.append(1))

    trainer = make("mean", packing="true", max_steps=3)
    trainer.add_callback(Counting())
    trainer.train()
    assert len(passes) == 3
    assert trainer.model.config._attn_implementation == "sdpa"
    packed = trainer.evaluate()
    padded = make("mean", packing="false")
    padded.model.load_state_dict(trainer.model.state_dict())
    metrics = padded.evaluate()
    assert packed["eval_mrr"] == pytest.approx(metrics["eval_mrr"], abs=1e-9)
    assert trainer.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("before", "after"), [("false", "true"), ("auto", "false")])
def test_packing_may_change_after_the_constructor(make, before, after):
    trainer = make("mean", packing=before, max_steps=1)
    assert trainer.passes.packed == (before != "false")
    trainer.args.packing = after
    trainer.train()
    assert trainer.passes.packed == (after != "false")


def test_the_table_of_settings_says_how_forward_passes_run(make):
    rows = {}
    for packing in ("auto", "true", True, "false", False):
        rows[packing] = setup_table(make("mean", packing=packing))["forward passes"]
    padded = "padded (packing=false)"
    assert rows == {"auto": "packed", "true": "packed", True: "packed", "false": padded, False: padded}


def test_what_a_run_cannot_pack_is_padded_and_refused_if_packing_is_asked_for(make, tokenizer, trainer_of):
    def collate(features):
        return {side: pad([each[f"{side}_ids"] for each in features], tokenizer.pad_token_id) for side in SIDES}

    cases = {
        "a custom data_collator pads": {"arguments": {"data_collator": collate}},
        "neftune_noise_alpha adds noise by the length of a row": {"neftune_noise_alpha": 5.0},
    }
    for reason, options in cases.items():
        assert trainer_of(**options).passes.why_padded == reason
        with refused(f"packing=true: the texts of this run cannot be packed: {reason}"):
            trainer_of(packing="true", **options)


def test_packing_false_pads_the_encoder_of_an_estimator_too(make, monkeypatch):
    decided = []
    decide = frozen_encoder.decide_passes
    monkeypatch.setattr(frozen_encoder, "decide_passes", lambda *args: decided.append(decide(*args)) or decided[-1])
    for packing in ("auto", "false", False):
        make("hard negatives", packing=packing).prepare_rows()
    assert [passes.packed for passes in decided] == [True, False, False]


@pytest.mark.parametrize(
    ("kind", "is_fsdp2", "pooling", "reason"),
    [
        ("MULTI_GPU", False, "pooler", None),
        ("FSDP", True, "mean", None),
        ("FSDP", True, "pooler", "FSDP is not supported with pooling=pooler"),
        ("FSDP", False, "mean", "FSDP 1 is not supported"),
        ("DEEPSPEED", False, "mean", "DeepSpeed is not supported"),
    ],
)
def test_launchers_that_pad(make, kind, is_fsdp2, pooling, reason):
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), is_fsdp2=is_fsdp2)
    assert pads(make("mean").args, False, accelerator, pooling) == reason


# ---- Precision and launchers ----


@pytest.mark.slow
def test_a_cpu_that_computes_in_bf16_trains_and_evaluates_in_it_by_default(trainer_of, monkeypatch, capsys):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    trainer = trainer_of(max_steps=1)
    dtypes = set()
    layer = trainer.model.encoder.layer[0].intermediate.dense
    layer.register_forward_hook(lambda module, inputs, outputs: dtypes.add(outputs.dtype))
    trainer.train()
    trainer.evaluate()
    assert trainer.passes.precision == "bf16" and trainer.passes.packed
    assert dtypes == {torch.bfloat16}
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert re.search(r"\| precision +\| bf16 +\|", capsys.readouterr().err)


def test_describing_an_encoder_that_fsdp_has_wrapped_waits_for_no_process(make, monkeypatch):
    trainer = make("mean")
    monkeypatch.setattr(distributed, "from_main", lambda value: pytest.fail("only the main process is here"))
    trainer.model = torch.nn.Sequential()
    trainer.model.module = trainer._passes_of[0]
    assert setup_table(trainer)["forward passes"] == "packed"


def test_a_checkpoint_in_float32_is_not_resumed_in_bf16(make, tmp_path):
    trainer = make("mean", max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    folder = f"{trainer.args.output_dir}/checkpoint-1"
    mark_complete(folder, trainer.run_fingerprint | {"precision": "no"})
    resumed = make("mean", max_steps=2, bf16=True)
    with pytest.raises(UserError, match="precision was no, is now bf16"):
        resumed.train(resume_from_checkpoint=folder)


@pytest.mark.parametrize(
    ("pooling", "has_pooler", "finds"), [("mean", True, True), ("mean", False, False), ("pooler", True, False)]
)
def test_ddp_looks_for_unused_parameters_only_if_there_is_an_unread_pooler(
    make, profile, model, pooling, has_pooler, finds
):
    model = copy.deepcopy(model)
    model.pooler = torch.nn.Linear(2, 2) if has_pooler else None
    args = make("mean").args
    args.ddp_find_unused_parameters = None
    complete_launch(args, model, profile.replace(pooling=pooling))
    assert args.ddp_find_unused_parameters is finds


@pytest.mark.parametrize(("compiles", "before", "after"), [(True, "False", None), (True, "True", "True")])
def test_compilation_is_for_any_length_unless_the_launcher_says_otherwise(
    make, profile, model, monkeypatch, compiles, before, after
):
    args = make("mean").args
    args.torch_compile = compiles
    monkeypatch.setenv(DYNAMIC, before)
    complete_launch(args, model, profile)
    assert os.environ.get(DYNAMIC) == after
