"""Decides how an encoder's forward passes run, packed or padded.

A packed pass needs the attention in `attention.py`, which reads the borders between texts. Some encoders cannot use
it, and some accept the borders and ignore them, so packed embeddings are compared with padded ones first.
"""

from __future__ import annotations

import copy
import itertools

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from soft_trainer.encoders.attention import PACKED, running
from soft_trainer.encoders.encoding import encode, moved, pad
from soft_trainer.encoders.packing import Passes, first_position, pack
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError

HALF = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}
LARGEST_HEAD = 256  # the flash kernel's limit
LARGEST_COMPARED = 1_000_000_000  # parameters; a larger model would take minutes on a CPU
COMPARED_TOKENS = 1024  # enough to exceed the positions of most models that learn them
TOLERANCE = 1e-3  # relative; rounding causes 1e-5, and an encoder that ignores borders 0.1 or more
TOLERANCE_IN_HALF = 0.02  # the same in half precision, where rounding causes 0.005
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
    if getattr(model, "takes_means", False):
        return "a static encoder has no attention"
    if profile.data_flow_length and device.type == "cuda":
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
    return difference(model, profile) or difference_on(device, model, profile, precision)


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


def difference(model: PreTrainedModel, profile: EncoderProfile) -> str | None:
    """Compares packed with padded embeddings on the CPU in float32. Returns a sentence if they differ, or None.

    Some models accept the borders between texts and ignore them. The texts have the profile's lengths, and more
    tokens together than the model has positions. A model with over a billion parameters is not compared.
    """
    if model.num_parameters() > LARGEST_COMPARED:
        return None
    name = type(model).__name__
    # A copy in float32 without hooks, gradients or a second copy on the device.
    copied = {id(each): nn.Parameter(_in_float32(each), requires_grad=False) for each in model.parameters()}
    copied |= {id(each): _in_float32(each) for each in model.buffers()}
    twin = copy.deepcopy(model, copied).eval()
    if "flash" in twin.config._attn_implementation:
        twin.set_attn_implementation("sdpa")
    items = _texts(twin.config, profile)
    with torch.autocast("cpu", enabled=False):
        try:
            differs = _differs(twin, profile, items, TOLERANCE)
        except Exception as error:  # quantized weights, for example, do not run on a CPU; padded passes work
            return f"{name} cannot be packed: {(str(error) or type(error).__name__).splitlines()[0]}"
    return f"{name} gives other embeddings when packed" if differs else None


def difference_on(device: torch.device, model: PreTrainedModel, profile: EncoderProfile, precision: str) -> str | None:
    """Compares packed with padded embeddings of a few texts on a GPU in half precision, where the kernel is another.

    Returns a sentence if they differ, or None. On a CPU, `difference` has compared them.
    """
    if device.type != "cuda" or model.device.type != "cuda":
        return None
    items = _texts(model.config, profile)[:4]
    training = model.training
    model.eval()
    try:
        with torch.autocast("cuda", HALF[precision]):
            differs = _differs(model, profile, items, TOLERANCE_IN_HALF)
    finally:
        model.train(training)
    return f"{type(model).__name__} gives other embeddings when packed on {device.type}" if differs else None


@torch.no_grad()
def _differs(model: PreTrainedModel, profile: EncoderProfile, items: list, tolerance: float) -> bool:
    """Returns True if packed and padded embeddings of the same texts differ by more than a relative tolerance."""
    padding = getattr(model.config, "pad_token_id", None) or 0
    with running(model, packed=False):
        expected = encode(model, profile, moved(pad(items, padding), model.device))
    with running(model, packed=True):
        found = encode(model, profile, moved(pack(items, first=first_position(model)), model.device))
    return found.shape != expected.shape or not (found - expected).norm() <= tolerance * expected.norm()


def _in_float32(part: Tensor) -> Tensor:
    """Copies a parameter or buffer to the CPU, in float32 unless it holds integers or float64."""
    part = part.detach().cpu()
    if part.is_floating_point():
        return part.to(torch.promote_types(part.dtype, torch.float32))
    return part


def _texts(config, profile: EncoderProfile) -> list:
    """Returns random token ids: texts of the profile's lengths that have more tokens than the model has positions.

    With data flow, each text ends with two nodes.
    """
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "cls", "sep")}
    special = [each for each in special if isinstance(each, int) and each < config.vocab_size]
    tokens = min(getattr(config, "max_position_embeddings", None) or COMPARED_TOKENS, COMPARED_TOKENS)
    draw = np.random.default_rng(0)
    texts = []
    lengths = itertools.cycle((profile.query_length // 2, profile.code_length, profile.query_length))
    while len(texts) < 3 or sum(map(len, texts)) <= tokens:
        ids = draw.integers(config.vocab_size, size=next(lengths))
        ids[1 : 1 + len(special)] = special[: len(ids) - 1]  # RoBERTa, for example, counts no position for padding
        texts.append(ids)
    if not profile.data_flow_length:
        return texts
    # See `graph_features`: the last two ids are nodes of the first two tokens.
    first = config.pad_token_id + 1
    graph = {"node_starts": [0, 1], "node_ends": [1, 2], "edge_targets": [1], "edge_sources": [0]}
    return [{"input_ids": ids, "position_ids": [*range(first, first + len(ids) - 2), 0, 0]} | graph for ids in texts]
