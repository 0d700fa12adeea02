"""A card tells whether somebody edited it, and an edited card keeps its text."""

import pytest
from huggingface_hub import RepoCard

from soft_trainer.cards import is_signed, sign, updated

OLD = (
    "---\nlicense: mit\nmodel-index:\n- name: old\n---\n\n# Encoder\n\n## Results\n\n| MRR 0.1 |\n\n## Training\n\nx\n"
)
NEW = OLD.replace("old", "new").replace("0.1", "0.2").replace("\nx\n", "\ny\n")
HAND = OLD.replace("# Encoder\n", "# Encoder\n\nOur story.\n")
BARE = "---\nlicense: apache-2.0\nthumbnail: a.png\n---\n"


@pytest.mark.parametrize(
    "edit",
    ["# Encoder -> # Our encoder", "license: mit -> license: apache-2.0", "\nx\n -> \nx \n", "unedited -> edited"],
)
def test_any_edit_is_noticed(edit):
    assert is_signed(sign(OLD)) and is_signed(sign(sign(OLD))) and not is_signed(OLD)
    old, new = edit.split(" -> ")
    assert not is_signed(sign(OLD).replace(old, new))


@pytest.mark.parametrize(
    ("present", "has", "has_not"),
    [
        (HAND, ["Our story.", "name: new", "MRR 0.2", "\nx\n", "license: mit"], ["0.1", "name: old"]),
        (sign(OLD).replace("# Encoder", "# Mine"), ["# Mine", "MRR 0.2"], ["0.1"]),
        ("# Without a header\n", ["# Without a header", "name: new"], ["MRR"]),
        (BARE, ["license: mit", "thumbnail: a.png", "MRR 0.2"], []),
    ],
)
def test_the_text_stays_with_the_new_results(present, has, has_not):
    card = updated(present, sign(NEW))
    assert all(text in card for text in has) and not any(text in card for text in has_not)
    assert RepoCard(card).data.to_dict()["model-index"] == [{"name": "new"}]
    assert is_signed(card) == (present == BARE)


def test_results_that_the_new_card_lacks_are_removed():
    card = updated(HAND, sign("---\nlicense: mit\n---\n\n# Encoder\n\n## Training\n\ny\n"))
    assert "Results" not in card and "model-index" not in card and "Our story." in card
