"""Generated text is what the model's own logits say, and comes as it is made."""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron.boost.evaluation.generation import (
    Completion,
    Sampling,
    complete,
    complete_all,
    prompts_of,
)
from tests.evaluation.test_hugging_face import save_small_llama
from tests.support.distributed import run_ranks
from tests.support.small_tokenizer import save_small_tokenizer

PROMPT = "the quick brown"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = save_small_tokenizer(folder, begins_with="<s>")
    save_small_llama(folder, tokenizer)
    model = LlamaForCausalLM.from_pretrained(folder)
    # Words, not any bytes: what is no whole character is held back.
    others = [
        i for i in range(len(tokenizer)) if not re.fullmatch("[ a-z]+", tokenizer.decode([i]))
    ]
    with torch.no_grad():
        model.lm_head.weight[others] = 0
    model.save_pretrained(folder)
    # What a folder recommends must not change what the flags ask for.
    GenerationConfig(
        do_sample=True, temperature=5.0, top_k=3, repetition_penalty=1.7
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


class Recorder(io.StringIO):
    """A stream that remembers how it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        self.parts += [text] if text else []
        return super().write(text)


def run(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, **settings: Any
) -> tuple[Completion, Recorder]:
    output = Recorder()
    found = complete(model, tokenizer, PROMPT, Sampling(**settings), output)
    return found, output


@torch.no_grad()
def greedy_ids(model: LlamaForCausalLM, ids: list[int], count: int) -> list[int]:
    """Without a cache: the whole text is read again for every token."""
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids


def test_greedy_is_the_most_probable_token_each_time(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = tokenizer(PROMPT)["input_ids"]
    expected = tokenizer.decode(greedy_ids(model, prompt, 12), skip_special_tokens=True)
    found, output = run(model, tokenizer, max_new_tokens=12)

    assert PROMPT + found.text == expected
    assert output.getvalue() == expected + "\n"
    assert (found.prompt_tokens, found.new_tokens, found.ended) == (len(prompt), 12, False)
    assert run(model, tokenizer, max_new_tokens=12, temperature=0)[0].text == found.text
    # It came in parts, and the folder's own settings are as they were.
    assert len(output.parts) > 2
    assert model.generation_config.temperature == 5.0


def test_samples_follow_the_seed_and_the_cuts(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    first, again = (run(model, tokenizer, max_new_tokens=9, temperature=2.0)[0] for _ in "12")
    other = run(model, tokenizer, max_new_tokens=9, temperature=2.0, seed=5)[0]
    assert first.text == again.text != other.text
    # So narrow a cut leaves the greedy choice alone, whatever the seed.
    greedy = run(model, tokenizer, max_new_tokens=9)[0].text
    assert run(model, tokenizer, max_new_tokens=9, top_k=1)[0].text == greedy
    assert run(model, tokenizer, max_new_tokens=9, top_p=1e-6)[0].text == greedy
    assert run(model, tokenizer, max_new_tokens=9, temperature=1e-4)[0].text == greedy


@pytest.mark.parametrize(
    ("settings", "temperature", "top_k", "top_p"),
    [
        ({"temperature": 1.0}, 1.0, None, None),
        ({"top_k": 4}, 1.0, 4, None),
        ({"top_p": 0.6, "temperature": 0.5}, 0.5, None, 0.6),
    ],
)
def test_samples_have_the_distribution_of_the_logits(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: dict[str, Any],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer(PROMPT)["input_ids"]])).logits[0, -1]
    probabilities = (logits / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    if top_p:
        before = probabilities[order].cumsum(0) - probabilities[order]
        kept = order[before < top_p]
    allowed = torch.zeros_like(probabilities)
    allowed[kept] = probabilities[kept] / probabilities[kept].sum()

    count = 200
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]] * count)
    config = Sampling(max_new_tokens=1, **settings).for_model(model, tokenizer, 40)
    torch.manual_seed(0)
    previous, model.generation_config = model.generation_config, config
    try:
        drawn = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
            :, -1
        ]
    finally:
        model.generation_config = previous
    found = Counter(drawn.tolist())
    assert all(allowed[token] > 0 for token in found)
    top = int(allowed.argmax())
    deviation = math.sqrt(count * float(allowed[top]) * (1 - float(allowed[top])))
    assert abs(found[top] - count * float(allowed[top])) <= 4 * deviation


def test_it_ends_at_the_models_end_of_text_and_at_its_positions(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = tokenizer(PROMPT)["input_ids"]
    third = greedy_ids(model, prompt, 3)[-1]
    own = model.generation_config
    assert Sampling().for_model(model, tokenizer, 40).eos_token_id == tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=third)
    try:
        found, _ = run(model, tokenizer, max_new_tokens=12)
    finally:
        model.generation_config = own
    assert found.ended
    assert found.new_tokens <= 3

    found, _ = run(model, tokenizer, max_new_tokens=1000)
    assert found.prompt_tokens + found.new_tokens == 48
    with pytest.raises(ValueError, match="--prompt: has .* tokens, and the model 48 positions"):
        complete(model, tokenizer, "zzzz" * 48, Sampling(), io.StringIO())


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens 0: must be at least 1; nearest legal value: 1$"),
        ({"top_k": 0}, "--top-k 0: must be at least 1; nearest legal value: 1$"),
        ({"top_p": 1.5}, "--top-p 1.5: must be above 0 and at most 1; nearest .* value: 1.0$"),
        ({"top_p": 0.0}, "--top-p 0.0: must be above 0 .*; nearest legal value: 0.01$"),
        ({"top_p": float("nan")}, "--top-p nan: must be above 0 .*; nearest legal value: 1.0$"),
        ({"temperature": -1.0}, "--temperature -1.0: must be .*; nearest legal value: 0$"),
        ({"temperature": float("nan")}, "--temperature nan: must be .* finite; .* value: 1.0$"),
        ({"seed": 10**20}, f"--seed {10**20}: .*; nearest legal value: {2**64 - 1}$"),
        ({"seed": -(10**20)}, f"--seed -{10**20}: .*; nearest legal value: -{2**63}$"),
        ({"temperature": 0.0, "top_k": 5}, "--temperature 0: is greedy, and --top-k"),
    ],
)
def test_values_that_are_no_way_to_sample_are_refused(
    settings: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ValueError, match=refusal):
        Sampling(**settings)


def test_prompts_come_from_words_files_and_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n", encoding="utf-8")
    piped = io.StringIO("from\na pipe\n")
    assert prompts_of(["one", "-", "two"], [file], piped) == [
        "one",
        "from\na pipe",
        "two",
        "from a file",
    ]
    assert prompts_of([], [], io.StringIO("piped")) == ["piped"]
    assert prompts_of([], [file], io.StringIO("left alone")) == ["from a file"]
    with pytest.raises(ValueError, match="--prompt-file .*: no such file"):
        prompts_of([], [tmp_path / "none.txt"], piped)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="--prompt-file .*: invalid UTF-8 at byte 1"):
        prompts_of([], [file], piped)
    with pytest.raises(ValueError, match="--prompt-file .*: is a folder, and a file is wanted$"):
        prompts_of([], [tmp_path], piped)


def test_prompts_that_are_no_utf_8_are_refused() -> None:
    for given in (b"h\xc3\xa9", b"plain"):
        # As Python hands arguments on under an ASCII locale.
        assert prompts_of([given.decode("ascii", "surrogateescape")], [], io.StringIO()) == [
            given.decode()
        ]
    with pytest.raises(ValueError, match="^--prompt 'a.udc80': invalid UTF-8 at byte 2 .invalid"):
        prompts_of(["one", os.fsdecode(b"a\x80")], [], io.StringIO())
    for errors in ("strict", "surrogateescape"):
        piped = io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8", errors)
        with pytest.raises(ValueError, match="^--prompt -: invalid UTF-8 at byte 3 .invalid"):
            prompts_of([], [], piped)


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_the_seeds_at_the_limits_are_torchs(seed: int) -> None:
    torch.Generator().manual_seed(Sampling(seed=seed).seed)
    with pytest.raises((RuntimeError, ValueError)):
        torch.Generator().manual_seed(seed + (1 if seed > 0 else -1))


def test_what_a_prompt_cannot_be(model: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    save_small_tokenizer(tmp_path)
    empty = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--prompt '': has no tokens"):
        complete(model, empty, "", Sampling(), io.StringIO())
    empty.add_tokens([f"<{number}>" for number in range(300)])
    with pytest.raises(ValueError, match="the tokenizer makes token 5.., and the model's are 0 to"):
        complete(model, empty, "<299>", Sampling(), io.StringIO())
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 281


PROMPTS = ["the quick", "brown fox", "the lazy dog", "jumps"]


def all_completed(folder: Path) -> tuple[list[str], str]:
    """On a rank: the texts that it knows, and what it wrote."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    output = io.StringIO()
    sampling = Sampling(max_new_tokens=6, temperature=0.2)
    done = complete_all(model, tokenizer, PROMPTS, sampling, output)
    return [one.text for one in done], output.getvalue()


@pytest.mark.slow
def test_ranks_share_the_prompts_and_the_first_one_speaks(folder: Path) -> None:
    texts, written = all_completed(folder)
    assert len(set(texts)) == len(PROMPTS)
    assert written.startswith(PROMPTS[0] + texts[0] + "\n\n" + PROMPTS[1])
    first, second, third = run_ranks(all_completed, 3, folder)
    assert first == (texts, written)
    assert (second, third) == ((texts[1:2], ""), (texts[2:3], ""))


def test_no_prompt_is_begun_before_all_are_found_good(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    output = io.StringIO()
    with pytest.raises(ValueError, match="--prompt: has .* tokens"):
        complete_all(model, tokenizer, ["the quick", "zzzz" * 48], Sampling(), output)
    assert output.getvalue() == ""
