"""Decides how an encoder's forward passes run, packed or padded, and prepares the encoder for them.

A packed pass needs an attention function that reads the borders between texts. Ours calls torch's variable-length
flash kernel on a GPU, and loops over the texts on a CPU, which is slow and meant for tests. It is registered with
`transformers` under the name `PACKED`, and computes padded passes as "sdpa" does.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from soft_trainer.encoders.encoding import encode, pad
from soft_trainer.encoders.packing import PACKED, first_position, pack
from soft_trainer.encoders.profiles import EncoderProfile

HALF = ("bf16", "fp16", "bfloat16", "float16")  # precisions of the flash kernel
LARGEST_HEAD = 256  # the flash kernel's limit
LARGEST_COMPARED = 1_000_000_000  # parameters; a larger model would take minutes on a CPU
COMPARED_TOKENS = 1024  # enough to exceed the positions of most models that learn them
TOLERANCE = 1e-3  # relative; rounding causes 1e-5, and an encoder that ignores borders 0.1 or more
UNREADABLE = ("softcap", "position_bias", "s_aux")  # arguments of attention that the flash kernel does not have


# ---- Attention ----


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Computes attention within each text if `cu_seq_lens_q` has the borders between texts, otherwise as "sdpa".

    Args:
        query, key, value: Tensor[1, heads, T, d]. There may be fewer heads of keys and values.

    Returns:
        Tensor[1, T, heads, d], and no attention weights.

    Raises:
        ValueError: the model's attention has a term that the kernel cannot compute.
    """
    borders = kwargs.get("cu_seq_lens_q")
    if borders is None:
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options, **kwargs)
    for name in UNREADABLE:
        if kwargs.get(name) is not None:
            raise ValueError(f"its attention has {name}")
    causal = module.is_causal if is_causal is None else is_causal
    window = kwargs.get("sliding_window")
    if window is not None:
        window -= 1  # `transformers` counts the token itself
    # Rotary embeddings make queries and keys float32 under autocast. The values come from a linear layer.
    query, key, value = (each.transpose(1, 2).squeeze(0).to(value.dtype) for each in (query, key, value))
    if query.device.type == "cpu":
        outputs = _attend_by_text(query, key, value, borders.tolist(), dropout, scaling, causal, window)
    else:
        longest = kwargs["max_length_q"]
        outputs = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            borders,
            borders,
            longest,
            longest,
            dropout,
            causal,
            False,
            scale=scaling,
            window_size_left=window,
            window_size_right=0 if causal else window,
        )[0]
    return outputs[None], None


def _attend_by_text(query, key, value, borders, dropout, scaling, causal, window) -> Tensor:
    """Computes attention for one text after the other. All tensors are Tensor[T, heads, d]."""
    outputs = []
    for start, end in zip(borders, borders[1:], strict=False):
        place = torch.arange(end - start)
        apart = place[:, None] - place
        seen = apart.abs() <= (end if window is None else window)
        if causal:
            seen &= apart >= 0
        one = [each[start:end].transpose(0, 1)[None] for each in (query, key, value)]
        attended = F.scaled_dot_product_attention(*one, seen, dropout, scale=scaling, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


AttentionInterface.register(PACKED, attend)
AttentionMaskInterface.register(PACKED, sdpa_mask)  # for padded passes


@contextlib.contextmanager
def running(model: PreTrainedModel, packed: bool) -> Iterator[None]:
    """Prepares a model for our forward and backward passes inside the `with` block, and restores it afterwards.

    The block must contain a forward pass together with its backward pass, which may run parts of the forward pass
    again. Blocks may be nested.
    """
    before = model.config._attn_implementation
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    if packed and "flash" not in before and before != PACKED:
        model.set_attn_implementation(PACKED)
    # On Hopper, cuDNN's attention builds a plan for each new shape, which takes 0.1 s and more.
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


# ---- Which encoders can be packed ----


def why_padded(
    model: PreTrainedModel, profile: EncoderProfile, device: torch.device, precision: str, on_cpu: bool = False
) -> str | None:
    """Returns why an encoder's passes must be padded, or None if texts can be packed.

    Args:
        device: where the encoder will run.
        precision: the number format of the forward pass, such as "bf16".
        on_cpu: True to pack on a CPU too, in any precision.
    """
    config = model.config
    name = type(model).__name__
    attention = str(config._attn_implementation)
    if device.type != "cuda" and not (on_cpu and device.type == "cpu"):
        return f"the device is {device.type}"
    if getattr(model, "takes_means", False):
        return "a static encoder has no attention"
    if profile.data_flow_length:
        return "data flow needs a mask"
    if not (model.is_backend_compatible() and model._supports_flash_attn):
        return f"{name} has no variable-length attention"
    if attention not in ("sdpa", PACKED) and "flash" not in attention:
        return f"attn_implementation={attention}"
    if device.type == "cuda":
        if precision not in HALF:
            return f"precision {precision}; packing needs bf16 or fp16"
        if "flash" not in attention and (reason := _kernel_error(_head_size(config), device)):
            return reason
    return difference(model, profile)


def _head_size(config) -> int:
    """Returns the size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _kernel_error(head_size: int, device: torch.device) -> str | None:
    """Runs torch's flash kernel once, forward and backward. Returns why it does not work on this device, or None."""
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
    # A copy in float32 without hooks, gradients or a second copy on the device.
    copied = {id(each): nn.Parameter(_in_float32(each), requires_grad=False) for each in model.parameters()}
    copied |= {id(each): _in_float32(each) for each in model.buffers()}
    twin = copy.deepcopy(model, copied).eval()
    if "flash" in twin.config._attn_implementation:
        twin.set_attn_implementation("sdpa")
    items = _texts(twin.config, profile)
    packed = pack(items, first=first_position(twin))
    padded = pad(items, getattr(twin.config, "pad_token_id", None) or 0)
    name = type(model).__name__
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            expected = encode(twin, profile, padded)  # quantized weights and some kernels do not run on a CPU
            twin.set_attn_implementation(PACKED)
            found = encode(twin, profile, packed)
        except Exception as error:  # whatever it is, padded passes work
            return f"{name} cannot be packed: {(str(error) or type(error).__name__).splitlines()[0]}"
    if found.shape == expected.shape and (found - expected).norm() <= TOLERANCE * expected.norm():
        return None
    return f"{name} gives other embeddings when packed"


def _in_float32(part: Tensor) -> Tensor:
    """Copies a parameter or buffer to the CPU, in float32 unless it holds integers or float64."""
    part = part.detach().cpu()
    if part.is_floating_point():
        return part.to(torch.promote_types(part.dtype, torch.float32))
    return part


def _texts(config, profile: EncoderProfile) -> list[np.ndarray]:
    """Returns random token ids: texts of the profile's lengths that have more tokens than the model has positions."""
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "cls", "sep")}
    words = np.setdiff1d(np.arange(config.vocab_size), [each for each in special if isinstance(each, int)])
    tokens = min(getattr(config, "max_position_embeddings", None) or COMPARED_TOKENS, COMPARED_TOKENS)
    draw = np.random.default_rng(0)
    texts = []
    lengths = itertools.cycle((profile.query_length // 2, profile.code_length, profile.query_length))
    while len(texts) < 3 or sum(map(len, texts)) <= tokens:
        texts.append(draw.choice(words, next(lengths)))
    return texts
