"""Writes a run's model card from the run's record, so that card and record always agree.

The record is a dict that can be written as JSON:

    model_id        "USER/NAME" on the Hub, for the title, or None to use the folder's name
    base_model      the name of the encoder before training, or None for random weights
    license         the license of that encoder, or None
    dataset         the name on the Hub, or another name for the rows
    languages       a list of programming languages
    loss            a table {name: value}: loss, estimator, alpha, beta, temperature, floor ...
    training        a table {name: value}: batch per process, processes, N, precision, epochs, seed ...
    results         {split: {"untrained" | "lexical" | "trained": metrics}} from `evaluation.ranking.retrieval_metrics`
    chosen_on       the splits on which evaluations chose the weights
    statistics      the result of `data.statistics.data_statistics`
    environment     a table {name: version}, the result of `fingerprints.environment`

The card omits settings that are None and empty sections. The encoder's profile is read from the encoder's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from soft_trainer.data.statistics import statistics_table
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.static_numpy import NO_LENGTH, is_static_config
from soft_trainer.evaluation.results import GRADED, metrics_table
from soft_trainer.evaluation.retrieval import shorter_titles
from soft_trainer.hub.files import base_of, published_name, repository_file
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.spec import option_specs
from soft_trainer.system.files import (
    ADAPTER_CONFIG,
    CARD,
    MERGED_ADAPTER,
    PROFILE_FILE,
    TRAINING_PICTURE,
    UNMERGED,
    keep_edited_card,
    read_json,
    signed,
    write_text,
)
from soft_trainer.system.terminal import table

_METRIC_NAMES = {"mrr": "MRR"} | {f"recall@{k}": f"Recall@{k}" for k in (1, 5, 10)} | GRADED
_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")


def write_model_card(folder: str | Path, record: Mapping) -> Path:
    """Writes the model card, `README.md`, to an encoder's folder, and returns its path. See `keep_edited_card`."""
    path = Path(folder) / CARD
    card = signed(str(model_card(folder, record)))
    keep_edited_card(folder)
    write_text(path, card)
    return path


def model_card(folder: str | Path, record: Mapping) -> ModelCard:
    """Returns the card for the encoder in `folder`: a header for the Hub, followed by text."""
    folder = Path(folder)
    results = record["results"]
    profile = EncoderProfile.load(folder / PROFILE_FILE)
    name = record["model_id"] or str(folder)
    title = name.rsplit("/", 1)[-1]
    is_code = bool(record["languages"])  # otherwise, the rows may be questions and answers
    thing = "function" if is_code else "document"
    tags = ["sentence-transformers", "feature-extraction", *["code-search"] * is_code, "soft-infonce"]
    adapter = None
    if (folder / ADAPTER_CONFIG).is_file():
        adapter = "adapter"
        tags += ["peft", "lora"]
    elif (folder / MERGED_ADAPTER / ADAPTER_CONFIG).is_file():
        adapter = "merged"
        tags.append("lora")
    if profile.matryoshka_dims:
        tags.append("matryoshka")
    # Local folders are not in the header, because the Hub turns names into links.
    on_hub = {}
    if base := _hub_name(record["base_model"]):
        on_hub = {"base_model": base, "base_model_relation": "adapter" if adapter == "adapter" else "finetune"}
    if dataset := _hub_name(record["dataset"]):
        on_hub["datasets"] = [dataset]
    header = ModelCardData(
        license=record.get("license"),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        language=["code"] if is_code else None,
        tags=[*tags, *record["languages"]],
        model_name=title,
        eval_results=_eval_results(record) or None,
        **on_hub,
    )
    encoder_name, encoder_revision = base_of(folder)  # an adapter's base, or the folder
    path = repository_file(encoder_name, "config.json", encoder_revision)
    config = read_json(path) if path else {}
    with_code = "auto_map" in config
    static = is_static_config(config)
    settings = []
    for label, value in {**record["loss"], **record["training"]}.items():
        if value is not None:
            settings.append((label, f"{value:g}" if isinstance(value, float) else str(value)))
    statistics = record["statistics"] or {}
    return ModelCard.from_template(
        header,
        template_path=str(_TEMPLATE),
        record=record,
        thing=thing,
        things=f"{thing}s",
        profile=profile,
        no_length=NO_LENGTH,
        adapter=adapter,
        title=title,
        base=record["base_model"] and _shown_name(record["base_model"]),
        unmerged=UNMERGED,
        shown_name=_shown_name,
        folder=f'"{folder}"',
        load_arguments=f'"{folder}"' + ", trust_remote_code=True" * with_code,
        with_code=with_code,
        encoder_alone=config.get("architectures", [""])[0].endswith("EncoderModel"),
        model_arguments={} if static else read_json(folder / "sentence_bert_config.json").get("model_args", {}),
        query_prefix=json.dumps(profile.query_prefix),
        code_prefix=json.dumps(profile.code_prefix),
        results=metrics_table(results, chosen_on=record.get("chosen_on", ())) if any(results.values()) else None,
        settings=_text_table(("setting", "value"), settings),
        pairs=statistics.get("train", {}).get("rows"),
        picture=TRAINING_PICTURE if (folder / TRAINING_PICTURE).is_file() else None,
        static=static,
        statistics=statistics and statistics_table(statistics, complete=False),
    )


def _text_table(headers: tuple[str, str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table of text, or "" without rows. Markdown would interpret `|` and `<` in cells."""
    cells = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return table(headers, cells, text=headers) if rows else ""


def license_of(encoder: str | None) -> str | None:
    """Returns the license on the card of an encoder (a folder or a Hub name), or None if no license is found."""
    if not encoder:
        return None
    with suppress(ValueError):  # the card cannot be read
        card = repository_file(encoder, "README.md")
        return card and ModelCard.load(card).data.license
    return None


def _eval_results(record: Mapping) -> list[EvalResult]:
    """Returns the trained encoder's metrics for the card's header, with names such as "MRR over 1,000 functions"."""
    dataset = record["dataset"]
    languages = ",".join(record["languages"])
    own = {
        "dataset_type": _hub_name(dataset) or "code-search",
        "dataset_name": f"{dataset} ({languages})" if languages else dataset,
        "dataset_config": languages,
    }
    if chosen_rows(record):
        own = {"dataset_type": "code-search", "dataset_name": f"some rows of {own['dataset_name']}"}
    things = "functions" if languages else "documents"
    results = []
    for split, systems in record["results"].items():
        trained = systems.get("trained", {})
        part, _, language = split.partition("-")
        named = own
        if not dataset or part not in ("valid", "test") or language not in ("", *record["languages"]):
            named = {"dataset_type": split, "dataset_name": split}  # a user's set
        for metric, title in (_METRIC_NAMES | shorter_titles(trained)).items():
            if metric in trained:
                result = EvalResult(
                    task_type="text-retrieval",
                    task_name="Code search" if languages else "Retrieval",
                    dataset_split=split,
                    metric_type=metric,
                    metric_name=f"{title} over {int(trained['pool_size']):,} {things}",
                    metric_value=round(trained[metric], 4),
                    **named,
                )
                results.append(result)
    return results


def chosen_rows(record: Mapping) -> bool:
    """Returns True if an option such as `split_urls` dropped rows, so the results do not cover the whole data set."""
    options = record.get("options") or {}
    if options.get("dataset_name") != record["dataset"]:
        return False  # the rows are the user's, and they are pushed as they were used
    declared = option_specs(DataArguments).items()
    return any(each.chooses_rows and options.get(name) for name, each in declared)


def _hub_name(name: str | None) -> str | None:
    """Returns the name of an encoder or data set if it is on the Hub, or None for a local folder."""
    name = published_name(name or "")
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None


def _shown_name(name: str) -> str:
    """Returns an encoder's name for the card, in backquotes: its Hub name, or the last part of its path."""
    return f"`{_hub_name(name) or Path(name).name}`"
