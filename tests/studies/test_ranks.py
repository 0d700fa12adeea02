"""Files of ranks are read only with the encoder that made them."""

import shutil

import pytest
import torch
from refusals import refused

from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.evaluation.ranking import Ranking
from soft_trainer.evaluation.results import save_ranks
from soft_trainer.evaluation.retrieval import RetrievalOutput
from soft_trainer.studies.compare import ranks_of
from soft_trainer.studies.report import ReportedRun, compare_with
from soft_trainer.system.files import RECORD_FORMAT, write_json

# A file that changes in a run's folder, and True if the ranks then belong to another encoder.
BESIDE_RANKS = {
    "model.safetensors": True,
    "config.json": True,
    "tokenizer.json": True,
    "1_Pooling/config.json": True,
    "soft_trainer.json": True,
    "README.md": False,
    "log.txt": False,
    "trainer_state.json": False,
}
TOPS = torch.zeros(24, 3, dtype=torch.long)
RANKED = RetrievalOutput(Ranking(torch.ones(24, dtype=torch.long), TOPS, torch.ones(24, 3)), {})


@pytest.fixture
def ranked(encoder_dir, dataset, tmp_path):
    """Writes the folder of a run with its encoder and the encoder's ranks."""
    folder = tmp_path / "ranked"
    shutil.copytree(encoder_dir, folder)
    (folder / "README.md").write_text("# Card\n")
    (folder / "trainer_state.json").write_text("{}")
    split = Split.from_pairs(dataset)
    for system in ("trained", "lexical"):
        encoder = folder if system == "trained" else None
        path = folder / f"ranks-test-{system}.parquet"
        save_ranks(path, split, RANKED, EncoderProfile(), encoder)
    write_json(folder / "run.json", {"format": RECORD_FORMAT})
    return folder


@pytest.mark.parametrize("file", BESIDE_RANKS)
def test_ranks_of_another_encoder_are_refused(file, ranked):
    ranks_of(ranked, "test")
    with (ranked / file).open("a") as written:
        written.write(" ")
    ranks_of(ranked, "test", "lexical")
    if BESIDE_RANKS[file]:
        with refused(f"the encoder in {ranked} has changed since these ranks were computed; evaluate again"):
            ranks_of(ranked, "test")
        with refused("has changed since these ranks were computed"):
            ranks_of(ranked / "ranks-test-trained.parquet", "test")
    else:
        ranks_of(ranked, "test")


def test_a_report_names_ranks_of_another_encoder(ranked, tmp_path):
    shutil.copytree(ranked, tmp_path / "baseline")
    methods = {}
    for folder in (tmp_path / "baseline", ranked):
        methods[folder.name] = [ReportedRun(folder, folder.name, 1, {"results": {"test": {}}}, [])]
    (differences, problems) = compare_with("baseline", methods, "test")
    assert len(differences) == 1 and not problems
    (ranked / "model.safetensors").write_text("of another training")
    (differences, problems) = compare_with("baseline", methods, "test")
    assert not differences and "has changed since these ranks were computed" in problems[0]


def test_ranks_outlive_their_encoder_and_name_one_elsewhere(ranked, dataset, tmp_path, capsys):
    measured = tmp_path / "measured"
    measured.mkdir()
    path = measured / "ranks-test-untrained.parquet"
    save_ranks(path, Split.from_pairs(dataset), RANKED, EncoderProfile(), ranked)
    ranks_of(measured, "test", "untrained")
    assert capsys.readouterr().err == ""
    (ranked / "model.safetensors").write_text("of another training")
    ranks_of(measured, "test", "untrained")
    assert f"the encoder in {ranked} has changed since" in capsys.readouterr().err
    for path in ranked.rglob("*"):
        if path.is_file() and path.suffix != ".parquet" and path.name != "run.json":
            path.unlink()
    ranks_of(ranked, "test")
