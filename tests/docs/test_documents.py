"""Pages cut into blocks, by hand-made pages."""

from tests.docs.documents import Block, blocks, commands

PAGE = """\
# A page

```sh
one    # with a word on it
two \\
  --more
# nothing to run

```

<!-- not run: needs a cluster -->

```bash
three
```

<!-- not run: of the block before -->
Words between.

````toml title="a/llmtap.toml"
[relay]
```
````

- in a list

    ```console
    $ four
    its answer
    ```

~~~
no language
~~~
"""


def test_blocks_have_their_language_title_line_and_reason() -> None:
    assert list(blocks(PAGE)) == [
        Block(3, "sh", None, "one    # with a word on it\ntwo \\\n  --more\n# nothing to run\n\n", None),
        Block(13, "bash", None, "three\n", "needs a cluster"),
        Block(20, "toml", "a/llmtap.toml", "[relay]\n```\n", None),
        Block(27, "console", None, "$ four\nits answer\n", None),
        Block(32, "", None, "no language\n", None),
    ]


def test_commands_are_lines_or_several_with_backslashes() -> None:
    first, second, _, fourth, _ = blocks(PAGE)
    assert commands(first) == ["one    # with a word on it", "two    --more"]
    assert commands(second) == ["three"]
    assert commands(fourth) == ["four"]
