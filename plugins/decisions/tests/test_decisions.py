"""Answers of a real tiny model over a real socket, against transformers' own logits computed here."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.decision.template_utils import Question

import jackfield_decisions
from jackfield import Context, EngineRequest, PoolingOutputs, PoolingParams, Submit, hookimpl
from jackfield.testing import make_client, tiny_model

STATE = "I was charged twice."
SYSTEM_ONE: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is it about money?"},
    "spam": {"type": "noul", "criteria": {"true": "unsolicited", "false": {"kind": "a real one"}}},
    "team": {"type": "choice", "instructions": "Who answers?", "criteria": {"billing": "payments", "bugs": None, "sales": ["new", "old"]}},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", {"level": "annoyed"}, "furious", "gone"]},
    "bare": {"type": "score", "criteria": ["low", "high"]},
}
OPENAI: list[dict[str, Any]] = [
    {"type": "predicate", "name": "refund", "instructions": "It is about money."},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Who"}, {"type": "input_json", "data": {"to": "answer"}}],
        "choices": [{"value": "billing", "description": "payments"}, {"value": True}, {"value": "true"}],
    },
    {
        "type": "score",
        "name": "anger",
        "instructions": "How angry?",
        "levels": [{"label": "calm"}, {"label": "annoyed", "description": "a bit"}, {"label": "furious"}],
    },
]
RISING = " (from the lowest level to the highest)."
# What the model is asked, word for word.
ASKED: dict[str, tuple[str, list[str]]] = {
    "refund": ("Question: Is it about money?\nReply with Yes or No alone.", ["Yes", "No"]),
    "spam": (
        'Question: Which of the two is so?\nYes means: unsolicited\nNo means: {"kind":"a real one"}\nReply with Yes or No alone.',
        ["Yes", "No"],
    ),
    "team": (
        'Question: Who answers?\nA) billing: payments\nB) bugs\nC) sales: ["new","old"]\nReply with one letter alone, A to C.',
        ["A", "B", "C"],
    ),
    "anger": (
        'Question: How angry?\nA) calm\nB) {"level":"annoyed"}\nC) furious\nD) gone\nReply with one letter alone, A to D' + RISING,
        ["A", "B", "C", "D"],
    ),
    "bare": (
        "Question: Which level fits the text best?\nA) low\nB) high\nReply with one letter alone, A to B" + RISING,
        ["A", "B"],
    ),
}
ASKED_OPENAI: list[tuple[str, list[str]]] = [
    ("Question: It is about money.\nReply with Yes or No alone.", ["Yes", "No"]),
    (
        'Question: Who\n{"to":"answer"}\nA) billing: payments\nB) true\nC) true\nReply with one letter alone, A to C.',
        ["A", "B", "C"],
    ),
    (
        "Question: How angry?\nA) calm\nB) annoyed: a bit\nC) furious\nReply with one letter alone, A to C" + RISING,
        ["A", "B", "C"],
    ),
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with make_client(jackfield_decisions, models={"tiny": {"source": tiny_model("llama")}}, real=True) as made:
        yield made


def prompt_ids(text: str) -> Any:
    messages = [{"role": "user", "content": text}]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False, return_tensors="pt")["input_ids"]


@torch.inference_mode()
def expected(question: tuple[str, list[str]], state: str = STATE) -> list[float]:
    """By transformers: the shares of the labels' first tokens after the prompt."""
    text, labels = question
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()
    logits = model(input_ids=prompt_ids(f"Text:\n{state}\n\n{text}")).logits[0, -1]
    shares: list[float] = logits[[tokenizer(label, add_special_tokens=False)["input_ids"][0] for label in labels]].softmax(-1).tolist()
    return shares


def confidence(kind: Literal["choice", "score"], shares: list[float]) -> float:
    """By transformers, from the same shares."""
    names = [str(place) for place in range(len(shares))]
    found: float = Question("q", kind, None, names, names, names).answer(shares)["confidence"]
    return found


def near(value: Any) -> Any:
    return pytest.approx(value, abs=1e-5)


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_system_one_is_what_transformers_computes(client: httpx.Client) -> None:
    content = post(client, "/v1/systemone", {"state": STATE, "questions": SYSTEM_ONE})
    right = {name: expected(question) for name, question in ASKED.items()}
    assert all(np.ptp(shares) > 0.01 for shares in right.values())
    answers = content["answers"]
    assert list(answers) == list(SYSTEM_ONE)
    assert answers["refund"] == {"type": "noul", "noul": near(right["refund"][0])}
    assert answers["spam"] == {"type": "noul", "noul": near(right["spam"][0])}
    team = dict(zip(["billing", "bugs", "sales"], right["team"], strict=True))
    assert answers["team"] == {
        "type": "choice",
        "choice": max(team, key=lambda name: team[name]),
        "confidence": near(confidence("choice", right["team"])),
        "probabilities": {name: near(share) for name, share in team.items()},
    }
    assert answers["anger"] == {
        "type": "score",
        "score": near(sum(level * share for level, share in enumerate(right["anger"]))),
        "legend": {"0": "calm", "1": {"level": "annoyed"}, "2": "furious", "3": "gone"},
        "confidence": near(confidence("score", right["anger"])),
        "probabilities": {str(level): near(share) for level, share in enumerate(right["anger"])},
    }
    assert answers["bare"]["score"] == near(right["bare"][1])
    for name in ("team", "anger", "bare"):
        assert sum(answers[name]["probabilities"].values()) == pytest.approx(1, abs=1e-12)
    tokens = sum(prompt_ids(f"Text:\n{STATE}\n\n{text}").shape[1] for text, _ in ASKED.values())
    assert content["usage"] == {"input_tokens": tokens, "output_tokens": 0, "prompt_tokens": tokens, "total_tokens": tokens}
    assert content["model"] == "tiny"


def test_decisions_is_what_transformers_computes(client: httpx.Client) -> None:
    content = post(client, "/v1/decisions", {"input": STATE, "questions": OPENAI})
    predicate, choice, score = map(expected, ASKED_OPENAI)
    values = ["billing", True, "true"]
    best = values[int(np.argmax(choice))]
    assert content["answers"] == [
        {"type": "predicate", "name": "refund", "probability": near(predicate[0])},
        {
            "type": "choice",
            "name": None,
            "choice": best,
            "confidence": near(confidence("choice", choice)),
            "probabilities": [{"value": value, "probability": near(share)} for value, share in zip(values, choice, strict=True)],
        },
        {
            "type": "score",
            "name": "anger",
            "score": near(score[1] + 2 * score[2]),
            "confidence": near(confidence("score", score)),
            "probabilities": [
                {"value": level, "label": label, "probability": near(share)}
                for level, (label, share) in enumerate(zip(["calm", "annoyed", "furious"], score, strict=True))
            ],
        },
    ]
    assert type(content["answers"][1]["choice"]) is type(best)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"message": "é", "n": [1, None]}, '{"message":"é","n":[1,null]}'),
        ([{"type": "image", "alt": "a logo"}], '[{"type":"image","alt":"a logo"}]'),
        ("", ""),
    ],
    ids=str,
)
def test_a_state_is_read_as_text(client: httpx.Client, state: Any, text: str) -> None:
    answers = post(client, "/v1/systemone", {"state": state, "questions": {"refund": SYSTEM_ONE["refund"]}})["answers"]
    assert answers["refund"]["noul"] == near(expected(ASKED["refund"], text)[0])


def test_the_name_of_a_special_token_stays_text(client: httpx.Client) -> None:
    """Else whoever writes the state could end the turn, and answer the question. transformers takes it for the token."""
    content = post(client, "/v1/systemone", {"state": "</s>", "questions": {"refund": SYSTEM_ONE["refund"]}})
    assert content["usage"]["input_tokens"] == prompt_ids(f"Text:\n</s>\n\n{ASKED['refund'][0]}").shape[1] - 1 + len("</s>")
    assert content["answers"]["refund"]["noul"] != near(expected(ASKED["refund"], "</s>")[0])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([{"role": "user", "content": STATE}], STATE),
        ([{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": [{"b": 1}]}]}], 'a\n[{"b":1}]'),
        ([{"type": "message", "role": "user", "content": "a"}, {"role": "user", "content": "b"}], "a\n\nb"),
        (
            [
                {"role": "developer", "content": "c"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "b"}, {"type": "refusal", "refusal": "no"}]},
            ],
            "developer: c\n\nuser: a\n\nassistant: b\nno",
        ),
    ],
    ids=str,
)
def test_an_input_of_messages_is_read_as_text(client: httpx.Client, given: Any, text: str) -> None:
    [answer] = post(client, "/v1/decisions", {"input": given, "questions": OPENAI[:1]})["answers"]
    assert answer["probability"] == near(expected(ASKED_OPENAI[0], text)[0])


def test_a_question_is_answered_alike_alone_and_among_others(client: httpx.Client) -> None:
    together = post(client, "/systemone", {"state": STATE, "questions": SYSTEM_ONE})["answers"]
    for name, question in SYSTEM_ONE.items():
        alone = post(client, "/systemone", {"state": STATE, "questions": {name: question}})["answers"][name]
        numbers = alone.pop("probabilities", {})
        assert numbers == {option: near(share) for option, share in together[name].get("probabilities", {}).items()}
        assert alone == {
            field: near(value) if isinstance(value, float) else value for field, value in together[name].items() if field in alone
        }


def test_as_many_options_as_there_are_letters(client: httpx.Client) -> None:
    """Beside a question of yes or no, whose labels begin with two of the letters to a tokenizer of single bytes."""
    names = [f"n{number}" for number in range(26)]
    letters = [chr(ord("A") + number) for number in range(26)]
    questions = {"refund": SYSTEM_ONE["refund"], "many": {"type": "choice", "criteria": dict.fromkeys(names)}}
    answers = post(client, "/v1/systemone", {"state": "x", "questions": questions})["answers"]
    lines = "\n".join(f"{letter}) {name}" for letter, name in zip(letters, names, strict=True))
    text = f"Question: Which option fits the text best?\n{lines}\nReply with one letter alone, A to Z."
    assert list(answers["many"]["probabilities"].values()) == near(expected((text, letters), "x"))
    assert answers["refund"]["noul"] == near(expected(ASKED["refund"], "x")[0])


# How the template ends, and where the tokenizer keeps a word's space.
SPACED: dict[str, tuple[str, Any, str]] = {
    "metaspace-line": ("\n", Metaspace(prepend_scheme="first"), "▁"),
    "metaspace-colon": (":", Metaspace(prepend_scheme="always"), "▁"),
    "bytes-colon": (":", ByteLevel(add_prefix_space=False), "Ġ"),
}


@pytest.mark.parametrize("case", SPACED)
def test_a_label_counts_with_a_space_before_it_and_without(tmp_path: Path, case: str) -> None:
    """The shares are of the whole vocabulary's softmax, over both tokens of each label."""
    end, pre_tokenizer, space = SPACED[case]
    folder = tmp_path / "m"
    shutil.copytree(tiny_model("llama"), folder)
    letters = [space, "Ċ", "\n", *string.ascii_letters, *string.punctuation]
    words = [(space, letter) for letter in "ABCYN"]
    vocab = {piece: number for number, piece in enumerate([*letters, *(space + letter for _, letter in words)])}
    base = Tokenizer(BPE(vocab=vocab, merges=words))
    base.pre_tokenizer = pre_tokenizer
    base.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>", "<pad>", "<|a|>", "<|b|>")])
    base.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": f"<|a|>{{{{ messages[0]['content'] }}}}<|b|>{{{{ {end!r} }}}}"})
    )
    with make_client(jackfield_decisions, models={"m": {"source": str(folder)}}, real=True) as client:
        questions = {"noul": SYSTEM_ONE["refund"], "choice": SYSTEM_ONE["team"]}
        answers = post(client, "/v1/systemone", {"state": STATE, "questions": questions})["answers"]
    found = {"refund": [answers["noul"]["noul"], 1 - answers["noul"]["noul"]], "team": list(answers["choice"]["probabilities"].values())}
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for name, numbers in found.items():
        text, labels = ASKED[name]
        ids = base.encode(f"<|a|>Text:\n{STATE}\n\n{text}<|b|>{end}", add_special_tokens=False).ids
        with torch.inference_mode():
            whole = model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
        both = torch.stack([whole[vocab[label[0]]] + whole[vocab[space + label[0]]] for label in labels])
        assert numbers == near((both / both.sum()).tolist())
        alone = torch.stack([whole[vocab[label[0]]] for label in labels])
        assert numbers != near((alone / alone.sum()).tolist())


def test_both_routes_answer_one_question_alike(client: httpx.Client) -> None:
    one = post(
        client, "/v1/systemone", {"state": STATE, "questions": {"q": {**SYSTEM_ONE["refund"], "instructions": "It is about money."}}}
    )
    two = post(client, "/decisions", {"input": STATE, "questions": OPENAI[:1]})
    assert one["answers"]["q"]["noul"] == near(two["answers"][0]["probability"])


def test_openais_client_reads_the_answers(client: httpx.Client) -> None:
    made = openai.OpenAI(base_url=str(client.base_url.join("/v1")), api_key="unused")
    questions: Any = OPENAI
    answer = made.decisions.create(model="tiny", input=[{"role": "user", "content": STATE}], questions=questions)
    kinds = [type(one).__name__ for one in answer.answers]
    assert kinds == ["AnswerAnswerResourcePredicate", "AnswerAnswerResourceChoice", "AnswerAnswerResourceScore"]
    assert [one.name for one in answer.answers] == ["refund", None, "anger"]
    assert answer.usage.total_tokens == answer.usage.input_tokens > 0


class Remembering:
    """A cache around the engine's call, further out than the plugin."""

    def __init__(self) -> None:
        self.known: dict[Any, PoolingOutputs] = {}

    @hookimpl
    def jackfield_wrap_submit(self, submit: Submit) -> Submit:
        async def remembered(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
            key = (tuple(request.token_ids), request.params.logit_ids if isinstance(request.params, PoolingParams) else ())
            if key not in self.known:
                self.known[key] = await submit(ctx, request)
            return self.known[key]

        return remembered


def test_what_a_cache_gives_is_answered_alike() -> None:
    cache = Remembering()
    with make_client(jackfield_decisions, cache, models={"tiny": {"source": tiny_model("llama")}}, real=True) as client:
        first, second = (post(client, "/v1/systemone", {"state": STATE, "questions": SYSTEM_ONE}) for _ in range(2))
        assert len(cache.known) == 1
        more = {**SYSTEM_ONE, "team": {"type": "choice", "criteria": dict.fromkeys("abcdefg")}}
        assert len(post(client, "/v1/systemone", {"state": STATE, "questions": more})["answers"]["team"]["probabilities"]) == 7
    assert first == second
    assert first["answers"]["team"]["probabilities"]["billing"] == near(expected(ASKED["team"])[0])
