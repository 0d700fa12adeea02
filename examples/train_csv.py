# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer"]
# ///
"""Fine-tunes an encoder on a CSV file with any column names, and answers a question with the encoder.

python examples/train_csv.py pairs.csv outputs/csv --query_column question --code_column answer
"""

import argparse
import sys

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder, load_rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("csv")
parser.add_argument("output_dir")
parser.add_argument("--query_column", default="question")
parser.add_argument("--code_column", default="answer")
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
parser.add_argument("--epochs", type=float, default=1)
options = parser.parse_args()

rows = load_rows(options.csv, query_column=options.query_column, code_column=options.code_column)
trainer = SoftInfoNCETrainer(
    model=options.model,
    args=SoftInfoNCETrainingArguments(options.output_dir, num_train_epochs=options.epochs),
    train_dataset=rows["train"],
    eval_dataset=rows["test"],
)
before = trainer.evaluate()["eval_mrr"]
trainer.train()
trainer.save_model()
sys.stdout.write(f"MRR {before:.3f} before training, {trainer.evaluate()['eval_mrr']:.3f} after\n")

encoder = load_encoder(options.output_dir)
answers = rows["test"].corpus["code"]
question = rows["test"].queries[0]["docstring"]
scores = encoder.score(encoder.encode_queries([question]), encoder.encode_codes(answers))
sys.stdout.write(f"{question}\n{answers[int(scores[0].argmax())]}\n")
