"""Tries grammars, as a process of its own: llguidance (1.9.1) may take minutes for a small one, or overflow its stack and end its process.

Run as a program it reads a job a line, and answers with a line each. It imports nothing else of the core, so that it starts in 0.1 s.
"""

import json
import sys
import threading

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

__all__ = ["do"]

# A quarter of what threads have elsewhere: what passes here has room where it is compiled.
STACK_BYTES = 2 * 1024 * 1024


def do(kind: str, text: str, fuel: int) -> tuple[bool, str]:
    """Whether it went well, and what came of it.

    kind: `gbnf`, which gives Lark, or `try` of llguidance's list of grammars. fuel: of a lexer that it makes.
    """
    if kind == "gbnf":
        try:
            return True, gbnf_to_lark(text)
        except Exception as error:  # the converter raises several
            return False, f"it cannot be read as GBNF: {str(error)[:300]}"
    limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=fuel)
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
    return not failed, " ".join(messages).replace("<non-verbose/>", "").strip()[:500] if failed else ""


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        sys.stdout.write(json.dumps(do(kind, text, int(sys.argv[1]))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
