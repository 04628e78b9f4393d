"""Who has which block of the key-value cache, and which blocks hold what another prompt begins with. Pure: numbers alone, no tensor.

A full block is known by a chain: a hash of its tokens, of the block before it, and at the beginning of whatever else its contents depend on
(a salt). A hit is compared token by token, so that two prompts of one hash are never taken for each other. A block that nobody holds any
more keeps its contents until it is needed: the least recently used goes first, one by one, the end of a prompt before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["BlockPool", "Held"]


class Held:
    """The blocks of one sequence, in order. num_cached: leading tokens that were computed before, by whomever.

    salt: sequences of different ones share nothing.
    """

    __slots__ = ("blocks", "num_cached", "num_known", "parent", "salt")

    def __init__(self, salt: bytes = b"") -> None:
        self.salt = salt
        self.blocks: list[int] = []
        self.num_cached = 0
        # Leading blocks that others may find, and the chain's hash after them.
        self.num_known = 0
        self.parent = hash(salt)


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. share: whether prompts find each other's blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, share: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache has at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._share = share
        self._refs = [0] * num_blocks
        # Blocks without contents, and those with some that nobody holds, least recently used first.
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        # chain's hash -> block, and of each known block its hash, the hash before it, and its tokens.
        self._found: dict[int, int] = {}
        self._known: dict[int, tuple[int, int, bytes]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be had."""
        return len(self._empty) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-num_tokens // self.block_size)

    def match(self, held: Held, token_ids: bytes) -> int:
        """Take over what is known of a prompt that has no block yet; returns how many of its tokens that is.

        token_ids: int32. The last token is never taken over: its logits are wanted.
        """
        assert not held.blocks
        if not self._share:
            return 0
        size = self.block_size
        for start in range(0, (len(token_ids) // 4 - 1) // size * size, size):
            tokens = token_ids[4 * start : 4 * (start + size)]
            key = hash((held.parent, tokens))
            block = self._found.get(key)
            if block is None or self._known[block] != (key, held.parent, tokens):
                break
            self._take(block)
            held.blocks.append(block)
            held.parent = key
        held.num_known = len(held.blocks)
        held.num_cached = held.num_known * size
        return held.num_cached

    def grow(self, held: Held, num_tokens: int) -> bool:
        """Have blocks for so many tokens in all; False, and nothing changed, if there are not as many."""
        missing = self.blocks_for(num_tokens) - len(held.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            held.blocks.append(self._fresh())
        return True

    def publish(self, held: Held, token_ids: bytes, num_computed: int) -> None:
        """Let others find the blocks that are full. num_computed: leading tokens whose keys and values are in the cache."""
        if not self._share:
            return
        size = self.block_size
        for number in range(held.num_known, num_computed // size):
            tokens = token_ids[4 * number * size : 4 * (number + 1) * size]
            key = hash((held.parent, tokens))
            block = held.blocks[number]
            if key not in self._found:  # else somebody has computed the same at the same time: theirs stays the known one
                self._found[key] = block
                self._known[block] = (key, held.parent, tokens)
            held.parent = key
            held.num_known = number + 1

    def release(self, held: Held) -> None:
        """Give all blocks back. What others may find stays until its place is needed."""
        for block in reversed(held.blocks):  # the end first, so that it is older than the beginning
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._known:
                    self._idle[block] = None
                else:
                    self._empty.append(block)
        held.blocks = []
        held.num_cached = held.num_known = 0
        held.parent = hash(held.salt)

    def forget(self, held: Held) -> list[int]:
        """Give all blocks back, and let nobody find their contents; returns those that nobody else holds."""
        for block in held.blocks:
            if block in self._known:
                del self._found[self._known.pop(block)[0]]
        blocks = [block for block in held.blocks if self._refs[block] == 1]
        self.release(held)
        return blocks

    def _take(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._idle[block]
        self._refs[block] += 1

    def _fresh(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._found[self._known.pop(block)[0]]
        self._refs[block] = 1
        return block
