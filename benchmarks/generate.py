"""`generate()` of transformers over the chat workload, in a process of its own that waits for commands: what chat is compared with.

`python -m benchmarks.generate FOLDER DTYPE`; a line "B" on standard input is answered by output tokens a second of a batch of B prompts.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.workload import CHAT_TOKENS, chat_messages

__all__ = ["main"]


@torch.inference_mode()
def rate(model: Any, tokenizer: Any, conversations: list[Any]) -> float:
    """Output tokens a second of one batch, padded on the left, chat template and tokenizer included, as a server's clock includes them."""
    started = time.perf_counter()
    given = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True, padding_side="left"
    )
    out = model.generate(**given, max_new_tokens=CHAT_TOKENS, min_new_tokens=CHAT_TOKENS, do_sample=False)
    tokenizer.batch_decode(out[:, given["input_ids"].shape[1] :])
    return len(conversations) * CHAT_TOKENS / (time.perf_counter() - started)


def main() -> None:
    """Answer until the input ends."""
    logging.set_verbosity_error()
    folder, dtype = sys.argv[1:3]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    conversations = itertools.cycle(chat_messages())
    rate(model, tokenizer, [next(conversations)])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(rate(model, tokenizer, [next(conversations) for _ in range(int(line))])), flush=True)


if __name__ == "__main__":
    main()
