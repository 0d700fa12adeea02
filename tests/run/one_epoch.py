"""Trains an encoder for one epoch in Python, with data workers. Usage: one_epoch.py ENCODER ROWS FOLDER START."""

import sys

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder, load_rows


def main() -> None:
    encoder, rows, folder, start = sys.argv[1:]
    trainer = SoftInfoNCETrainer(
        model=load_encoder(encoder, device="cpu"),
        args=SoftInfoNCETrainingArguments(
            output_dir=folder,
            loss="info_nce",
            num_train_epochs=1,
            learning_rate=1e-2,
            per_device_train_batch_size=2,
            dataloader_num_workers=2,
            dataloader_multiprocessing_context=start,
            use_cpu=True,
        ),
        train_dataset=load_rows(rows)["train"],
    )
    trainer.train(resume_from_checkpoint="last")
    trainer.save_model()
    sys.stdout.write("the script went on\n")


if __name__ == "__main__":
    main()
