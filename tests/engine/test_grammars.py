"""Texts that have to match a grammar do, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from transformers import AutoTokenizer

from jackfield import Grammar, choice_grammar, json_grammar, lark_grammar, regex_grammar
from jackfield.engine.generation.grammars import Grammars
from jackfield.errors import BadRequest
from jackfield.grammar import checked_grammar
from tests.checkpoints import VOCAB, save_causal, save_tokenizer
from tests.engine.generating import Driver, prompt_of
from tests.schemas import schema_of

NUM_SCHEMAS = 200
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_causal(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=1024)
    save_tokenizer(folder, pad_id=0, model_max_length=None)
    return folder


@pytest.fixture(scope="module")
def driver(folder: Path) -> Driver:
    return Driver(folder, kv_cache_mib=64)


def said(driver: Driver, folder: Path, request: int, index: int = 0) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text: str = tokenizer.decode(driver.tokens(request, index), skip_special_tokens=True)
    return text


def check_schemas(driver: Driver, folder: Path, prompt: list[int], seeds: range) -> float:
    """Every text that has ended is valid; returns how many of them have."""
    requests = [
        driver.submit(
            prompt, max_tokens=250, temperature=1.0, seed=seed, ignore_eos=False, grammar=json_grammar(schema_of(seed), param="schema")
        )
        for seed in seeds
    ]
    driver.run()
    ended = 0
    for seed, request in zip(seeds, requests, strict=True):
        text, reason = said(driver, folder, request), driver.choices[request][0].finish_reason
        if reason == "stop":
            ended += 1
            jsonschema_rs.validator_for(schema_of(seed), validate_formats=True).validate(json.loads(text))
        else:
            assert len(driver.tokens(request)) == 250
    return ended / len(seeds)


def test_schemas_at_random(driver: Driver, folder: Path) -> None:
    assert check_schemas(driver, folder, prompt_of(0, 20), range(NUM_SCHEMAS)) >= 0.9


def test_schemas_by_a_real_model(smollm2: Path) -> None:
    """Each fourth of them: all take a minute and a half."""
    driver = Driver(smollm2, kv_cache_mib=128)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.encode("<|im_start|>user\nGive me some JSON.<|im_end|>\n<|im_start|>assistant\n")
    assert check_schemas(driver, smollm2, prompt, range(0, NUM_SCHEMAS, 4)) >= 0.9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forms(driver: Driver, folder: Path, temperature: float) -> None:
    forms: dict[str, Grammar] = {
        r"yes|no|pérhaps": choice_grammar(["yes", "no", "pérhaps"], param="choice"),
        r"[0-9]{4}-[0-9]{2}": regex_grammar(r"\d{4}-\d\d", param="regex"),
        r"(ab)+c[xy]": lark_grammar('start: "ab"+ "c" LAST\nLAST: "x" | "y"', param="grammar"),
        r"a{2}b?": lark_grammar('root ::= "aa" "b"?', param="grammar"),
    }
    for pattern, grammar in forms.items():
        request = driver.submit(prompt_of(1, 9), max_tokens=200, temperature=temperature, ignore_eos=False, grammar=grammar)
        driver.run()
        jsonschema_rs.validator_for({"type": "string", "pattern": f"^({pattern})$"}).validate(said(driver, folder, request))


def test_what_must_follow_is_not_computed(driver: Driver, folder: Path) -> None:
    """Fewer steps than tokens; the same text as when each is sampled, which telling log-probabilities asks for."""
    grammar = json_grammar(OBJECT, param="schema")
    before = driver.engine.stats().num_steps
    fast = driver.submit(prompt_of(2, 30), max_tokens=100, ignore_eos=False, grammar=grammar)
    driver.run()
    steps = driver.engine.stats().num_steps - before
    slow = driver.submit(prompt_of(2, 30), max_tokens=100, ignore_eos=False, grammar=grammar, logprobs=0)
    driver.run()
    assert driver.tokens(fast) == driver.tokens(slow)
    assert steps <= len(driver.tokens(fast)) / 2
    assert len(driver.choices[slow][0].logprobs) == len(driver.tokens(slow))


def test_all_of_it_may_be_forced(driver: Driver, folder: Path) -> None:
    request = driver.submit(prompt_of(3, 5), max_tokens=100, ignore_eos=False, grammar=choice_grammar(["only this"], param="choice"))
    driver.run()
    assert said(driver, folder, request) == "only this"
    assert driver.choices[request][0].finish_reason == "stop"


@pytest.mark.parametrize("rules", ["start: <[5]>", 'start: "a" <[5]>', 'start: "a" <[5]> "b"', "start: <[0]>"])
def test_all_of_it_may_be_forced_to_the_token(driver: Driver, rules: str) -> None:
    """Tokens that a grammar names by their ids, as grammars of calls do."""
    request = driver.submit(prompt_of(3, 5), max_tokens=9, ignore_eos=False, grammar=lark_grammar(rules, param="grammar"))
    driver.run()
    names = {'"a"': 68, "<[5]>": 5, '"b"': 69, "<[0]>": 0}
    assert driver.tokens(request) == [names[part] for part in rules.split()[1:]]


def test_what_must_follow_may_pass_the_switch_of_positions(tmp_path: Path) -> None:
    """Of longrope, 32 here: all of a text beyond it is computed anew, wherever forced tokens have passed it, and no block is mistaken."""
    folder = save_causal(tmp_path, "phi3-longrope")
    shared, alone = Driver(folder), Driver(folder, prefix_cache=False)
    grammar = json_grammar(OBJECT, param="schema")

    def tokens(driver: Driver, length: int, **params: Any) -> list[int]:
        request = driver.submit(prompt_of(2, length), max_tokens=60, ignore_eos=False, temperature=1.0, seed=length, **params)
        driver.run()
        return driver.tokens(request)

    for length in range(10, 36):
        right = tokens(alone, length, grammar=grammar, logprobs=0)
        assert tokens(shared, length, grammar=grammar) == right
        assert tokens(shared, length, grammar=grammar, logprobs=0) == right
        assert tokens(shared, length) == tokens(alone, length)


@pytest.mark.parametrize("max_tokens", [1, 2, 9, 10, 11])
def test_a_text_that_is_cut_is_the_beginning_of_one_that_fits(driver: Driver, folder: Path, max_tokens: int) -> None:
    request = driver.submit(
        prompt_of(4, 5), max_tokens=max_tokens, ignore_eos=False, grammar=choice_grammar(["0123456789"], param="choice")
    )
    driver.run()
    assert said(driver, folder, request) == "0123456789"[:max_tokens]
    assert driver.choices[request][0].finish_reason == ("stop" if max_tokens >= 10 else "length")


def test_choices_and_neighbours_have_grammars_of_their_own(driver: Driver, folder: Path) -> None:
    """Some with, some without, n of one prompt, too few blocks for all: what is said is what is said alone."""
    grammar = json_grammar(OBJECT, param="schema")
    wanted: list[dict[str, Any]] = [{"n": 3, "grammar": grammar}, {}, {"grammar": choice_grammar(["abc", "abd"], param="choice")}, {"n": 2}]
    alone = []
    for number, params in enumerate(wanted):
        alone.append(driver.submit(prompt_of(number, 40), max_tokens=60, temperature=1.0, seed=number, **params))
        driver.run()
    crowded = Driver(folder, kv_cache_mib=1)
    together = [
        crowded.submit(prompt_of(number % 4, 40), max_tokens=60, temperature=1.0, seed=number % 4, **wanted[number % 4])
        for number in range(24)
    ]
    crowded.run()
    for number, request in enumerate(together):
        for index in range(wanted[number % 4].get("n", 1)):
            assert crowded.tokens(request, index) == driver.tokens(alone[number % 4], index)


def test_it_ends_where_it_is_whole_even_if_no_end_token_may(driver: Driver, folder: Path) -> None:
    """min_tokens and ignore_eos ask for more than there can be."""
    request = driver.submit(
        prompt_of(5, 5), max_tokens=50, min_tokens=20, ignore_eos=True, grammar=choice_grammar(["a", "b"], param="choice")
    )
    driver.run()
    assert said(driver, folder, request) in ("a", "b")
    endless = driver.submit(prompt_of(5, 5), max_tokens=50, ignore_eos=True, grammar=regex_grammar("a+", param="regex"))
    driver.run()
    assert said(driver, folder, endless) == "a" * 50


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('{"grammars": [{"json_schema": {"type": "array", "uniqueItems": true}}]}', "uniqueItems"),
        ('{"grammars": [{"lark_grammar": "start: <nosuch>"}]}', "nosuch"),
        ("{", "grammar"),
    ],
)
def test_what_cannot_be_compiled_is_its_requests_fault(driver: Driver, source: str, says: str) -> None:
    request = driver.submit(prompt_of(6, 5), max_tokens=5, grammar=Grammar(source=source, param="the grammar"))
    other = driver.submit(prompt_of(6, 5), max_tokens=5)
    driver.run()
    assert isinstance(driver.errors[request], BadRequest)
    assert says in str(driver.errors[request])
    assert len(driver.tokens(other)) == 5


def test_a_grammar_that_leaves_no_token(driver: Driver) -> None:
    grammar = choice_grammar(["a"], param="choice")
    request = driver.submit(prompt_of(7, 5), max_tokens=5, grammar=grammar, allowed_token_ids=(7,), logprobs=0)
    driver.run()
    assert "no token" in str(driver.errors[request])


def test_a_grammar_that_grows_too_complex(smollm2: Path) -> None:
    """It compiles, and its lexer grows beyond its bounds with the first masks; the next text begins anew."""
    grammars = Grammars(str(smollm2), 49152, (2,))
    grammar = checked_grammar(lark_grammar("start: /(.*a.{40}b|.*c.{43}d|.*e.{47}f|.*g.{53}h)*/", param="grammar"))
    ids = AutoTokenizer.from_pretrained(smollm2).encode("a face edge cage badge", add_special_tokens=False)
    mask = np.zeros(49152 // 32, np.int32)
    for _ in range(2):
        matcher = grammars.matcher(grammar)
        assert not matcher.error
        for token_id in ids:
            matcher.fill(mask, (2,))
            matcher.accept(token_id)
        assert "too many" in matcher.error


def test_tokens_that_the_model_has_no_row_for(tmp_path: Path) -> None:
    """A tokenizer with more tokens than the model's configuration counts."""
    folder = save_causal(tmp_path, "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<more{number}>" for number in range(VOCAB)])
    tokenizer.save_pretrained(folder)
    driver = Driver(folder)
    request = driver.submit(prompt_of(8, 5), max_tokens=30, temperature=1.0, seed=1, grammar=regex_grammar("a[b-z<]{9}c", param="regex"))
    driver.run()
    assert re.fullmatch("a[b-z<]{9}c", said(driver, folder, request))


def test_names_of_special_tokens_are_no_text(driver: Driver, folder: Path) -> None:
    """Where nothing else may come, their request ends; the text is never that token."""
    for text in ("say <s> now", "<s>"):
        request = driver.submit(prompt_of(8, 5), max_tokens=30, grammar=choice_grammar([text], param="choice"))
        driver.run()
        assert isinstance(driver.errors[request], BadRequest)


@pytest.mark.parametrize("bars", [{"bad_words": ((100,),)}, {"allowed_token_ids": tuple(range(3, VOCAB))}])
def test_what_a_request_bars_is_not_forced(driver: Driver, folder: Path, bars: dict[str, Any]) -> None:
    grammar = choice_grammar(["abcdef"], param="choice")
    free = driver.submit(prompt_of(8, 5), max_tokens=30, grammar=grammar)
    barred = driver.submit(prompt_of(8, 5), max_tokens=30, grammar=grammar, **bars)
    driver.run()
    assert said(driver, folder, barred) == said(driver, folder, free) == "abcdef"
    bad = driver.submit(prompt_of(8, 5), max_tokens=30, grammar=grammar, bad_words=(tuple(driver.tokens(free)[2:3]),))
    driver.run()
    assert isinstance(driver.errors[bad], BadRequest)


def test_the_matchers_methods(folder: Path) -> None:
    """Forced tokens; copies; rolling back; where it ends."""
    grammars = Grammars(str(folder), VOCAB, (2,))
    ids = AutoTokenizer.from_pretrained(folder).encode("abc", add_special_tokens=False)
    for rules in ("start: /ab(c|d)/", f'start: <[{ids[0]}]> "b" ("c" | "d")'):  # a token by its text, and by its id
        matcher = grammars.matcher(checked_grammar(lark_grammar(rules, param="rules")))
        assert matcher.forced() == ids[:2]
        for token_id in ids[:2]:
            assert matcher.accept(token_id)
        other = matcher.copy()
        assert matcher.accept(ids[2])
        assert matcher.finished()
        assert not other.finished()
        matcher.rollback(2)
        assert not matcher.finished()
        assert matcher.forced() == ids[1:2]
        assert matcher.accept(ids[1])
        assert matcher.accept(ids[2])
        assert not matcher.accept(ids[2])
        assert matcher.error
        assert not other.error
