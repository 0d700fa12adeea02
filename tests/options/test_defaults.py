"""The defaults of a training depend on the encoder, and are the same for the shell, recipes and Python."""

import copy
import functools
import importlib
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import Dataset, concatenate_datasets
from hypothesis import HealthCheck, given, settings, strategies as st
from own_losses import Plain
from refusals import refused
from trainings import losses_of
from transformers import AutoModel, HfArgumentParser
from transformers.integrations import deepspeed as integration

from soft_trainer import (
    BM25Estimator,
    InitialModelEstimator,
    SoftInfoNCETrainer,
    SoftInfoNCETrainingArguments,
    TrainedModelEstimator,
    load_encoder,
)
from soft_trainer.encoders.distilling import distil_static
from soft_trainer.encoders.passes import computes_bf16
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.estimators.registry import estimator_of_run
from soft_trainer.options import defaults
from soft_trainer.options.defaults import (
    METHODS,
    PLAIN,
    SCHEDULE,
    SCHEDULES,
    apply_defaults,
    choose_precision,
    defaults_of,
)
from soft_trainer.options.parse import OF_A_RUN, as_argv, parse
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.options.spec import option_specs
from soft_trainer.run.fingerprint import affects_results, run_fingerprint
from soft_trainer.shell.building import build_encoder
from soft_trainer.system.packaged import BASE

METHOD = {"estimator": "initial_model", "train_sampling_strategy": "similar", "weighting": "positive_aware"}
CHOSEN = METHOD | {"learning_rate": 6e-5, "num_train_epochs": 1, "warmup_steps": 0.1}


@pytest.fixture
def options_after(tmp_path, encoder_dir):
    """Returns a function that parses options, applies the encoder's defaults, and returns the options in `names`."""

    def choose(*words: str, model=encoder_dir, names=CHOSEN) -> dict:
        words = [*words, *(["--model_name_or_path", str(model)] if model else []), "--use_cpu", "true"]
        model_args, data_args, args = parse(OF_A_RUN, [*words, "--output_dir", str(tmp_path)])
        apply_defaults(args, build_encoder(model_args), trains=args.do_train)
        return {name: getattr(args, name) for name in names}

    return choose


def test_an_encoder_of_sentences_gets_hard_batches_which_is_reported(options_after, capsys):
    assert options_after() == CHOSEN
    assert (
        "Defaults for an encoder trained for search: learning_rate=6e-05, num_train_epochs=1, warmup_steps=0.1, "
        "estimator=initial_model, train_sampling_strategy=similar, weighting=positive_aware\n"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ((), 1e-4),
        (("--config", "encoders/qwen3_embedding"), 1e-4),
        (("--config", "encoders/qwen3_embedding", "--lr", "2e-6"), 2e-6),
    ],
)
def test_an_adapter_has_its_own_learning_rate(options_after, words, rate):
    names = ["learning_rate", "num_train_epochs"]
    # The profile in the recipe would not fit the tiny encoder.
    options = options_after(*words, "--lora_r", "4", "--profile", "codebert", names=names)
    assert options["learning_rate"] == rate


def test_a_recipe_with_an_adapter_keeps_its_learning_rate(options_after, tmp_path):
    (tmp_path / "own.yaml").write_text("lora_r: 4\nlearning_rate: 0.0002\n")
    assert options_after("--config", str(tmp_path / "own.yaml"), "--lora_r", "8")["learning_rate"] == 2e-4


@pytest.mark.parametrize("name", ["hard_batches", "distilled"])
def test_the_defaults_are_those_of_the_recipe(name):
    kind = {"hard_batches": "search", "distilled": "distilled"}[name]
    expected = dict(zip(SCHEDULE, SCHEDULES[kind], strict=True)) | METHODS[kind]
    for option, value in read_recipe(RECIPES / f"{name}.yaml").items():
        if option in expected:
            assert expected[option] == value, option


# ---- What is set is what trains ----

PROFILES = {
    "search": (EncoderProfile(score_function="cosine"), "SEARCH"),
    "distilled": (EncoderProfile(name="static", teacher="STORED"), "STATIC"),
    "base": (EncoderProfile(name="static"), BASE),
    "static": (EncoderProfile(name="static"), "STATIC"),
    "scratch": (EncoderProfile(score_function="cosine"), None),
    "pretrained": (EncoderProfile(), "PRETRAINED"),
}


@pytest.fixture
def starting_at(monkeypatch):
    """Returns a function that returns an encoder of a kind, of which only the profile and the name are known."""
    monkeypatch.setattr(defaults, "repository_file", lambda name, file, revision: name == "SEARCH" or None)

    def make(kind: str):
        profile, name = PROFILES[kind]
        return SimpleNamespace(profile=profile, name=name, revision=None, adapter=False, from_scratch=name is None)

    return make


NUMBERS = {"warmup_steps": st.floats(0, 100), "weight_decay": st.floats(0, 1), "max_grad_norm": st.floats(0, 9)}
WORDS = {**NUMBERS, "dataloader_drop_last": st.booleans()}  # of options that `transformers` declares
OF_SET_TRAINING = {
    "learning_rate": "learning_rate",
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "batch_size",
}


def valid_values(field, spec):
    """Returns a strategy for the values of an option, the default among them, or None for an option of text."""
    kind = str(field.type)
    limits = {"allow_nan": False, "allow_infinity": False, "exclude_min": spec.above is not None}
    least = spec.least if spec.above is None else spec.above
    if spec.choices:
        values = st.sampled_from([each for each in spec.choices if each])
    elif spec.boolean:
        values = st.booleans()
    elif "float" in kind:
        values = st.floats(least or 0, 9 if spec.most is None else spec.most, **limits)
    elif "int" in kind:
        values = st.integers(least or 0, 99)
    else:
        return None
    default = defaults_of(SoftInfoNCETrainingArguments)[field.name]
    return values if default is None else st.just(default) | values


def values_of_options() -> dict:
    fields = SoftInfoNCETrainingArguments.__dataclass_fields__
    found = {
        name: valid_values(fields[name], spec) for name, spec in option_specs(SoftInfoNCETrainingArguments).items()
    }
    return {name: values for name, values in found.items() if values is not None} | WORDS


def assigned(args, options):
    for name, value in options.items():
        setattr(args, name, value)
    return args


def by_set_training(folder, options):
    args = SoftInfoNCETrainingArguments(folder)
    if OF_SET_TRAINING.keys() <= options.keys():
        args.set_training(**{word: options[name] for name, word in OF_SET_TRAINING.items()})
    return assigned(args, {name: value for name, value in options.items() if name not in OF_SET_TRAINING})


def by_recipe(folder, options):
    recipe = Path(f"{folder}.yaml")
    recipe.write_text(yaml.safe_dump(options | {"output_dir": folder}))
    return parse([SoftInfoNCETrainingArguments], ["--config", str(recipe)])[0]


@functools.cache
def parser_of_transformers():
    return HfArgumentParser(SoftInfoNCETrainingArguments)


WAYS = {
    "keyword": lambda folder, options: SoftInfoNCETrainingArguments(folder, **options),
    "attribute": lambda folder, options: assigned(SoftInfoNCETrainingArguments(folder), options),
    "set_training": by_set_training,
    "replace": lambda folder, options: replace(SoftInfoNCETrainingArguments(folder, **options), logging_steps=7),
    "HfArgumentParser": lambda folder, options: parser_of_transformers().parse_args_into_dataclasses(
        as_argv(options | {"output_dir": folder})
    )[0],
    "command line": lambda folder, options: parse(
        [SoftInfoNCETrainingArguments], as_argv(options | {"output_dir": folder})
    )[0],
    "recipe": by_recipe,
}


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_of_any_option_set_in_any_way_is_kept_and_none_is_the_default(starting_at, tmp_path, data):
    values = values_of_options()
    drawn = data.draw(st.fixed_dictionaries({}, optional=values))
    drawn |= {name: data.draw(values[name]) for name in OF_SET_TRAINING} | {"use_cpu": True}
    unset = data.draw(st.sets(st.sampled_from(sorted(values.keys() - drawn.keys() - WORDS.keys() | {"estimator"}))))
    drawn = dict.fromkeys(unset) | drawn
    starting = starting_at(data.draw(st.sampled_from(sorted(SCHEDULES))))
    completed = []
    for way in WAYS.values():
        args = way(str(tmp_path), drawn)
        apply_defaults(args, starting)
        kept = {option: value for option, value in drawn.items() if value is not None}
        assert {option: getattr(args, option) for option in kept} == kept and not kept.keys() & args.by_encoder
        completed.append({option: getattr(args, option) for option in values})
        stored = run_fingerprint(args).keys() & values.keys()
        defaults = defaults_of(args) | {"weight_decay": 0.0, "max_grad_norm": 1.0}
        changed = {option for option in values if getattr(args, option) != defaults[option]}
        assert stored == {option for option in changed if affects_results(option)}
    assert all(each == completed[0] for each in completed) and None not in [completed[0][name] for name in PLAIN]


OTHERS = PLAIN | {"num_train_epochs": 2.0, "per_device_train_batch_size": 8, "floor": 0.1}  # not those of its kind


@pytest.mark.parametrize("way", WAYS)
def test_the_table_and_the_record_have_the_values_that_train(way, encoder_dir, dataset, tmp_path, capsys):
    args = WAYS[way](str(tmp_path / "out"), OTHERS | {"use_cpu": True, "report_to": "none"})
    trainer = SoftInfoNCETrainer(str(encoder_dir), args, dataset)
    trainer.train()
    assert trainer.state.max_steps == 6 and type(trainer.estimator) is BM25Estimator
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 2e-5
    printed = re.sub(" +", " ", capsys.readouterr().err)
    assert "Defaults for" not in printed
    labels = {"learning_rate": "learning rate", "num_train_epochs": "epochs", "warmup_steps": "warm-up"}
    labels |= {"train_sampling_strategy": "batches", "floor": "floor"}
    for name, label in labels.items():
        assert f"| {label} | {getattr(trainer.args, name)} |" in printed
    for holder in (vars(trainer.args), trainer.record()["options"]):
        assert {name: holder[name] for name in OTHERS} == OTHERS
    assert vars(args).get("by_encoder") is None  # another trainer chooses for its own encoder


AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture
def deepspeed(tmp_path, monkeypatch):
    """Installs a package with DeepSpeed's name, and returns the path of a configuration."""
    (tmp_path / "deepspeed-1.0.dist-info").mkdir()
    (tmp_path / "deepspeed-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 1\n"
    )
    (tmp_path / "deepspeed.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.reload(integration)
    (tmp_path / "auto.json").write_text(json.dumps(AUTO))
    yield str(tmp_path / "auto.json")
    monkeypatch.undo()
    importlib.reload(integration)


RATE = {"learning_rate": 2e-5, "num_train_epochs": 3, "per_device_train_batch_size": 32}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("options", "rate", "batch"), [({}, 3e-3, 128), (RATE, 2e-5, 32)], ids=["defaults", "set"])
def test_deepspeed_trains_with_the_values_of_the_arguments(
    deepspeed, starting_at, way, options, rate, batch, tmp_path
):
    args = WAYS[way](str(tmp_path), options | {"deepspeed": deepspeed, "use_cpu": True, "warmup_steps": 5})
    apply_defaults(args, starting_at("static"))
    assert (args.learning_rate, args.per_device_train_batch_size) == (rate, batch)
    args.hf_deepspeed_config.trainer_config_finalize(args, None, 100)
    config = args.deepspeed_plugin.hf_ds_config.config
    assert config["train_micro_batch_size_per_gpu"] == config["train_batch_size"] == batch
    assert config["optimizer"]["params"] == {"lr": rate, "weight_decay": 0.0}
    assert config["scheduler"]["params"] == {"warmup_max_lr": rate, "warmup_num_steps": 5}
    assert (config["gradient_clipping"], config["bf16"]["enabled"]) == (1.0, args.bf16)


def test_a_token_is_not_shown_and_a_home_folder_is_expanded():
    args = SoftInfoNCETrainingArguments("~/x", hub_token="hf_secret")
    assert "hf_secret" not in repr(args) + str(args)
    assert args.output_dir == os.path.expanduser("~/x") and SoftInfoNCETrainingArguments().output_dir is None


# ---- An option changes what it names ----


@pytest.fixture
def resolved(starting_at, tmp_path):
    """Returns a function that applies a kind's defaults, and returns the values of options."""

    def resolve_options(kind: str, among_callbacks=None, **options) -> dict:
        args = SoftInfoNCETrainingArguments(str(tmp_path), use_cpu=True, **options)
        apply_defaults(args, starting_at(kind), among_callbacks)
        values = {option: getattr(args, option) for option in defaults_of(args)}
        values["loss"] = args.loss or ("info_nce" if args.estimator == "none" else "soft_info_nce")
        return values

    return resolve_options


# (kind, options, estimator in the callbacks) -> what changes beside the options
CONSEQUENCES = [
    ("search", {"alpha": 1.3}, None, {"weighting": "linear"}),
    ("search", {"alpha": 1.3, "weighting": "positive_aware"}, None, {}),
    ("search", {"loss": "info_nce"}, None, {"weighting": "linear"}),  # hard batches need no weights
    ("search", {"train_sampling_strategy": "no_duplicates"}, None, {}),
    ("search", {"estimator": "bm25"}, None, {"weighting": "linear"}),
    ("search", {"estimator": "bm25", "bm25_document_column": "code_tokens"}, None, {}),
    ("search", {"estimator": "scores"}, None, {"train_sampling_strategy": "random"}),
    ("search", {}, BM25Estimator(), {"weighting": "linear"}),
    ("search", {}, Plain(), {"train_sampling_strategy": "random"}),
    (
        "search",
        {"estimator": "none"},
        None,
        {"train_sampling_strategy": "random", "weighting": "linear", "loss": "info_nce"},
    ),
    ("search", {"per_device_train_batch_size": 8}, None, {"group_size": 4}),
    ("search", {"per_device_train_batch_size": 8, "group_size": 8}, None, {}),
    ("search", {"teacher": "T"}, None, {"weighting": "linear", "estimator": "trained_model", "distill_weight": 0.3}),
    ("pretrained", {"estimator": "initial_model", "margin": 0.1}, None, {"weighting": "positive_aware"}),
    ("pretrained", {"margin": 0.1}, None, {}),  # BM25 cannot give such weights
    ("base", {"estimator": "none"}, None, {"loss": "info_nce"}),
    ("distilled", {"loss": "bce"}, None, {}),
    ("distilled", {"estimator": "none"}, None, {"distill_weight": 0.0}),
    ("distilled", {"estimator": "bm25"}, None, {"distill_weight": 0.0, "loss": "soft_info_nce"}),
]


@pytest.mark.parametrize(("kind", "options", "estimator", "changes"), CONSEQUENCES)
def test_a_default_that_cannot_work_is_replaced(resolved, kind, options, estimator, changes):
    default = resolved(kind)
    values = resolved(kind, estimator, **options)
    changed = {name: value for name, value in values.items() if value != default[name] and name not in options}
    if estimator is not None:
        changed.pop("estimator", None)
    assert changes.items() <= changed.items()
    assert changed.keys() - changes.keys() <= {"teacher", "estimator_model", "loss"}


def test_a_run_that_only_evaluates_chooses_nothing(options_after, capsys):
    assert options_after("--do_predict", "true")["learning_rate"] == 2e-5
    assert capsys.readouterr().err == ""


DISTILLED = {"estimator": "trained_model", "loss": "info_nce", "distill_weight": 0.3}
DISTILLED |= {"per_device_train_batch_size": 512, "learning_rate": 3e-3, "num_train_epochs": 10}


@pytest.fixture
def teacher(encoder_dir, tmp_path):
    return shutil.copytree(encoder_dir, tmp_path / "teacher")


@pytest.fixture
def static(teacher, tmp_path):
    """Distils a static encoder, whose profile records the teacher."""
    return distil_static(teacher, tmp_path / "static", 8, vocabulary_size=300)


def test_a_distilled_encoder_learns_from_its_teacher_which_is_reported(options_after, static, teacher, capsys):
    expected = DISTILLED | {"estimator_model": str(teacher), "train_sampling_strategy": "random"}
    assert options_after(model=static, names=expected) == expected
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("Defaults for an encoder with a stored teacher: ") and f"teacher={teacher}" in line
    given = {"distill_weight": 1.0, "num_train_epochs": 2}
    words = ("--distill_weight", "1.0", "--epochs", "2")
    assert options_after(*words, model=static, names=expected) == expected | given
    without = DISTILLED | {"estimator": "none", "loss": None, "distill_weight": 0.0}
    assert options_after("--estimator", "none", model=static, names=DISTILLED) == without


def test_an_encoder_whose_teacher_is_missing_trains_without_it_which_is_reported(static, teacher, dataset, capsys):
    shutil.rmtree(teacher)
    options = {"output_dir": "out", "use_cpu": True, "report_to": "none"}
    trainer = SoftInfoNCETrainer(str(static), SoftInfoNCETrainingArguments(**options), dataset)
    line = "This encoder trains with bm25, without its teacher, which cannot be loaded"
    assert line in capsys.readouterr().err
    args = trainer.args
    assert isinstance(trainer.estimator, BM25Estimator)
    assert (args.teacher, args.loss, args.distill_weight) == (None, None, 0)
    assert (args.learning_rate, args.per_device_train_batch_size) == (3e-3, 512)  # of the encoder alone
    assert trainer.encoder.teacher == str(teacher)  # it does not forget


def test_a_teacher_that_was_named_must_be_there(starting_at, tmp_path):
    args = SoftInfoNCETrainingArguments(teacher=str(tmp_path / "gone"), use_cpu=True)
    apply_defaults(args, starting_at("scratch"))
    with refused("gone"):
        estimator_of_run(args, EncoderProfile())


@pytest.fixture
def encoders(encoder_dir, static, teacher, tmp_path):
    """Returns the folder of one encoder of each type that has one."""
    folders = {"search": encoder_dir, "distilled": static, "base": BASE}
    folders["pretrained"] = shutil.copytree(encoder_dir, tmp_path / "plain")
    (folders["pretrained"] / "modules.json").unlink()
    folders["static"] = shutil.copytree(static, tmp_path / "without_teacher")
    resolve_profile(folders["static"]).replace(teacher="", teacher_identity="").save(folders["static"])
    return folders


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind != "scratch"])
def test_python_recognises_the_kind_of_an_encoder(encoders, kind, dataset, tmp_path):
    args = SoftInfoNCETrainingArguments(str(tmp_path), use_cpu=True)
    args = SoftInfoNCETrainer(str(encoders[kind]), args, train_dataset=dataset, callbacks=[]).args
    assert tuple(getattr(args, name) for name in SCHEDULE) == SCHEDULES[kind]


def test_a_model_in_memory_may_have_loaded_weights(model, tokenizer, profile, dataset, tmp_path, capsys):
    args = SoftInfoNCETrainingArguments(str(tmp_path), use_cpu=True)
    rows = {"train_dataset": dataset, "processing_class": tokenizer, "encoder": profile}
    assert SoftInfoNCETrainer(model, args, **rows).args.learning_rate == 2e-5
    assert "Defaults for" not in capsys.readouterr().err


FEW = {"train_sampling_strategy": "random", "per_device_train_batch_size": 8, "loss": "info_nce"}
# Options, whether the rows name negatives, and whether the run reads the encoder's default estimator.
READ = [
    (FEW, False, False),
    (FEW, True, False),
    (FEW | {"negatives_per_query": 1}, True, False),
    (FEW | {"negatives_per_query": 1}, False, True),
    (FEW | {"negatives_per_query": 0}, False, False),
    (FEW | {"distill_weight": 0.1}, True, True),
    (FEW | {"train_sampling_strategy": "similar"}, True, True),
    (FEW | {"loss": "bce"}, False, True),
]


@pytest.mark.parametrize("options, negatives, read", READ)
def test_an_estimator_that_nothing_reads_is_not_made(encoder_dir, rows, options, negatives, read, tmp_path):
    if negatives:
        rows = [row | {"negatives": [f"def further(x): return {number}"]} for number, row in enumerate(rows)]
    args = SoftInfoNCETrainingArguments(str(tmp_path), use_cpu=True, **options)
    trainer = SoftInfoNCETrainer(str(encoder_dir), args, Dataset.from_list(rows))
    assert (trainer.estimator is not None) == read


@pytest.mark.parametrize("asked", [{}, {"do_eval": True}, {"do_predict": True}, {"do_train": False}], ids=str)
def test_rows_to_train_on_decide_that_python_trains(encoder_dir, asked, dataset, tmp_path):
    args = SoftInfoNCETrainingArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=8, **asked)
    trainer = SoftInfoNCETrainer(str(encoder_dir), args, dataset)
    assert (trainer.args.learning_rate, type(trainer.estimator)) == (6e-5, InitialModelEstimator)
    assert trainer.folder.trains and trainer.fingerprint()["do_train"]
    evaluates = SoftInfoNCETrainer(str(encoder_dir), args, eval_dataset=dataset)
    assert evaluates.estimator is None and not evaluates.folder.trains


# ---- A teacher by name ----


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, {"loss": "info_nce", "distill_weight": 0.3}),
        ({"distill_weight": 1.0}, {"loss": "info_nce", "distill_weight": 1.0}),
        ({"loss": "soft_info_nce"}, {"loss": "soft_info_nce", "distill_weight": 0.3}),
    ],
)
def test_a_teacher_stands_for_four_options(starting_at, teacher, given, expected):
    args = SoftInfoNCETrainingArguments(use_cpu=True, teacher=str(teacher), estimator="trained_model", **given)
    apply_defaults(args, starting_at("search"))
    expected = expected | {"estimator_model": str(teacher), "learning_rate": 6e-5}
    assert {name: getattr(args, name) for name in expected} == expected
    estimator = estimator_of_run(args, EncoderProfile())
    assert isinstance(estimator, TrainedModelEstimator) and estimator.model_name_or_path == str(teacher)


def test_a_weight_of_0_turns_a_teacher_off(trainer_of, options_after, teacher):
    expected = {"loss": "info_nce", "distill_weight": 0.0}
    assert options_after("--teacher", str(teacher), "--distill_weight", "0", names=expected) == expected
    trainer = trainer_of(arguments={"callbacks": None}, teacher=str(teacher), distill_weight=0.0)
    assert trainer.estimator is None and not trainer.plan.criterion.needs_similarity


@pytest.mark.parametrize("words", [("--estimator", "bm25"), ("--estimator", "none"), ("--estimator_model", "other")])
def test_a_teacher_beside_another_estimator_is_refused(options_after, teacher, words):
    with refused(f"teacher={teacher}: a teacher is the estimator, so it cannot be combined with {words[1]}"):
        options_after("--teacher", str(teacher), *words)


def test_a_teacher_beside_an_estimator_among_the_callbacks_is_refused(trainer_of, teacher):
    with refused("cannot be combined with bm25"):
        trainer_of(teacher=str(teacher))


@pytest.mark.slow
def test_a_training_with_a_teacher_names_it_and_equals_the_four_options(trainer_of, model, teacher, capsys):
    by_name = {"teacher": str(teacher)}
    by_hand = {"loss": "info_nce", "distill_weight": 0.3}
    losses = []
    for options, callbacks in ((by_name, None), (by_hand, [TrainedModelEstimator(str(teacher))])):
        trainer = trainer_of(arguments={"callbacks": callbacks, "model": copy.deepcopy(model)}, **options)
        trainer.train()
        losses.append(losses_of(trainer))
        assert (f"teacher  {teacher.name}" in re.sub(r"[ |]*\| ", "  ", capsys.readouterr().err)) == (
            callbacks is None
        )
    assert losses[0] == losses[1]


def test_trainers_with_the_same_arguments_get_the_defaults_of_their_encoders(encoder_dir, static, dataset, tmp_path):
    args = SoftInfoNCETrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none")
    rows = concatenate_datasets([dataset] * 2)
    rates = []
    for folder in (static, encoder_dir, static, encoder_dir):
        trainer = SoftInfoNCETrainer(str(folder), args, rows)
        rates.append((trainer.args.learning_rate, trainer.args.per_device_train_batch_size, type(trainer.estimator)))
    assert rates == [(3e-3, 512, TrainedModelEstimator), (6e-5, 32, InitialModelEstimator)] * 2


# ---- Precision ----


@pytest.fixture
def precision_of(monkeypatch, tmp_path, profile):
    """Returns a function that makes arguments as on a GPU, with a launcher's precision, and resolves the precision."""

    def resolve(
        launcher: str | None = None, capable: bool = True, static: bool = False, device: str = "cuda", **options
    ) -> tuple:
        if launcher is not None:
            monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
        args = SoftInfoNCETrainingArguments(str(tmp_path), use_cpu=True, **options)
        monkeypatch.setattr(SoftInfoNCETrainingArguments, "device", torch.device(device))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capable)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": capable}, raising=False)
        choose_precision(args, profile.replace(name="static") if static else profile)
        return args.mixed_precision, args.bf16

    return resolve


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("bf16", True)),
        ({"launcher": "no"}, ("bf16", True)),  # `accelerate launch` exports this if nobody asked
        ({"launcher": "fp16"}, ("fp16", False)),
        ({"launcher": "bf16"}, ("bf16", True)),
        ({"launcher": "bf16", "bf16": False}, ("no", False)),
        ({"launcher": "fp16", "bf16": True}, ("bf16", True)),
        ({"bf16": False}, ("no", False)),
        ({"capable": False}, ("no", False)),
        ({"static": True}, ("no", False)),
        ({"static": True, "launcher": "bf16"}, ("bf16", True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_bf16_is_the_default_on_a_device_that_computes_in_it(precision_of, device, options, expected):
    assert precision_of(device=device, **options) == expected


def test_a_cpu_before_torch_2_11_trains_in_float32(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not computes_bf16(torch.device("cpu"))


@pytest.mark.parametrize("words", [[], ["--from_scratch", "32x2"]], ids=["saved in bf16", "from scratch"])
def test_weights_stay_in_float32_by_default(options_after, encoder_dir, tmp_path, monkeypatch, words):
    model = None if words else tmp_path / "half"
    if model:
        AutoModel.from_pretrained(encoder_dir, dtype=torch.bfloat16).save_pretrained(model)
        for name in ("tokenizer.json", "tokenizer_config.json", "soft_trainer.json"):
            shutil.copy(encoder_dir / name, model)
        assert load_encoder(model, device="cpu").model.dtype == torch.float32
    assert options_after(*words, model=model, names=["bf16"]) == {"bf16": False}  # on a CPU
    monkeypatch.setattr(SoftInfoNCETrainingArguments, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert options_after(*words, model=model, names=["bf16"]) == {"bf16": True}
