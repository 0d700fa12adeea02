"""Learning from a repository: what is trained, who judges, and what an index keeps of it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from git_repositories import grown
from refusals import refused

from soft_trainer.encoders.encoding import Encoder
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.static import distilled
from soft_trainer.search import CodeIndex
from soft_trainer.search.index import vectors
from soft_trainer.search.index.static import default_static_folder
from soft_trainer.search.measuring import learning
from soft_trainer.search.measuring.learning import BASE, LEARNED, Lesson, base_encoder, decide, learn, study
from soft_trainer.search.measuring.verdict import MEMORY


@pytest.fixture
def base(model, tokenizer, profile):
    """A static encoder where `soft-trainer distil` puts it, in the cache of the test."""
    encoder = distilled(Encoder(model, tokenizer, profile), 8)
    return export_encoder(encoder.model, encoder.tokenizer, encoder.profile, default_static_folder())


@pytest.fixture
def trained(base, tmp_path):
    """The same encoder with other vectors."""
    encoder = learning.StaticSearchEncoder("base", base)
    folder = Path(shutil.copytree(base, tmp_path / "trained"))
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({name: 2 * tensor[:, ::-1] for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert learning.StaticSearchEncoder("trained", folder).identity != encoder.identity
    return folder


@pytest.fixture
def index(tmp_path, base, monkeypatch):
    """The index of a small repository with its working tree."""
    repository = grown(tmp_path / "repo", 4)
    repository.git.checkout_head(strategy=2)
    monkeypatch.chdir(tmp_path)
    with CodeIndex.build("repo", "index") as index:
        yield index


def answers(encoder):
    """A study whose outcome is known."""
    return lambda *arguments: Lesson(encoder, 60, ranks(0, 0), "as the test has it")


def ranks(base, learned):
    """Reciprocal ranks of 60 queries; `base` and `learned` are the gains over words with memory, a query each."""
    memory = np.full(60, 0.4)
    return {MEMORY: memory, BASE: memory + base, LEARNED: memory + learned}


SPREAD = np.linspace(-0.4, 0.4, 60)


@pytest.mark.parametrize(
    ("base", "learned", "best"),
    [
        (np.zeros(60), np.linspace(0, 0.2, 60), LEARNED),
        (SPREAD, SPREAD + 0.02, MEMORY),  # the interval holds 0
        (np.linspace(0, 0.3, 60), np.linspace(0, 0.2, 60), BASE),
        (np.linspace(0, 0.3, 60), SPREAD + 0.16, LEARNED),
        (np.linspace(0, -0.2, 60), np.linspace(0, -0.1, 60), MEMORY),
    ],
)
def test_an_encoder_is_kept_if_its_whole_interval_is_above_zero(base, learned, best):
    chosen, verdict = decide(ranks(base, learned))
    assert chosen == best
    assert verdict.startswith(f"kept: {best}. MRR on the newest 60 commits, words + memory 0.400; ")
    assert "\n" not in verdict and f"{learned.mean():+.3f} (" in verdict


def test_too_few_commits_are_told_before_any_training(tmp_path, base, monkeypatch):
    monkeypatch.setattr(learning, "train", None)  # a call would fail
    grown(tmp_path / "repo", 20)
    lesson = study(tmp_path / "repo", base, tmp_path)
    assert lesson.encoder is None and lesson.ranks == {}
    assert lesson.verdict == "learned nothing: only 3 of the newest commits can judge an encoder, and it takes 50"
    grown(tmp_path / "shorter", 2)
    lesson = study(tmp_path / "shorter", base, tmp_path)
    assert lesson.encoder is None
    assert lesson.verdict.startswith("learned nothing: only 2 of 3 commits change python functions and say how")


def test_nothing_from_after_the_cut_is_trained_on(tmp_path, base, monkeypatch):
    class Trained(Exception):
        """Ends the study with the rows that it would train on."""

    def train(base, rows, output_dir):
        raise Trained(rows)

    monkeypatch.setattr(learning, "MIN_QUERIES", 3)
    monkeypatch.setattr(learning, "train", train)
    grown(tmp_path / "repo", 20)
    with pytest.raises(Trained) as caught:
        study(tmp_path / "repo", base, tmp_path)
    (rows,) = caught.value.args
    assert {row["source"] for row in rows} == {"documentation", "history"}
    texts = " ".join(f"{row['docstring']} {row['code']} {row['original_string']}" for row in rows)
    assert "number 17 " in texts and "1017" not in texts  # the code of a pair is what it was before its commit
    assert not any(str(number) in texts for number in (1018, 1019, 1020))
    assert not any(f"number {number} " in texts for number in (18, 19, 20))


def test_the_index_keeps_the_encoder_that_helps_and_no_update_trains(index, trained, base, tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "study", answers(trained))
    lesson = learn(index)
    assert lesson.encoder.parent == tmp_path / "index" and index.model == str(lesson.encoder)
    identity = learning.StaticSearchEncoder("trained", trained).identity
    assert learning.store.get_meta(index.database, "vectors")["identity"] == identity
    assert learning.store.get_meta(index.database, "vectors")["weight"] == learning.WEIGHT
    shutil.rmtree(trained)  # the index has a copy
    monkeypatch.setattr(learning, "study", None)
    index.update()
    assert index.model == str(lesson.encoder)
    assert index.search("add a number") and not index.notices

    nothing = Lesson(None, 3, {}, "learned nothing")
    monkeypatch.setattr(learning, "study", lambda *arguments: nothing)
    learn(index)
    assert index.model == str(lesson.encoder)

    monkeypatch.setattr(learning, "study", answers(base))
    assert learn(index).encoder == base
    assert index.model == str(base) and not lesson.encoder.exists()

    monkeypatch.setattr(learning, "study", answers(None))
    learn(index)
    assert index.model is None
    assert index.search("add a number") and not index.notices


def test_an_encoder_of_another_origin_stays_if_none_helps(index, trained, monkeypatch):
    index.encode(trained)
    monkeypatch.setattr(learning, "study", answers(None))
    learn(index)
    assert index.model == str(trained)


def test_an_interrupted_run_leaves_the_old_index(index, trained, monkeypatch, command):
    monkeypatch.setattr(learning, "study", answers(trained))
    learn(index)
    kept = index.model

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(learning, "study", interrupted)
    code, _, error = command("index", index.folder, "--index_dir", index.index_dir, "--learn")
    assert code == 130 and "--learn` continues" in error
    assert index.model == kept and index.search("add a number") and not index.notices

    def half(source, target):
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    vectors.forget(index.database, index.index_dir)
    shutil.rmtree(kept)
    monkeypatch.setattr(learning, "study", answers(trained))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", half)
        with pytest.raises(KeyboardInterrupt):
            learn(index)
    assert index.model is None
    assert index.search("add a number") and not index.notices
    assert learn(index).encoder == Path(kept)
    assert [path.name for path in index.index_dir.glob("encoder-*")] == [Path(kept).name]


def test_what_cannot_be_trained_is_refused(tmp_path, tree, encoder_dir, base, command):
    assert base_encoder(None) == base
    with refused("is not a static encoder; make one with `soft-trainer distil"):
        base_encoder(encoder_dir)
    with CodeIndex.build(tree, tmp_path / "plain") as plain, refused("is not in a git repository"):
        learn(plain, base)
    shutil.rmtree(base)
    code, _, error = command("index", tree, "--index_dir", tmp_path / "none", "--learn")
    assert code == 2 and "no static encoder to train was found: `soft-trainer distil " in error
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_small_repository_is_learned_from(tmp_path, base, monkeypatch, command):
    monkeypatch.setattr(learning, "MIN_QUERIES", 10)
    repository = grown(tmp_path / "repo", 80)
    repository.git.checkout_head(strategy=2)
    code, out, error = command("index", tmp_path / "repo", "--index_dir", tmp_path / "index", "--learn")
    assert code == 0 and "Search it" in out
    (verdict,) = [line for line in error.splitlines() if line.startswith("kept: ")]
    assert "MRR on the newest 12 commits" in verdict
    with CodeIndex.open(tmp_path / "index") as index:
        assert (index.model is None) == verdict.startswith("kept: words + memory. ")
        assert index.search("add a number")
