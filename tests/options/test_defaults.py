"""The defaults of a training depend on the encoder, and are the same for the shell, recipes and Python."""

import copy
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from own_losses import Plain
from refusals import refused
from trainings import losses_of
from transformers import AutoModel

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
from soft_trainer.option_spec import option_specs
from soft_trainer.options import defaults
from soft_trainer.options.defaults import METHODS, SCHEDULE, SCHEDULES, apply_defaults, choose_precision
from soft_trainer.options.fields import TrainingOptions
from soft_trainer.options.parse import OF_A_RUN, as_argv, parse
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.packaged import BASE
from soft_trainer.shell.building import build_encoder

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
        (("--estimator", "bm25"), 1e-4),
        (("--learning_rate", "3e-4"), 3e-4),
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


# ---- An option changes what it names ----

# Values to try, for each option of the groups "weights" and "batches". A new option needs a line.
OTHER_VALUES = {
    "loss": ["info_nce", "bce", "own_losses:info_nce"],
    "alpha": [1.3],
    "beta": [0.7],
    "temperature": [0.3],
    "floor": [0.2],
    "weighting": ["linear", "positive_aware"],
    "margin": [0.1],
    "infonce_weight": [1.0],
    "kl_weight": [0.5],
    "cancel": ["top_k"],
    "cancel_k": [5],
    "cancel_ratio": [0.7],
    "teacher": ["TEACHER"],
    "false_negatives": ["positives"],
    "group_size": [4],
    "negatives_per_query": [2],
    "negative_ratio": [0.9],
    "estimator": ["none", "bm25", "initial_model", "scores", "own_losses:Plain"],
    "estimator_model": ["TEACHER"],
    "bm25_idf": ["lucene"],
    "bm25_scope": ["corpus"],
    "bm25_document_column": ["code_tokens"],
    "train_sampling_strategy": ["random", "similar"],
    # Options of the schedule change nothing else either.
    "learning_rate": [3e-5],
    "num_train_epochs": [2],
    "warmup_steps": [0.2],
    "per_device_train_batch_size": [8, 64],
    "distill_weight": [0.5],
}
GROUPS = {name for name, spec in option_specs(TrainingOptions).items() if spec.group in ("weights", "batches")}
# The rate, epochs, warm-up and batch of each kind, whatever the loss and the estimator.
EXPECTED = {
    "search": (6e-5, 1, 0.1, 32),
    "distilled": (3e-3, 10, 0, 512),
    "base": (1e-3, 5, 0, 128),
    "static": (3e-3, 10, 0, 128),
    "scratch": (1e-3, 10, 0, 32),
    "pretrained": (2e-5, 10, 0, 32),
}


def test_each_option_of_the_groups_has_other_values():
    assert GROUPS <= OTHER_VALUES.keys()


@pytest.fixture(scope="module")
def profiles():
    """Returns each kind of encoder as a profile and a name, without files."""
    search = EncoderProfile(score_function="cosine")
    static = EncoderProfile(name="static", score_function="cosine")
    return {
        "search": (search, "SEARCH"),
        "distilled": (static.replace(teacher="STORED"), "STATIC"),
        "base": (static, BASE),
        "static": (static, "STATIC"),
        "scratch": (search, None),
        "pretrained": (EncoderProfile(), "PRETRAINED"),
    }


def starting_at(profile, name):
    """An encoder of which only the profile and the name are known."""
    return SimpleNamespace(profile=profile, name=name, revision=None, adapter=False)


@pytest.fixture
def resolved(profiles, monkeypatch, tmp_path):
    """Returns a function that applies a kind's defaults, and returns the values of options."""
    monkeypatch.setattr(defaults, "repository_file", lambda name, file, revision: name == "SEARCH" or None)

    def resolve_options(kind: str, among_callbacks=None, **options) -> dict:
        args = SoftInfoNCETrainingArguments(str(tmp_path), use_cpu=True, **options)
        profile, name = profiles[kind]
        apply_defaults(args, starting_at(profile, name), estimator=among_callbacks)
        values = {option: getattr(args, option) for option in OTHER_VALUES}
        without = args.estimator in (None, "none")
        values["loss"] = args.loss or ("info_nce" if without else "soft_info_nce")
        return values

    return resolve_options


# (kind, options, estimator in the callbacks) -> what changes beside the options
CONSEQUENCES = [
    ("search", {"alpha": 1.3}, None, {"weighting": "linear"}),
    ("search", {"alpha": 1.3, "margin": 0.1}, None, {"weighting": "linear"}),
    ("search", {"alpha": 1.3, "weighting": "positive_aware"}, None, {}),
    ("search", {"loss": "info_nce"}, None, {"weighting": "linear"}),  # hard batches need no weights
    ("search", {"loss": "info_nce", "distill_weight": 0.3}, None, {"weighting": "linear"}),
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
    ("base", {"estimator": "bm25"}, None, {}),
    ("base", {"estimator": "none"}, None, {"loss": "info_nce"}),
    ("base", {}, BM25Estimator(), {}),
    ("base", {"alpha": 1.3}, None, {}),
    ("distilled", {"loss": "bce"}, None, {}),
    ("distilled", {"estimator": "none"}, None, {"distill_weight": 0.0}),
    ("distilled", {"estimator": "bm25"}, None, {"distill_weight": 0.0, "loss": "soft_info_nce"}),
]


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_schedule_of_each_kind(resolved, kind):
    assert tuple(resolved(kind)[name] for name in SCHEDULE[:4]) == EXPECTED[kind]


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


def test_a_teacher_that_was_named_must_be_there(tmp_path):
    _, _, args = parse(OF_A_RUN, as_argv({"teacher": str(tmp_path / "gone"), "use_cpu": True}))
    apply_defaults(args, starting_at(EncoderProfile(), None))
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


@pytest.mark.parametrize("kind", EXPECTED)
def test_python_recognises_the_kind_of_an_encoder(encoders, kind, model, tokenizer, profile, dataset, tmp_path):
    args = SoftInfoNCETrainingArguments(str(tmp_path), use_cpu=True)
    args.dataloader_drop_last = False
    rows = {"train_dataset": dataset, "callbacks": []}
    if kind == "scratch":
        rows |= {"model": model, "processing_class": tokenizer, "encoder": profile}
    else:
        rows["model"] = str(encoders[kind])
    args = SoftInfoNCETrainer(args=args, **rows).args
    assert tuple(getattr(args, name) for name in SCHEDULE[:4]) == EXPECTED[kind]


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
def test_a_teacher_stands_for_four_options(options_after, encoder_dir, teacher, given, expected, tmp_path):
    words = as_argv(given | {"teacher": str(teacher), "estimator": "trained_model"})
    expected = expected | {"estimator": "trained_model", "estimator_model": str(teacher), "learning_rate": 6e-5}
    assert options_after(*words, names=expected) == expected
    args = SoftInfoNCETrainingArguments(str(tmp_path), use_cpu=True, teacher=str(teacher), **given)
    profile = resolve_profile(encoder_dir)
    apply_defaults(args, starting_at(profile, str(encoder_dir)))
    estimator = estimator_of_run(args, profile)
    assert isinstance(estimator, TrainedModelEstimator) and estimator.model_name_or_path == str(teacher)
    assert (args.loss, args.distill_weight) == (expected["loss"], expected["distill_weight"])


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
    replaced = replace(args, seed=7, num_train_epochs=2)
    assert {"seed", "num_train_epochs"} <= replaced.named and "learning_rate" not in replaced.named
    trainer = SoftInfoNCETrainer(str(encoder_dir), replaced, rows)
    assert (trainer.args.learning_rate, trainer.args.num_train_epochs, trainer.args.seed) == (6e-5, 2, 7)


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
