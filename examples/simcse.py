# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer"]
# ///
"""Trains a sentence encoder for the SimCSE estimator, with sentence-transformers' trainer.

    python examples/simcse.py ROWS --output_dir OUTPUT_DIR
    soft-trainer train --estimator simcse --estimator_model OUTPUT_DIR ...

ROWS are files or folders of rows, or names on the Hub. The paper trains on the queries of all six languages, which
`recipes/paper/graphcodebert_rows.py` writes: `python examples/simcse.py outputs/paper_rows/* ...`. The encoder reads
the texts that the estimator will read. As in unsupervised SimCSE (Gao et al., 2021), each query is paired with itself:
the encoder reads the query twice, and dropout makes the two embeddings differ. By default, the batch size, the
learning rate and the number of epochs are the same as in the paper's published run.
"""

import argparse
from collections.abc import Sequence

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

from soft_trainer import load_rows
from soft_trainer.data.tokens import row_texts, text_column
from soft_trainer.encoders.profiles import EncoderProfile

TEMPERATURE = 0.07


def query_texts(sources: Sequence[str], language: str | None = None) -> list[str]:
    """Returns the texts of the training queries, each once, as an encoder for rows with these columns reads them."""
    texts = {}
    for source in sources:
        queries = load_rows(source, language=language)["train"].queries
        texts |= dict.fromkeys(row_texts(queries, text_column(queries, EncoderProfile().query_columns, "query")))
    return list(texts)


def main() -> None:
    """Trains an encoder on the queries in the training rows, and saves it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--model", default="sentence-transformers/msmarco-distilbert-dot-v5")
    parser.add_argument("--language", help="a data set's configuration on the Hub")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--max_steps", type=int, default=-1)
    options = parser.parse_args()

    texts = query_texts(options.rows, options.language)
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
