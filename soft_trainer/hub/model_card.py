"""The model card of a run, written from the run's own record, so that nothing in it can disagree with the run.

The record is a dict that JSON can hold:

    model_id        "USER/NAME" on the Hub, or None: the snippets then name the folder
    revision        the branch that is pushed to, or None
    base_model      Hub name or folder of the encoder that was fine-tuned, or None: random weights
    dataset         name on the Hub, or any other name for the rows
    languages       list of programming languages
    loss            a table {name: value}: loss, estimator, alpha, beta, temperature, floor ...
    training        a table {name: value}: batch per process, processes, N, precision, epochs, seed ...
    results         {split: {"untrained" | "lexical" | "trained": metrics}}, of `evaluation.ranking.retrieval_metrics`
    statistics      of `data.statistics.data_statistics`
    environment     a table {name: version}, of `environment()`

Entries of a table that are None are left out of it, sections without content too. How texts become embeddings is read
from the folder's own profile.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from soft_trainer.data.statistics import statistics_table
from soft_trainer.encoders.loading import repository_file
from soft_trainer.encoders.profiles import PROFILE_FILE, EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.results import metrics_table
from soft_trainer.hub.push import named

logger = logging.getLogger(__name__)

PACKAGES = ("soft_trainer", "torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub")
_QUERIES = '["read a file line by line"]'
_CODES = '["def lines(path): return open(path).readlines()", "def add(a, b): return a + b"]'
_METRIC_NAMES = {"mrr": "MRR"} | {f"recall@{k}": f"Recall@{k}" for k in (1, 5, 10)} | {"ndcg@10": "nDCG@10"}
_RESULTS = (
    "Each query looks for its own function among all codes of the pool; where several are relevant, the first one "
    "found counts.\n\n"
)
_POOLING = {
    "mean": (
        'mask = inputs["attention_mask"].unsqueeze(-1)',
        "embeddings = (outputs.last_hidden_state * mask).sum(1) / mask.sum(1)",
    ),
    "cls": ("embeddings = outputs.last_hidden_state[:, 0]",),
    "pooler": ("embeddings = outputs.pooler_output",),
}


def environment() -> dict[str, str]:
    """Versions of Python and of the installed packages that a result depends on."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def write_model_card(folder: str | Path, record: Mapping) -> Path | None:
    """Write `README.md` into an exported `folder`.

    Returns:
        Its path, or None where it could not be written: a run is not lost for its card, so that is only a warning.
    """
    path = Path(folder) / "README.md"
    try:
        aside = path.with_suffix(".tmp")
        aside.write_text(str(model_card(folder, record)), encoding="utf-8")
        aside.replace(path)
    except Exception as error:  # whatever it is, the trained model matters more
        logger.warning("No model card in %s: %s: %s", folder, type(error).__name__, error)
        return None
    return path


def model_card(folder: str | Path, record: Mapping) -> ModelCard:
    """The card of the encoder in `folder`: a header that the Hub reads, and a body for people."""
    profile = EncoderProfile.load(Path(folder) / PROFILE_FILE)
    name = record["model_id"] or str(folder)
    results, statistics = record["results"], record["statistics"]
    sections = {
        "Use": use(named(name, record.get("revision") if record["model_id"] else None), profile, Path(folder)),
        "Results": any(results.values()) and _RESULTS + metrics_table(results),
        "Training": _settings({**record["loss"], **record["training"]}),
        "Data": statistics and statistics_table(statistics),
        "Environment": ", ".join(f"{package} {version}" for package, version in record["environment"].items()),
        "Citation": _CITATION,
    }
    body = "\n\n".join(f"## {title}\n\n{text.strip()}" for title, text in sections.items() if text)
    header = card_data(record, name).to_yaml()
    return ModelCard(f"---\n{header}\n---\n\n# {name.rsplit('/', 1)[-1]}\n\n{_introduction(record)}\n\n{body}\n")


def card_data(record: Mapping, name: str) -> ModelCardData:
    """The YAML header: names that are not on the Hub stay out of it, since the Hub links them."""
    base, dataset = _hub_name(record["base_model"]), _hub_name(record["dataset"])
    return ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        language=["code"],
        license=_license(record["base_model"]),
        base_model=base,
        datasets=[dataset] if dataset else None,
        tags=["sentence-transformers", "feature-extraction", "code-search", "soft-infonce", *record["languages"]],
        model_name=name.rsplit("/", 1)[-1],
        eval_results=_eval_results(record) or None,
    )


def use(name: str, profile: EncoderProfile, folder: Path) -> str:
    """How to use the encoder that the arguments `name` load: three snippets that run as printed, and what is cut."""
    length = max(profile.query_length, profile.code_length)
    cuts = (
        f"Queries are cut to {profile.query_length} tokens and codes to {profile.code_length}, special tokens "
        f"included; in sentence-transformers (6.2 or later) `encode_query` and `encode_document` do so, the plain "
        f"`encode` cuts everything to {length} and puts no prefix before it."
    )
    if profile.data_flow_length:
        cuts += (
            f" Codes were read with up to {profile.data_flow_length} nodes of their data flow, which only "
            "`soft_trainer` extracts: code embeddings from the other two differ and find less."
        )
    if profile.code_columns[0].endswith("_tokens"):
        cuts += " Rows with token columns were read as their tokens joined by single spaces."
    snippets = (_soft_trainer(name, profile), _sentence_transformers(name), _transformers(name, profile, folder))
    return "\n\n".join([*(f"```python\n{snippet.strip()}\n```" for snippet in snippets), cuts])


def _soft_trainer(name: str, profile: EncoderProfile) -> str:
    language = ', language="python"' if profile.data_flow_length else ""
    return f"""
from soft_trainer import load_encoder

encoder = load_encoder({name})
queries = encoder.encode_queries({_QUERIES})
codes = encoder.encode_codes({_CODES}{language})
print(encoder.score(queries, codes))
"""


def _sentence_transformers(name: str) -> str:
    return f"""
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({name})
queries = model.encode_query({_QUERIES})
codes = model.encode_document({_CODES})
print(model.similarity(queries, codes))
"""


def _transformers(name: str, profile: EncoderProfile, folder: Path) -> str:
    arguments = json.loads((folder / "sentence_bert_config.json").read_text()).get("model_args", {})
    options = "".join(f", {key}={value}" for key, value in arguments.items())
    pooling = "\n    ".join(_POOLING[profile.pooling])
    unit = profile.normalize or profile.score_function == "cosine"
    result = "torch.nn.functional.normalize(embeddings, dim=-1)" if unit else "embeddings"
    return f"""
import torch
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name})
model = AutoModel.from_pretrained({name}{options})


def encode(texts, prefix, length):
    texts = [prefix + text for text in texts]
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**inputs)
    {pooling}
    return {result}


queries = encode({_QUERIES}, {json.dumps(profile.query_prefix)}, {profile.query_length})
codes = encode({_CODES}, {json.dumps(profile.code_prefix)}, {profile.code_length})
print(queries @ codes.T)
"""


def _introduction(record: Mapping) -> str:
    base = record["base_model"]
    start = f"`{_hub_name(base) or Path(base).name}`" if base else "A small encoder with random weights"
    return (
        f"Finds functions ({', '.join(record['languages'])}) for queries in natural language. {start}, fine-tuned on "
        f"`{record['dataset']}` with `{record['loss']['loss']}` by `soft_trainer`."
    )


def _settings(values: Mapping) -> str:
    """A list of the values that are set."""
    texts = {key: f"{value:g}" if isinstance(value, float) else value for key, value in values.items()}
    return "\n".join(f"- {key}: {text}" for key, text in texts.items() if text is not None)


def _eval_results(record: Mapping) -> list[EvalResult]:
    """MRR and Recall of the trained encoder, with the size of the pool in the metric's name."""
    languages = record["languages"]
    own_splits = {f"{split}{part}" for split in ("valid", "test") for part in ("", *(f"-{n}" for n in languages))}
    own = {
        "dataset_type": _hub_name(record["dataset"]) or "code-search",
        "dataset_name": f"{record['dataset']} ({','.join(languages)})",
        "dataset_config": ",".join(languages),
    }
    return [
        EvalResult(
            task_type="text-retrieval",
            task_name="Code search",
            # What is neither split is a set of --eval_data_dir, under its own name.
            **(own if split in own_splits else {"dataset_type": split, "dataset_name": split}),
            dataset_split=split,
            metric_type=metric,
            metric_name=f"{_METRIC_NAMES[metric]} over {int(found['pool_size']):,} codes",
            metric_value=round(found[metric], 4),
        )
        for split, systems in record["results"].items()
        if (found := systems.get("trained"))
        for metric in _METRIC_NAMES
        if metric in found
    ]


def _hub_name(name: str | None) -> str | None:
    """`name` where it can be one of the Hub: not a folder here, not a path."""
    return name if name and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None


def _license(base_model: str | None) -> str | None:
    """The licence in the card of the base model, None where there is none or it cannot be read."""
    try:
        card = repository_file(base_model, "README.md") if base_model else None
        return ModelCard.load(card).data.license if card else None
    except (UserError, ValueError):
        return None


_CITATION = """
```bibtex
@inproceedings{li-etal-2023-rethinking,
  title = {Rethinking Negative Pairs in Code Search},
  author = {Li, Haochen and Zhou, Xin and Tuan, Luu Anh and Miao, Chunyan},
  booktitle = {Proceedings of the 2023 Conference on Empirical Methods in Natural Language Processing},
  year = {2023}
}
```
"""
