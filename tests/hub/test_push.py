import json
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download
from refusals import refused
from server import FINE_REPO, FINE_TOKEN, READ_TOKEN, WRITE_TOKEN

from soft_trainer.cli.__main__ import run_command
from soft_trainer.errors import UserError
from soft_trainer.hub.push import Repository
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.spec import FILES_OF_TRANSFORMERS, option_specs
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.fingerprint import run_fingerprint
from soft_trainer.run.record import public_options
from soft_trainer.system.files import RECORD_FORMAT, WRITTEN

REPO = "ann/encoder"
CARD = "---\nlicense: mit\n---\n# Card\n"


@pytest.fixture
def folder(tmp_path):
    """Makes the output folder of a run, with files to push and files that must never be pushed."""
    folder = tmp_path / "output"
    for name, content in {
        "README.md": CARD.encode(),
        "model.safetensors": b"weights" * 100_000,
        "1_Pooling/config.json": b"{}",
        "training_args.bin": WRITE_TOKEN.encode(),
        "optimizer.pt": b"pickle",
        "extra/scaler.pkl": b"pickle",
        ".export-1/model.safetensors": b"half",
        "all_results.json.tmp": b"{",
        "checkpoint-5/model.safetensors": b"weights of step 5",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def pushed(repo=REPO, **kwargs):
    files = set(HfApi(token=WRITE_TOKEN).list_repo_files(repo, **kwargs))
    return files - {".gitattributes"}


COMPLETE = {"README.md", "model.safetensors", "1_Pooling/config.json"}


# ---- A push that succeeds ----


@pytest.mark.parametrize("path", [None, "last-checkpoint"])
def test_a_card_without_our_line_is_kept(here, folder, caplog, path):
    repository = Repository(REPO, WRITE_TOKEN, path_in_repo=path)
    name = f"{path}/README.md" if path else "README.md"
    for text in ("First.\n", "Second.\n"):
        (folder / "README.md").write_text(f"{CARD}{text}{WRITTEN} -->\n")
        repository.push(folder)
        assert text in Path(hf_hub_download(REPO, name)).read_text()
    assert "keeping" not in caplog.text
    repository.api.upload_file(path_or_fileobj=CARD.encode() + b"Mine.\n", path_in_repo=name, repo_id=REPO)
    repository.push(folder)
    assert f"ann/encoder: keeping {name}" in caplog.text
    assert Path(hf_hub_download(REPO, name)).read_text() == CARD + "Mine.\n"
    (folder / "README.md").write_text(CARD + "Edited here.\n")
    repository.push(folder)
    assert "Edited here." in Path(hf_hub_download(REPO, name)).read_text()


def test_only_what_an_encoder_needs_is_pushed(here, folder):
    """All other files, as a run or its user may leave them there, contain a canary that must not be pushed."""
    private = (
        *("log.txt", "recipe.yaml", "cell.json", "training_args.json", "trainer_state.json", "notes.json", ".env"),
        *("ranks-test-trained.parquet", "data/train.jsonl.gz", "pushed_rows/train.jsonl.gz", "unmerged/config.json"),
        *(
            "secret.py",
            "train.py",
            "data/config.json",
            "report/index.html",
            "1_Pooling/log.txt",
            "logs/tokenizer.json",
        ),
        *("checkpoint-5/config.json", "weights.png", "model-of-mine/config.json", "rows.csv", "1_Pooling/own/a.json"),
    )
    for name in private:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("canary")
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_own.Own", "AutoConfig": "a--b.C"}}')
    (folder / "modeling_own.py").write_text("from .layers import Layer")
    (folder / "layers.py").write_text("Layer = int")
    url = Repository(REPO, WRITE_TOKEN).push(folder, "First")
    assert pushed() == COMPLETE | {"config.json", "modeling_own.py", "layers.py"}
    assert here.holding("canary") == []
    assert HfApi().list_repo_commits(REPO)[0].title == "First"
    assert url.endswith(HfApi().model_info(REPO).sha)


def fetched(name, folder):
    """Returns the content of a JSON file in the repository on the Hub."""
    return json.loads(Path(hf_hub_download(REPO, name, cache_dir=folder / ".cache")).read_text())


@pytest.mark.parametrize("path", ["canary/enc", "/home/canary/enc"])
def test_a_local_teacher_and_an_adapter_s_base_lose_their_paths(here, folder, tmp_path, monkeypatch, path):
    (tmp_path / "canary" / "enc").mkdir(parents=True)
    monkeypatch.chdir("/")
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": path, "r": 4}))
    profile = {"query_prefix": "a:/b/c ", "teacher": path, "teacher_identity": "0" * 32}
    (folder / "soft_trainer.json").write_text(json.dumps(profile))
    Repository(REPO, WRITE_TOKEN).push(folder)
    assert here.holding("canary") == []
    assert fetched("soft_trainer.json", folder) == profile | {"teacher": "enc"}
    assert fetched("adapter/adapter_config.json", folder) == {"base_model_name_or_path": "enc", "r": 4}
    assert json.loads((folder / "soft_trainer.json").read_text()) == profile


def test_an_adapter_whose_base_is_on_this_machine_alone_is_warned_of(here, folder, tmp_path, caplog):
    (folder / "model.safetensors").unlink()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "ann/base"}))
    Repository(REPO, WRITE_TOKEN).push(folder)
    assert "the adapter's base" not in caplog.text
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    Repository(REPO, WRITE_TOKEN).push(folder)
    assert f"the adapter's base, {tmp_path}, exists only on this machine" in caplog.text


def test_a_record_is_pushed_as_it_is_and_that_of_another_version_is_not(here, folder, caplog):
    record = {"format": RECORD_FORMAT, "options": {"seed": 1}}
    (folder / "run.json").write_text(json.dumps(record))
    Repository(REPO, WRITE_TOKEN).push(folder)
    assert fetched("run.json", folder) == record
    (folder / "run.json").write_text(json.dumps({"options": {"data_dir": "/home/canary/rows"}}))
    Repository(REPO, WRITE_TOKEN).push(folder)
    assert here.holding("canary") == [] and "not pushed: another version wrote this file" in caplog.text


KINDS = (ModelArguments, DataArguments, TrainingOptions)
PATHS = [name for kind in KINDS for name, each in option_specs(kind).items() if each.refers_to not in ("", "code")]
PATHS += FILES_OF_TRANSFORMERS
FORMS = ("canary{}/end", "../canary{}/end", "file:///srv/canary{}/end", "~/canary{}/a, b/end/", "C:\\canary{}\\end")


@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_path_in_any_option_is_in_a_record(form, tmp_path, monkeypatch):
    """More than thirty options can hold a path. Each gets a path in this form, and the record must not contain it."""
    monkeypatch.chdir(tmp_path)
    args = SoftInfoNCETrainingArguments(output_dir="out", use_cpu=True)
    parts = (ModelArguments(), DataArguments(), args)
    for name in PATHS:
        value = form.format(name)
        if form.startswith("canary"):  # a relative path that is not there may be a name on the Hub
            Path(value).mkdir(parents=True)
        setattr(next(part for part in parts if hasattr(part, name)), name, value)
    record = {"options": public_options(*parts), "depends on": run_fingerprint(*parts)}
    text = json.dumps(record)
    assert "canary" not in text and "end" in text
    assert len(PATHS) * len(FORMS) >= 30


def test_names_on_the_hub_stay_in_a_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows, new").mkdir()
    data = DataArguments(data_dir="rows, new", eval_data_dir="lab/rows, ../x/set")
    args = SoftInfoNCETrainingArguments(output_dir="out", use_cpu=True, estimator_model="ann/teacher@v1")
    options = public_options(ModelArguments(model_name_or_path="microsoft/unixcoder-base"), data, args)
    assert options["model_name_or_path"] == "microsoft/unixcoder-base" and options["data_dir"] == "rows, new"
    assert options["eval_data_dir"] == "lab/rows,set" and options["estimator_model"] == "ann/teacher@v1"


def test_a_folder_without_weights_is_refused(here, folder):
    (folder / "model.safetensors").unlink()
    with refused(f"{folder}: no weights to push"):
        Repository(REPO, WRITE_TOKEN).push(folder)


@pytest.mark.slow
def test_a_stored_token_is_enough_and_unchanged_files_are_not_sent_again(here, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    Repository(REPO).check()
    Repository(REPO).push(folder)
    assert pushed() == COMPLETE
    (folder / "README.md").write_text(CARD + "More.\n")
    Repository(REPO).push(folder)
    assert len(here.requests("PUT /-/objects")) == 1
    assert len(HfApi().list_repo_commits(REPO)) == 3  # with the one that creates the repository


def test_a_private_repository_shows_to_its_owner_only_and_is_made_again_if_it_vanished(here, folder):
    Repository(REPO, WRITE_TOKEN, private=True).check()
    here.remove(REPO)
    Repository(REPO, WRITE_TOKEN, private=True).push(folder)
    assert pushed() == COMPLETE
    with pytest.raises(OSError, match="401"):
        HfApi(token=False).model_info(REPO)


def test_revision_and_subfolder(here, folder):
    Repository(REPO, WRITE_TOKEN, revision="step-5", path_in_repo="last-checkpoint").push(folder)
    assert pushed(revision="step-5") == {f"last-checkpoint/{name}" for name in COMPLETE}
    assert pushed() == set()


@pytest.mark.parametrize("repo_type", ["dataset", "space"])
def test_other_kinds_of_repository(here, folder, repo_type):
    Repository(REPO, WRITE_TOKEN, repo_type=repo_type).check()
    Repository(REPO, WRITE_TOKEN, repo_type=repo_type).push(folder)
    assert pushed(repo_type=repo_type) == COMPLETE | {"checkpoint-5/model.safetensors"}


def test_a_card_names_the_repository_once_it_has_been_pushed(here, folder):
    card = CARD + 'load_encoder("out")\n'
    (folder / "README.md").write_text(card)
    here.fault(commit=-1)
    with refused("Nothing is lost"):
        Repository(REPO, WRITE_TOKEN).push(folder)
    assert (folder / "README.md").read_text() == card
    here.fault(commit=0)
    Repository(REPO, WRITE_TOKEN).push(folder)
    assert (folder / "README.md").read_text() == card.replace("out", REPO)


# ---- Refused before training ----


def test_invalid_names(here):
    for repo in ("encoder", "ann/two/parts", "ann/-x", "ann/with space", "", "ann/"):
        with refused("hub_model_id="):
            Repository(repo, WRITE_TOKEN).check()
    assert here.requests("") == ["GET /-/log"]


@pytest.mark.parametrize(
    ("repo", "token", "words"),
    [
        (REPO, None, ["no token", "hf auth login"]),
        (REPO, "hf_wrong", ["token is invalid", "settings/tokens"]),
        (REPO, READ_TOKEN, ["not allowed to write", "'read'", "belongs to ann"]),
        ("bob/encoder", WRITE_TOKEN, ["not allowed to write", "set USER to one of ann, lab"]),
        (REPO, FINE_TOKEN, ["not allowed to write", "'fineGrained'"]),
    ],
    ids=["no token", "wrong token", "read-only token", "foreign namespace", "token for another repository"],
)
def test_refused_before_training(here, folder, repo, token, words):
    with refused(*words):
        Repository(repo, token).check()
    with pytest.raises(UserError):
        Repository(repo, token).push(folder)


@pytest.mark.slow
def test_may_push_to_what_the_token_may_write(here):
    for repo, token in ((REPO, WRITE_TOKEN), ("lab/encoder", WRITE_TOKEN), (FINE_REPO, FINE_TOKEN)):
        Repository(repo, token).check()
        Repository(repo, token).check()


# ---- Faults while pushing ----


@pytest.mark.slow
@pytest.mark.parametrize("fault", [{"upload": 2}, {"preupload": 1}, {"cut_upload": 1}], ids=str)
def test_passing_faults_are_overcome(here, folder, fault):
    here.fault(**fault)
    Repository(REPO, WRITE_TOKEN).push(folder)
    assert pushed() == COMPLETE
    path = hf_hub_download(REPO, "model.safetensors", cache_dir=folder / ".cache", endpoint=here.url)
    assert Path(path).read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("fault", [*(pytest.param(f, marks=pytest.mark.slow) for f in ("commit", "upload")), "down"])
def test_lasting_fault_names_the_command_that_pushes_later(here, folder, fault):
    if fault == "down":
        here.stop()
        with refused(f"cannot push to {REPO}: ConnectError"):
            Repository(REPO, WRITE_TOKEN).check()
    else:
        here.fault(**{fault: -1})
    with pytest.raises(UserError) as failure:
        Repository(REPO, WRITE_TOKEN, private=True, revision="dev").push(folder)
    assert str(failure.value).endswith(f"run: soft-trainer push {folder} {REPO} --private --revision dev")
    assert "\n" not in str(failure.value) and WRITE_TOKEN not in str(failure.value)


def test_a_folder_that_cannot_be_pushed_is_refused_before_the_commit(here, folder, tmp_path):
    with refused("no files to push"):
        Repository(REPO, WRITE_TOKEN).push(tmp_path / "missing")
    (folder / "config.json").write_text(f'{{"hub_token": "{WRITE_TOKEN}"}}')
    with refused("config.json contains the Hub token"):
        Repository(REPO, WRITE_TOKEN).push(folder)
    (folder / "config.json").unlink()
    (folder / "README.md").write_text("no header\n")
    with pytest.raises(UserError, match="Invalid metadata in README.md.*empty or missing yaml"):
        Repository(REPO, WRITE_TOKEN).push(folder)
    assert len(here.requests("validate-yaml")) == 1 and not here.requests("/commit/")


# ---- The command line ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("snippets", "old", "words"),
    [
        ('load_encoder("out/1")\nSentenceTransformer("out/1")\n', "out/1", []),
        ('load_encoder("a/b", trust_remote_code=True)\nSentenceTransformer("a/b", truncate_dim=64)\n', "a/b", []),
        (
            'load_encoder("a/b", revision="v1")\nfrom_pretrained("a/b", revision="v1", a=1)\n',
            "a/b",
            ["--revision", "v2"],
        ),
    ],
)
def test_the_command_names_the_encoder_and_its_branch_in_its_card(
    here, folder, monkeypatch, capsys, snippets, old, words
):
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    (folder / "README.md").write_text(CARD + snippets)
    assert run_command(["push", str(folder), REPO, *words]) == 0
    assert "/ann/encoder/commit/" in capsys.readouterr().out
    assert (folder / "README.md").read_text() == CARD + snippets.replace(old, REPO).replace("v1", "v2")


@pytest.mark.slow
def test_command_that_the_message_names_works_in_a_new_process(hub, folder):
    command = ["-m", "soft_trainer.cli", "push", folder, REPO, "--revision", "dev"]
    pushed = hub.run(*command, token=WRITE_TOKEN)
    assert pushed.returncode == 0, pushed.stderr
    assert WRITE_TOKEN not in pushed.stdout + pushed.stderr
