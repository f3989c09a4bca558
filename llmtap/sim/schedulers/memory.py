"""The KV memory of a server: who holds how many blocks of it, and what prompts share.

Memory is handed out in blocks of a fixed number of tokens. Whoever holds some has as many whole blocks as its
tokens fill or begin. With a prefix cache the whole blocks of prompts have names: two prompts that begin alike
name the same ones, and those are in memory once, however many hold them. When nobody does any longer they
stay, as long as nobody needs their place; of these, the least recently used goes first, and of one prompt the
later block before the earlier, since it is of no use without it.

A named block has as many tokens as the workload says (`Requests.block_tokens`: 16 in some traces, 512 in
others), whatever the memory's own blocks have. It fills whole blocks of memory, the last perhaps in part.
"""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["Memory"]


class Memory:
    """Sizes are in blocks, where they do not say tokens."""

    def __init__(self, tokens: int, block: int, named_tokens: int = 0) -> None:
        """`named_tokens`: of a block with a name; 0 where none has one."""
        self.blocks = tokens // block
        self.held = 0
        """By somebody. Never more than there are."""
        self.named_tokens = named_tokens
        self._block = block
        self._named = self.size(named_tokens)
        self._holders: dict[int, int] = {}
        """Of each named block that is held: how many hold it."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Named blocks that nobody holds, and that are still there; the next to go is first."""

    @property
    def free(self) -> int:
        """Blocks that can be had."""
        return self.blocks - self.held

    @property
    def kept(self) -> int:
        """Blocks that nobody holds, and in which there still is what they had. They are free."""
        return len(self._kept) * self._named

    def size(self, tokens: int) -> int:
        """How many blocks so many tokens fill or begin."""
        return -(-tokens // self._block)

    def whole(self, tokens: int, names: Sequence[int] = ()) -> int:
        """The size of so many tokens, the first of which are the blocks `names`, if none of them is there."""
        return self.size(tokens - len(names) * self.named_tokens) + len(names) * self._named

    def needed(self, tokens: int, names: Sequence[int] = ()) -> int:
        """How many more blocks would be held if somebody held this."""
        holders = self._holders
        shared = sum(name in holders for name in names) if names else 0
        return self.whole(tokens, names) - shared * self._named

    def found(self, names: Sequence[int]) -> int:
        """How many of these, from the first one on, are there."""
        count = 0
        for name in names:
            if name not in self._holders and name not in self._kept:
                break
            count += 1
        return count

    def hold(self, tokens: int, names: Sequence[int] = ()) -> None:
        """Somebody holds so many tokens, the first of which are the blocks `names`."""
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
        """Somebody holds so many more."""
        self.held += blocks
        assert self.held <= self.blocks, "more memory is held than there is"
        kept = self._kept
        while kept and self.held + len(kept) * self._named > self.blocks:
            kept.popitem(last=False)

    def release(self, tokens: int, names: Sequence[int] = (), computed: int = 0) -> None:
        """Somebody holds them no longer. What is in the first `computed` tokens stays, if it has names."""
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
