"""What prompt lookup tries and gets right, counted and not timed: ``python -m bench.drafts``.

`ranks.drafts` is asked as a rank asks it, over text whose every token is known: greedy output of the embedded model for
the prompts of `bench.speculation`, and files of this repository, which no model wrote. The cost of a request is 1 for
each step, and so much of that for each draft as the columns say.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.scheduler import ROOT
from bench.speculation import LONG_OUTPUT, WORKLOADS
from bus import model_files
from bus.config import Config, load
from ranks.drafts import PromptLookup

DRAFT_COSTS = (0.05, 0.15, 0.3, 0.5)
PROMPTS = 4
PROMPT_TOKENS = 300
FILES = {
    "Python written by people": ("ranks/native.py", "frontend/client.py"),
    "prose": ("docs/scheduler.md", "docs/replay.md", "docs/sessions.md"),
}
FILE_TOKENS = 900

Text = tuple[list[int], list[int]]
"""Tokens of a prompt, and those that come after it."""


def texts(folder: Path) -> Iterator[tuple[str, list[Text]]]:
    """Kinds of texts."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, make in WORKLOADS.items():
        prompts = [tokenizer.encode(make(100 + number)).ids for number in range(PROMPTS)]
        yield name, [(prompt, continued(model, prompt)) for prompt in prompts]
    for name, files in FILES.items():
        read = [tokenizer.encode((ROOT / file).read_text()).ids for file in files]
        yield name, [(tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS : PROMPT_TOKENS + FILE_TOKENS]) for tokens in read]


def continued(model: AutoModelForCausalLM, prompt: list[int]) -> list[int]:
    """What the model says after a prompt, greedily."""
    ids = torch.tensor([prompt])
    count = {"max_new_tokens": LONG_OUTPUT, "min_new_tokens": LONG_OUTPUT, "do_sample": False}
    found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **count)[0, len(prompt) :].tolist()
    return found


def counted(source: PromptLookup, text: Text) -> tuple[int, int, int, int]:
    """Tokens, steps, drafts that were tried, and those that were right."""
    prompt, output = text
    source.begin(0)
    tokens = np.array(prompt + output, np.int32)
    at, steps, tried, right = 1, 1, 0, 0  # the prompt's step gives the first token
    while at < len(output):
        drafts = source.drafts(0, tokens[: len(prompt) + at], len(output) - at - 1)
        agree = 0
        while agree < len(drafts) and drafts[agree] == output[at + agree]:
            agree += 1
        if drafts:
            source.judged(0, agree)
        at, steps, tried, right = at + 1 + agree, steps + 1, tried + len(drafts), right + agree
    return len(output), steps, tried, right


def main() -> None:
    columns = ("steps", "tried", "right", *(f"speed at {cost}" for cost in DRAFT_COSTS))
    table = Table("per token", *columns, title="Prompt lookup")
    for name, several in texts(model_files.resolve(load()).folder):
        counts = [counted(PromptLookup(Config()), text) for text in several]
        length, steps, tried, right = (sum(column) for column in zip(*counts, strict=True))
        per_token = [f"{count / length:.2f}" for count in (steps, tried, right)]
        table.add_row(name, *per_token, *(f"{length / (steps + cost * tried):.2f}" for cost in DRAFT_COSTS))
    Console().print(table)


if __name__ == "__main__":
    main()
