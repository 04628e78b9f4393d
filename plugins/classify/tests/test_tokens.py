"""Entities by real tiny models over a real socket, against transformers' pipeline computed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from jackfield.testing import make_client
from jackfield_classify.entities import Tokens, find_entities
from jackfield_classify.tokens import TokenClassifyEndpoint
from tests.checkpoints import IN_BUCKETS, KINDS, save_checkpoint
from tests.http.raw import check_error

HEAD = "ForTokenClassification"
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC"]
TEXTS = [
    "Ada Lovelace lived in London, and Ada died in Marylebone.",
    "x",
    "",
    "Zoë möchte nach Köln ☕ (bald!) and back\tagain\nto York",
    "aaaa bbbb " * 8,
]
STRATEGIES = ["none", "simple", "first", "average", "max"]


def save_word_pieces(folder: Path) -> None:
    """A tokenizer of letters and some pieces, as BERT's: `##` marks what continues a word, and case and accents are dropped."""
    letters = "abcdefghijklmnopqrstuvwxyz.,()!"
    pieces = [*letters, *("##" + letter for letter in letters), "ada", "love", "##lace", "london", "##bone", "back"]
    vocab = {piece: number for number, piece in enumerate(["<pad>", "<s>", "</s>", "<unk>", *pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="<unk>", continuing_subword_prefix="##"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    frame = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=frame)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    labels: dict[str, Any] = {"num_labels": len(LABELS), "id2label": dict(enumerate(LABELS))}
    made = {name: save_checkpoint(root / name, "bert", head=HEAD, **labels) for name in ("bytes", "words")}
    save_word_pieces(made["words"])
    for folder in made.values():
        balance(folder)
    return made


@torch.inference_mode()
def balance(folder: Path) -> None:
    """Take the head's favourite label from it, so that each is found somewhere."""
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    ids = [AutoTokenizer.from_pretrained(folder)(text, truncation=True, padding=False, max_length=64)["input_ids"] for text in TEXTS]
    logits = torch.cat([model(input_ids=torch.tensor([one])).logits[0] for one in ids])
    model.classifier.weight *= 8
    model.classifier.bias -= 8 * (logits.mean(0) - model.classifier.bias)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[httpx.Client]:
    with make_client(TokenClassifyEndpoint(), models={name: {"source": str(path)} for name, path in folders.items()}, real=True) as made:
        yield made


def entities(client: httpx.Client, model: str, given: str | list[str], **fields: Any) -> list[list[dict[str, Any]]]:
    answer = client.post("/token_classify", json={"model": model, "input": given, **fields})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["entities"] for item in data]


def as_ours(text: str, expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """transformers' entities with the text's own words, which are ours, for its decoded ones."""
    return [{**entity, "score": float(entity["score"]), "word": text[entity["start"] : entity["end"]]} for entity in expected]


def check_equal(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [{**one, "score": 0} for one in got] == [{**one, "score": 0} for one in expected]
    np.testing.assert_allclose([one["score"] for one in got], [one["score"] for one in expected], atol=1e-5)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["bytes", "words"])
def test_as_transformers_pipeline(client: httpx.Client, folders: dict[str, Path], model: str, strategy: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[model])
    tokenizer.backend_tokenizer.no_truncation()
    find = pipeline("token-classification", model=str(folders[model]), tokenizer=tokenizer, device="cpu", aggregation_strategy=strategy)
    seen: set[str] = set()
    for ignored in (None, list[str]()):
        fields = {} if ignored is None else {"ignore_labels": ignored}
        got = entities(client, model, TEXTS, aggregation_strategy=strategy, **fields)
        for text, found in zip(TEXTS, got, strict=True):
            check_equal(found, as_ours(text, find(text, ignore_labels=ignored)))
            seen |= {entity.get("entity") or entity["entity_group"] for entity in found}
    assert len(seen) >= 3, "a model that says one thing of everything would hide mistakes"


def test_defaults(client: httpx.Client) -> None:
    assert entities(client, "words", TEXTS[0]) == entities(client, "words", TEXTS[0], aggregation_strategy="simple", ignore_labels=["O"])
    assert (
        client.post("/v1/token_classify", json={"model": "words", "input": TEXTS}).json()["data"]
        == (client.post("/token_classify", json={"model": "words", "input": TEXTS, "aggregation_strategy": None}).json()["data"])
    )


def test_a_word_whose_length_changes_is_no_piece_of_the_one_before() -> None:
    """An accent of its own is a character more in the text than in the vocabulary; transformers joins such a word to the one before."""
    text = "back be\u0301ta bone"
    offsets = [None, (0, 4), (5, 10), (11, 13), (13, 15), None]
    tokens = Tokens(text=text, offsets=offsets, strings=["<s>", "back", "beta", "bo", "##ne", "</s>"], continuing="##", unknown="<unk>")
    assert tokens.words() == [[1], [2], [3, 4]]
    probs = np.array([[9, 9], [0.8, 0.2], [0.1, 0.9], [0.6, 0.4], [0.7, 0.3], [9, 9]], dtype=np.float32)
    found = find_entities(tokens, probs, ["B-A", "B-B"], "max")
    assert [(one.entity_group, one.start, one.end) for one in found] == [("A", 0, 4), ("B", 5, 10), ("A", 11, 15)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_places_after_truncation(client: httpx.Client, side: str) -> None:
    text = "Köln abcdefgh"
    (found,) = entities(
        client, "bytes", text, aggregation_strategy="none", ignore_labels=[], truncate_prompt_tokens=6, truncation_side=side
    )
    kept = "efgh" if side == "left" else "Köl"
    assert text[found[0]["start"] : found[-1]["end"]] == kept
    assert [one["index"] for one in found] == [1, 2, 3, 4]


def test_characters_are_code_points(client: httpx.Client) -> None:
    (found,) = entities(client, "words", "☕☕ ada 🙂 ada", aggregation_strategy="none", ignore_labels=[])
    assert [one["word"] for one in found if one["word"] == "ada"] == ["ada", "ada"]
    assert [one["start"] for one in found if one["word"] == "ada"] == [3, 9]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, 2]}, "input[0]"),
        ({"input": "a", "aggregation_strategy": "median"}, "aggregation_strategy"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": ["a", "ab" * 200]}, "input[1]"),
    ],
    ids=str,
)
def test_bad_requests_name_the_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post("/token_classify", json={"model": "bytes", **body})
    check_error(answer, 400)
    assert answer.json()["error"]["param"] == param


def test_a_classifier_of_texts_is_refused(client: httpx.Client, tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = save_checkpoint(tmp_path / "texts", "bert", head="ForSequenceClassification", num_labels=3)
    models = {"tokens": {"source": str(folders["bytes"])}, "texts": {"source": str(folder)}}
    with make_client(TokenClassifyEndpoint(), models=models, real=True) as both:
        message = check_error(both.post("/token_classify", json={"model": "texts", "input": "a"}), 400)
    assert "it can: classify" in message


def heads() -> list[str]:
    import transformers

    return sorted(kind for kind, (name, _) in KINDS.items() if hasattr(transformers, f"{name}{HEAD}"))


@pytest.mark.parametrize("kind", heads())
def test_architectures(tmp_path: Path, kind: str) -> None:
    """Each token's probabilities, alone and among others."""
    folder = save_checkpoint(tmp_path / kind, kind, head=HEAD, num_labels=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    texts = ["abc", "a longer text than the other", "x"]
    with make_client(TokenClassifyEndpoint(), models={kind: {"source": str(folder)}}, real=True) as client:
        execution = client.get(f"/v1/models/{kind}").json()["execution"]
        got = entities(client, kind, texts, aggregation_strategy="none", ignore_labels=[])
    for text, found in zip(texts, got, strict=True):
        ids = tokenizer(text, truncation=False, padding=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            best = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 1:-1].softmax(-1).max(-1)
        assert [one["entity"] for one in found] == [f"LABEL_{number}" for number in best.indices]
        np.testing.assert_allclose([one["score"] for one in found], best.values, atol=2e-5)
    assert execution == ("buckets" if kind in IN_BUCKETS else "packed")


def test_the_answer_is_what_it_says(client: httpx.Client) -> None:
    answer = client.post("/token_classify", json={"model": "words", "input": TEXTS[0], "request_id": "r-1"}).json()
    assert answer["id"] == "tokcls-r-1"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    for entity in answer["data"][0]["entities"]:
        assert set(entity) == {"entity_group", "score", "word", "start", "end"}
        assert entity["word"] == TEXTS[0][entity["start"] : entity["end"]]
    assert json.dumps(answer)
