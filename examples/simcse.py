# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer"]
# ///
"""Trains a sentence encoder for the SimCSE estimator, with sentence-transformers' trainer.

    python examples/simcse.py ROWS OUTPUT_DIR
    soft-trainer train --estimator simcse --estimator_model OUTPUT_DIR ...

ROWS is a file or folder of rows, several of these, separated by commas, or a data set's name on the Hub. The paper
trains on the queries of all six languages: `code-search-net/code_search_net` with `--language all --filters
graphcodebert`. The encoder reads the texts that the estimator will read. As in unsupervised SimCSE (Gao et al., 2021),
each query is paired with itself: the encoder reads the query twice, and dropout makes the two embeddings differ. By
default, the batch size, the learning rate and the number of epochs are the same as in the paper's published run.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

from soft_trainer.data.tokens import row_texts, text_column
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.rows import load_data

TEMPERATURE = 0.07


def query_texts(rows: str, language: str | None = None, filters: str | None = None) -> list[str]:
    """Returns the texts of the training queries, each once, as an encoder for rows with these columns reads them."""
    here = all(Path(source).exists() for source in rows.split(","))
    source = {"data_dir": rows} if here else {"dataset_name": rows}
    profile = EncoderProfile()
    queries = load_data(DataArguments(language=language, filters=filters, **source), profile)["train"].queries
    return list(dict.fromkeys(row_texts(queries, text_column(queries, profile.query_columns, "query"))))


def main() -> None:
    """Trains an encoder on the queries in the training rows, and saves it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("output_dir")
    parser.add_argument("--model", default="sentence-transformers/msmarco-distilbert-dot-v5")
    parser.add_argument("--language", help="a data set's configuration on the Hub")
    parser.add_argument("--filters", help="drops rows by these rules, as the option of `soft-trainer train` does")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--max_steps", type=int, default=-1)
    options = parser.parse_args()

    texts = query_texts(options.rows, options.language, options.filters)
    model = SentenceTransformer(options.model)
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            options.output_dir,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            num_train_epochs=options.epochs,
            max_steps=options.max_steps,
            dataloader_drop_last=True,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"anchor": texts, "positive": texts}),
        loss=MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE),
    )
    trainer.train()
    model.save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
