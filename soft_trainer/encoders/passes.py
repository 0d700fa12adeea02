"""Decides how an encoder's forward passes run, packed or padded.

A packed pass needs the attention in `attention.py`, which reads the borders between texts. Some encoders cannot use
it, and some accept the borders and ignore them, so only the models that our tests compare are packed.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from soft_trainer.encoders.attention import PACKED
from soft_trainer.encoders.packing import Passes, first_position
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError

HALF = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}
LARGEST_HEAD = 256  # the flash kernel's limit
# The models of `transformers` that `tests/encoders/test_packing.py` compares, by `model_type`.
WITH_POOLER = ("bert", "camembert", "roberta", "xlm-roberta")
PACKABLE = """
    albert distilbert electra eurobert gemma3_text gte jina_embeddings_v3 llama modernbert nomic_bert qwen2 qwen3
""".split()
BF16_UNITS = ("avx512_bf16", "amx_bf16")  # instructions without which a CPU emulates bfloat16


def computes_bf16(device: torch.device) -> bool:
    """Returns True if a device computes in bfloat16 without emulation. Before torch 2.11, no CPU tells."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(unit, False) for unit in BF16_UNITS)
    return False


# ---- Which encoders can be packed ----


def decide_passes(
    model: PreTrainedModel,
    profile: EncoderProfile,
    device: torch.device,
    precision: str,
    packing: object = "auto",
    why_padded: str | None = None,
) -> Passes:
    """Decides how an encoder's forward passes run. Runs once for each encoder, before FSDP wraps the encoder.

    Args:
        device: where the encoder will run.
        precision: the number format of the forward pass, such as "bf16".
        packing: the option, `False` or "false" to pad.
        why_padded: why the run pads its passes whatever the encoder, or None.
    """
    if device.type == "cpu" and precision in HALF and model.dtype in set(HALF.values()) - {HALF[precision]}:
        raise UserError(
            f"model: its weights are {model.dtype}, but this run computes in {precision}; load them in float32"
        )
    if str(packing).lower() == "false":
        why_padded = "packing=false"
    if why_padded is None:
        why_padded = _why_padded(model, profile, device, precision)
    if why_padded is None:
        return Passes(None, precision, first_position(model))
    return Passes(why_padded, precision)


def _why_padded(model: PreTrainedModel, profile: EncoderProfile, device: torch.device, precision: str) -> str | None:
    """Returns why an encoder's passes must be padded, or None if its texts can be packed."""
    config = model.config
    name = type(model).__name__
    implementation = str(config._attn_implementation)
    if device.type not in ("cuda", "cpu"):
        return f"the device is {device.type}"
    if hasattr(model, "weigh"):
        return "a static encoder has no attention"
    if profile.data_flow_length:
        return "data flow needs a mask"
    if not (model.is_backend_compatible() and model._supports_flash_attn):
        return f"{name} has no variable-length attention"
    if implementation not in ("sdpa", PACKED) and "flash" not in implementation:
        return f"attn_implementation={implementation}"
    if device.type == "cuda":
        if precision not in HALF:
            return f"precision {precision}; packing needs bf16 or fp16"
        if "flash" not in implementation and (reason := _kernel_error(config, device)):
            return reason
    known = WITH_POOLER if profile.pooling == "pooler" else (*WITH_POOLER, *PACKABLE)
    if config.model_type not in known or not type(model).__module__.startswith("transformers.models."):
        return f"{name} is not among the models whose packed passes are tested"
    return None


def _kernel_error(config, device: torch.device) -> str | None:
    """Runs torch's flash kernel once, forward and backward. Returns why it does not work on this device, or None."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_size % 8 or head_size > LARGEST_HEAD:
        return f"attention heads of size {head_size}; packing needs a multiple of 8, at most {LARGEST_HEAD}"
    borders = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    tokens = torch.ones(8, 1, head_size, dtype=torch.float16, device=device, requires_grad=True)
    options = {"scale": 1.0, "window_size_left": None, "window_size_right": None}
    try:
        with torch.enable_grad():
            outputs = torch.ops.aten._flash_attention_forward(
                tokens, tokens, tokens, borders, borders, 5, 5, 0.1, False, False, **options
            )
            outputs[0].sum().backward()
    except (RuntimeError, TypeError) as error:
        return f"torch's flash kernel does not run here: {str(error).splitlines()[0]}"
    return None
