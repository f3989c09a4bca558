"""KV memory of one simulated server: blocks owned by one request, and blocks shared between prompts.

The `Roster` (`roster.py`) asks how many blocks a request needs, and takes and releases them. This module only
counts; it stores no KV. A block has a fixed number of tokens. With a prefix cache, whole blocks of prompts
have names, equal for equal beginnings; a named block is in memory once. A named block that was computed and
that no request holds stays cached until its place is needed; the least recently used is evicted first, and of
one prompt the later block before the earlier. All other blocks are free once released.

A named block has as many tokens as the workload says (`Requests.block_tokens`), and fills whole blocks of
memory, the last perhaps in part.
"""

from collections import OrderedDict
from collections.abc import Sequence


class Memory:
    """Memory of one server. Sizes are in blocks unless they say tokens."""

    def __init__(self, tokens: int, block: int, named_tokens: int = 0) -> None:
        """`named_tokens` of a named block; 0 without names."""
        self.blocks = tokens // block
        self.held = 0
        self.named_tokens = named_tokens
        self._block = block
        self._named = self.size(named_tokens)
        self._holders: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Named blocks without holders that are still cached; the next to be evicted is first."""

    @property
    def free(self) -> int:
        return self.blocks - self.held

    @property
    def kept(self) -> int:
        return len(self._kept) * self._named

    def size(self, tokens: int) -> int:
        return -(-tokens // self._block)

    def whole(self, tokens: int, names: Sequence[int] = ()) -> int:
        """Return the size of these tokens, the first of which are the blocks `names`, if none is cached."""
        return self.size(tokens - len(names) * self.named_tokens) + len(names) * self._named

    def needed(self, tokens: int, names: Sequence[int] = ()) -> int:
        """Return how many more blocks holding this would take."""
        holders = self._holders
        shared = sum(name in holders for name in names) if names else 0
        return self.whole(tokens, names) - shared * self._named

    def found(self, names: Sequence[int]) -> int:
        count = 0
        for name in names:
            if name not in self._holders and name not in self._kept:
                break
            count += 1
        return count

    def hold(self, tokens: int, names: Sequence[int] = ()) -> None:
        holders, kept = self._holders, self._kept
        size = self.size(tokens - len(names) * self.named_tokens)
        for name in names:
            if name in holders:
                holders[name] += 1
            else:
                holders[name] = 1
                kept.pop(name, None)
                size += self._named
        self.take(size)

    def take(self, blocks: int) -> None:
        """Hold more blocks; evict cached ones as needed."""
        self.held += blocks
        assert self.held <= self.blocks, "more memory is held than there is"
        kept = self._kept
        while kept and self.held + len(kept) * self._named > self.blocks:
            kept.popitem(last=False)

    def release(self, tokens: int, names: Sequence[int] = (), computed: int = 0) -> None:
        """Release these tokens. Named blocks within the first `computed` tokens stay cached."""
        holders, kept = self._holders, self._kept
        size = self.size(tokens - len(names) * self.named_tokens)
        for i in range(len(names) - 1, -1, -1):
            name = names[i]
            if holders[name] > 1:
                holders[name] -= 1
            else:
                del holders[name]
                size += self._named
                if (i + 1) * self.named_tokens <= computed:
                    kept[name] = None
        self.held -= size
        assert self.held >= 0
