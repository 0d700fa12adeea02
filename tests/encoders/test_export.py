import json
import resource

import pytest
import torch
from tiny import EXPORTED, LENGTHS, export
from transformers import AutoModel, AutoTokenizer

from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.system.files import PROFILE_FILE

EXPORTED = EXPORTED | {
    "one length": EncoderProfile(query_length=16, code_length=16),
    "cls": EncoderProfile(pooling="cls", query_prefix="query: ", score_function="cosine", **LENGTHS),
    "normalised": EncoderProfile(normalize=True, score_scale=20.0, **LENGTHS),
    "normalised pooler": EncoderProfile(pooling="pooler", normalize=True, score_function="cosine", **LENGTHS),
}
TEXTS = ["  two spaces first", "def f(x):\n    return x", "much too long " * 30, "a </s> inside", ""]


@pytest.mark.parametrize("profile", EXPORTED.values(), ids=EXPORTED.keys())
def test_a_folder_gives_the_same_back_and_sentence_transformer_our_ids_and_embeddings(profile, encoder_of, tmp_path):
    from sentence_transformers import SentenceTransformer

    ours = encoder_of(profile)
    theirs = SentenceTransformer(str(export(ours, tmp_path)), device="cpu")
    queries, codes = ours.encode_queries(TEXTS), ours.encode_codes(TEXTS)
    loaded = load_encoder(tmp_path, device="cpu")
    assert loaded.profile == profile
    assert torch.equal(loaded.encode_queries(TEXTS), queries) and torch.equal(loaded.encode_codes(TEXTS), codes)
    torch.testing.assert_close(torch.tensor(theirs.encode_query(TEXTS)), queries, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(theirs.encode_document(TEXTS)), codes, atol=1e-5, rtol=0)
    scores = theirs.similarity(queries, codes) * profile.score_scale
    torch.testing.assert_close(scores, ours.score(queries, codes), atol=1e-5, rtol=1e-5)
    for task, prefix, length in (
        ("query", profile.query_prefix, profile.query_length),
        ("document", profile.code_prefix, profile.code_length),
    ):
        features = theirs.preprocess(TEXTS, prompt=theirs.prompts[task], task=task)
        masked = zip(features["input_ids"], features["attention_mask"].bool(), strict=True)
        expected = ours.tokenizer([prefix + text for text in TEXTS], truncation=True, max_length=length)["input_ids"]
        assert [ids[mask].tolist() for ids, mask in masked] == expected


@pytest.mark.parametrize("pad_token_id", [0, 7, None])
def test_positions_start_where_they_did_although_trainer_copies_the_padding_of_the_tokenizer(
    encoder_of, tmp_path, pad_token_id
):
    ours = encoder_of(EXPORTED["cls"])
    expected = ours.encode_queries(TEXTS)
    ours.model.config.pad_token_id = pad_token_id
    export(ours, tmp_path)
    assert torch.equal(load_encoder(tmp_path, device="cpu").encode_queries(TEXTS), expected)


def test_auto_classes_load_every_weight_and_the_tokens_of_the_prefix(encoder_of, tmp_path):
    ours = encoder_of(EXPORTED["unixcoder"])
    folder = export(ours, tmp_path)
    model, report = AutoModel.from_pretrained(folder, add_pooling_layer=False, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, weight in ours.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    tokenizer, prefix = AutoTokenizer.from_pretrained(folder), ours.profile.code_prefix
    assert tokenizer(prefix + "f").tokens() == ["<s>", "<encoder-only>", "</s>", "f", "</s>"]
    cut = tokenizer(prefix + TEXTS[2], truncation=True, max_length=10).tokens()
    assert cut[:3] == ["<s>", "<encoder-only>", "</s>"] and cut[-1] == "</s>" and len(cut) == 10


def test_nothing_pickled_nothing_left_aside_and_no_length_of_the_last_call(encoder_of, tmp_path):
    ours = encoder_of(EXPORTED["one length"])
    ours.tokenizer(TEXTS, truncation=True, max_length=5, padding="max_length")
    folder = export(ours, tmp_path / "new")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "modules.json",
        "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json", PROFILE_FILE,
    }  # fmt: skip
    saved = json.loads((folder / "tokenizer.json").read_text())
    assert saved["truncation"] is None and saved["padding"] is None


def test_given_state_dict_is_what_is_saved(encoder_of, tmp_path):
    ours, other = encoder_of(EXPORTED["codebert"]), encoder_of(EXPORTED["codebert"], seed=1)
    export_encoder(ours.model, ours.tokenizer, ours.profile, tmp_path, state_dict=other.model.state_dict())
    saved = load_encoder(tmp_path, device="cpu").encode_queries(TEXTS)
    assert torch.equal(saved, other.encode_queries(TEXTS))


def test_full_disk_leaves_the_last_save_complete(encoder_of, tmp_path):
    first = encoder_of(EXPORTED["unixcoder"])
    export(first, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match="cannot save to .*intact"):
            export(encoder_of(EXPORTED["unixcoder"], seed=1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.rglob("*")) == before
    assert torch.equal(load_encoder(tmp_path, device="cpu").encode_codes(TEXTS), first.encode_codes(TEXTS))
