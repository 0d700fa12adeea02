"""Packed passes give the embeddings and gradients of padded ones, and encoders that cannot be packed are padded."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from refusals import refused
from tiny import T5, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from soft_trainer import losses
from soft_trainer.encoders import encoding
from soft_trainer.encoders.adapters import add_lora
from soft_trainer.encoders.attention import running
from soft_trainer.encoders.encoding import (
    BROADCAST_MASKS,
    Collator,
    batch_slices,
    encode,
    pad,
    padded_width,
    score,
)
from soft_trainer.encoders.packing import PACKED, Passes, encode_packed, first_position, pack
from soft_trainer.encoders.passes import decide_passes
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.static_torch import StaticConfig, StaticModel
from soft_trainer.options.model import ModelArguments

CPU = torch.device("cpu")
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DECODER = SIZE | {"num_key_value_heads": 1, "head_dim": 16}
SLIDING = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
IDS = {
    "vocab_size": 200,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
# name -> configuration class, its settings, pooling
PACKABLE = {
    "bert": ("Bert", SIZE, "cls"),
    "minilm": ("Bert", SIZE | {"num_attention_heads": 4}, "mean"),
    "electra": ("Electra", SIZE | {"embedding_size": 32}, "cls"),
    "albert": ("Albert", SIZE | {"embedding_size": 16}, "mean"),
    "roberta": ("Roberta", SIZE, "cls"),
    "roberta with LoRA": ("Roberta", SIZE, "mean"),
    "xlm-roberta": ("XLMRoberta", SIZE, "mean"),
    "camembert": ("Camembert", SIZE, "cls"),
    "distilbert": ("DistilBert", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}, "mean"),
    "modernbert": ("ModernBert", SIZE | {"local_attention": 8}, "cls"),
    "nomic": ("NomicBert", SIZE, "mean"),
    "gte": ("Gte", SIZE, "cls"),
    "jina v3": ("JinaEmbeddingsV3", SIZE, "mean"),
    "eurobert": ("EuroBert", SIZE, "mean"),
    "qwen3": ("Qwen3", DECODER, "last_token"),
    "qwen3 with a sliding window": ("Qwen3", DECODER | SLIDING, "last_token"),
    "llama": ("Llama", DECODER, "last_token"),
    "gemma3": ("Gemma3Text", DECODER | {"sliding_window": 8}, "mean"),
}
FAST = ("minilm", "roberta", "modernbert", "qwen3 with a sliding window")  # the others are tried with the slow tests
NO_KERNEL = "has no variable-length attention"
PADDED = {
    "mpnet": ("MPNet", SIZE, NO_KERNEL),
    "deberta-v2": ("DebertaV2", SIZE, NO_KERNEL),
    "t5": ("T5", T5, NO_KERNEL),
    "gemma2": ("Gemma2", DECODER, "attn_implementation=eager"),
}


def make_model(kind: str, settings: dict, positions: int = 60):
    return tiny_model(kind, settings | IDS, positions)


def make_profile(pooling: str = "mean", **changes) -> EncoderProfile:
    settings = {"query_length": 20, "code_length": 40, "score_function": "cosine", "score_scale": 20.0}
    return EncoderProfile(pooling=pooling, **settings | changes)


def make_texts() -> list[np.ndarray]:
    """Draws five queries and five codes, of which one has a single token, and together more than the positions.

    Some texts have the token of the padding, as a text with a literal `<pad>`.
    """
    draw = np.random.default_rng(1)
    texts = [draw.integers(0, 200, length) for length in (7, 1, 20, 12, 3, 40, 33, 9, 38, 21)]
    for position, text in enumerate(texts):
        text[position : 2 * position : 2] = IDS["pad_token_id"]
    return texts


def why_padded(model, profile, device=CPU, precision="float32") -> str | None:
    return decide_passes(model, profile, device, precision).why_padded


def loss_and_gradients(model, profile, *chunks):
    """Returns the embeddings, InfoNCE of the first half against the second, and the gradients."""
    model.zero_grad()
    embeddings = torch.cat([encode(model, profile, inputs) for inputs in chunks])
    queries, codes = embeddings.chunk(2)
    loss = losses.info_nce(score(profile, queries, codes))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return embeddings.detach(), loss.detach(), gradients


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in PACKABLE]
)
def test_packed_equals_padded(name):
    kind, settings, pooling = PACKABLE[name]
    model, profile, texts = make_model(kind, settings), make_profile(pooling), make_texts()
    if "LoRA" in name:
        add_lora(model, ModelArguments(lora_r=2, lora_dropout=0.0))
    assert why_padded(model, profile) is None
    expected = loss_and_gradients(model, profile, pad(texts[:5], 1), pad(texts[5:], 1))
    with running(model, packed=True):
        found = loss_and_gradients(model, profile, pack(texts, first=first_position(model)))
    assert len(expected[2]) > 5 and expected[1] > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token", "pooler"])
def test_prompts_that_pooling_skips(pooling):
    model, profile, texts = make_model("Roberta", SIZE), make_profile(pooling), make_texts()
    prompt = 0 if pooling == "pooler" else 9  # some texts are shorter
    expected = encode(model, profile, pad(texts, 1, prompt))
    with running(model, packed=True):
        both = pack(texts, np.repeat([prompt, 0], 5), first_position(model))
        found = encode(model, profile, both)[:5]
        alone = encode(model, profile, pack(texts, prompt, first_position(model)))
    torch.testing.assert_close(found, expected[:5], atol=1e-5, rtol=0)
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token", "pooler"])
@pytest.mark.parametrize("lengths", [(0,), (0, 0, 5), (7, 0), (3, 0, 9, 0)], ids=str)
def test_texts_without_a_token_are_padded(lengths, pooling):
    model, profile = make_model("Roberta", SIZE).eval(), make_profile(pooling)
    texts = [list(range(3, 3 + length)) for length in lengths]
    prompts = np.arange(len(texts))
    expected = torch.cat([encode(model, profile, pad([text], 1, n)) for text, n in zip(texts, prompts, strict=True)])
    with running(model, packed=True):
        found = encode(model, profile, Collator(1, True, first_position(model))(texts, prompts, 40))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token", "pooler"])
def test_weights_in_bfloat16_whose_states_accelerate_makes_float32(pooling):
    model, profile, texts = make_model("Roberta", SIZE), make_profile(pooling, normalize=True), make_texts()
    expected = encode(model, profile, pad(texts, 1))
    wrapped = convert_outputs_to_fp32(model.bfloat16())  # as `Accelerator.prepare` does under autocast
    with running(model, packed=True):
        found = encode_packed(wrapped, model, profile, pack(texts, first=first_position(model)))
    found = torch.nn.functional.normalize(found.float(), dim=-1)
    assert (found * expected).sum(1).min() > 0.99


@pytest.mark.parametrize(
    ("dtype", "precision", "works"),
    [("float16", "bf16", False), ("bfloat16", "fp16", False), ("bfloat16", "bf16", True), ("float16", "no", True)],
)
@pytest.mark.parametrize("packing", ["auto", "false"])
def test_weights_in_another_half_precision_than_the_run_are_refused_on_a_cpu(dtype, precision, works, packing):
    model, profile = make_model("Roberta", SIZE).to(getattr(torch, dtype)), make_profile()
    with contextlib.nullcontext() if works else refused(f"its weights are torch.{dtype}, but this run computes in"):
        assert decide_passes(model, profile, CPU, precision, packing).packed == (packing == "auto")


@pytest.mark.parametrize("name", PADDED)
def test_other_encoders_are_padded_with_the_reason(name):
    kind, settings, reason = PADDED[name]
    assert reason in why_padded(make_model(kind, settings), make_profile())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"profile": make_profile(data_flow_length=8)}, "data flow needs a mask"),
        ({"model": make_model("RoFormer", SIZE)}, "has no variable-length attention"),
        ({"model": make_model("Mistral", DECODER)}, "is not among the models whose packed passes are tested"),
        ({"model": StaticModel(StaticConfig(vocab_size=200, hidden_size=8))}, "a static encoder has no attention"),
        ({"device": torch.device("mps")}, "the device is mps"),
        ({"device": torch.device("cuda"), "precision": "float32"}, "precision float32; packing needs bf16 or fp16"),
        ({"device": torch.device("cuda"), "model": make_model("Bert", SIZE | {"num_attention_heads": 8})}, "size 4"),
        ({"model": make_model("Albert", SIZE), "profile": make_profile("pooler")}, "AlbertModel"),
    ],
)
def test_reasons_to_pad(changes, reason):
    arguments = {"model": make_model("Bert", SIZE), "profile": make_profile(), "device": CPU, "precision": "bf16"}
    assert reason in why_padded(**arguments | changes)


def test_running_sets_the_attention_and_restores_it(tmp_path):
    model = make_model("Roberta", SIZE)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(ZeroDivisionError), running(model, packed=True):
        assert model.config._attn_implementation == PACKED
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with running(model, packed=True):
            pass
        assert model.config._attn_implementation == PACKED
        model.save_pretrained(tmp_path)
        assert "soft_trainer" not in (tmp_path / "config.json").read_text()
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    with running(model, packed=False):
        assert model.config._attn_implementation == "sdpa"


def test_a_packed_pass_with_another_attention_raises():
    with pytest.raises(RuntimeError, match="attn_implementation=sdpa does not keep them apart"):
        encode(make_model("Roberta", SIZE), make_profile(), pack(make_texts()))


def test_the_users_flash_attention_gets_the_borders_and_no_mask():
    given = {}

    def flash(**inputs):
        given.update(inputs)
        return SimpleNamespace(last_hidden_state=torch.ones(1, inputs["input_ids"].shape[1], 4))

    flash.config = SimpleNamespace(_attn_implementation="flash_attention_2")
    inputs = pack([[5, 6], [7]])
    assert encode_packed(flash, flash, make_profile(), inputs).shape == (2, 4)
    assert given.pop("attention_mask") is None
    assert given["cu_seq_lens_q"].tolist() == given["cu_seq_lens_k"].tolist() == [0, 2, 3]
    assert given["max_length_q"] == given["max_length_k"] == 2


@pytest.mark.parametrize("name", ["roberta", "bert", "xlm-roberta", "camembert", "electra", "albert", "distilbert"])
def test_masks_with_four_dimensions_give_the_same_to_the_last_bit(name):
    kind, settings, _ = PACKABLE[name]
    model, inputs = make_model(kind, settings).eval(), pad(make_texts(), 1)
    assert model.config.model_type in BROADCAST_MASKS
    expected = model(**inputs).last_hidden_state
    inputs["attention_mask"] = inputs["attention_mask"].bool()[:, None, None, :]
    assert torch.equal(model(**inputs).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("longest", "limit", "width"),
    [(0, 200, 64), (1, 200, 64), (64, 200, 64), (65, 200, 128), (150, 200, 192), (199, 200, 200)],
)
def test_lengths_on_a_gpu_are_few(longest, limit, width):
    assert padded_width(longest, limit) == width


# ---- What a GPU would wait for, on tensors without data ----


class CountingOperations(TorchDispatchMode):
    """Counts the operations that are not only another view of a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("kind", "settings", "layers"),
    [("Roberta", SIZE, 12), ("ModernBert", SIZE, 12), ("Qwen3", DECODER | SLIDING, 2), ("Llama", DECODER, 2)],
)
def test_a_packed_pass_needs_no_value_on_the_host(kind, settings, layers):
    model = make_model(kind, settings | {"num_hidden_layers": layers}, positions=600).train()
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, 200, length) for length in draw.integers(3, 256, 512)]
    inputs = pack(texts, first=first_position(model))
    inputs = {name: each.to("meta") if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}
    model.to("meta")
    for pooling in ("mean", "cls", "last_token"):
        with running(model, packed=True), CountingOperations() as operations:
            embeddings = encode(model, make_profile(pooling, normalize=True), inputs)
        assert embeddings.shape == (512, 32)
        assert operations.count <= 1000
    with running(model, packed=True):
        encode(model, make_profile(), inputs).sum().backward()


class Wrapper(torch.nn.Module):
    """Stands in for DeepSpeed's wrapper, which has another `config`, or for `torch.compile` around DDP."""

    def __init__(self, module, **own):
        super().__init__()
        self.module = module
        vars(self).update(own)

    def forward(self, **inputs):
        return self.module(**inputs)


@pytest.mark.parametrize("own", [{"config": {"zero_optimization": {}}}, {}], ids=["DeepSpeed", "compiled DDP"])
def test_a_wrapped_encoder_is_unwrapped_to_read_its_configuration(own):
    model = make_model("Roberta", SIZE, positions=600).to("meta")
    inputs = {name: each.to("meta") for name, each in pad(make_texts(), 1).items()}
    assert encode(Wrapper(model, **own), make_profile(), inputs).shape == (10, 32)


# ---- The batches of an evaluation ----


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(
    ("device", "packed", "most"),
    [("cpu", False, 4), ("meta", False, 4 * 40), ("meta", True, 4 * 40)],
    ids=["a number of texts on a CPU", "padded tokens on a GPU", "tokens on a GPU"],
)
def test_batches_of_an_evaluation_have_the_size_of_a_batch_of_longest_texts(
    monkeypatch, device, packed, most, processes
):
    monkeypatch.setattr(encoding, "GPU_TOKENS", 40)
    encoder = SimpleNamespace(
        profile=make_profile(),
        passes=Passes(None if packed else "for the test"),
        model=SimpleNamespace(device=torch.device(device)),
    )
    lengths = np.sort(np.random.default_rng(0).integers(1, 41, 100))[::-1]
    slices = list(batch_slices(encoder, lengths, "code", 4, processes))
    rows = np.concatenate([np.arange(100)[each] for each in slices])
    assert rows.tolist() == list(range(100))
    assert all(each.start % processes == 0 for each in slices)  # all processes get the same number of batches
    for each in slices:
        shares = [lengths[each][rank::processes] for rank in range(processes)]
        if device == "cpu":
            sizes = [len(share) for share in shares]
        elif packed:
            sizes = [sum(lengths[each]) / processes]
        else:
            sizes = [len(share) * 40 for share in shares]
        assert max(sizes) <= most
    if packed:
        assert len(slices) <= 1.3 * lengths.sum() / (most * processes) + 1
