"""Makes tiny encoders with random weights of any family, and lists profiles with which encoders are saved."""

import torch
import transformers

from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
LENGTHS = {"query_length": 10, "code_length": 24}
EXPORTED = {
    "unixcoder": PROFILES["unixcoder"].replace(**LENGTHS),
    "codebert": PROFILES["codebert"].replace(**LENGTHS),
    "mean after the prompt": EncoderProfile(query_prefix="query: ", include_prompt=False, **LENGTHS),
    "cls after the prompt": EncoderProfile(pooling="cls", query_prefix="query: ", include_prompt=False, **LENGTHS),
}


def tiny_model(kind: str, settings: dict, positions: int, **options) -> transformers.PreTrainedModel:
    """Makes a model of a kind such as "Roberta", without dropout. `options` configure the model."""
    limits = {} if kind == "T5" else {"max_position_embeddings": positions}
    config = getattr(transformers, f"{kind}Config")(**limits, **settings)
    for option, value in config.to_dict().items():
        if "dropout" in option and isinstance(value, float):
            setattr(config, option, 0.0)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}EncoderModel" if kind == "T5" else f"{kind}Model")(config, **options)
    # With weights of 0.02, the embeddings of all texts would be nearly equal.
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4) if weight.dim() > 1 else weight.add_(0.1 * torch.randn_like(weight))
    return model


def export(encoder, folder):
    return export_encoder(encoder.model, encoder.tokenizer, encoder.profile, folder)
