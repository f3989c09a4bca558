"""YAML as people read it: what is written comes back, in its order, spelled out."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmtap.slo.document import commented, to_yaml

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=300)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(DOCUMENTS)
def test_what_is_written_comes_back(document: object) -> None:
    assert yaml.safe_load(to_yaml(document)) == document


def test_keys_keep_their_order_and_queries_their_lines() -> None:
    text = to_yaml([{"record": "b", "expr": "sum(\n  a\n)\n", "labels": {"z": "1", "a": "2"}}])
    assert text == "- record: b\n  expr: |\n    sum(\n      a\n    )\n  labels:\n    z: '1'\n    a: '2'\n"


def test_what_occurs_twice_is_written_twice() -> None:
    labels = {"a": "b"}
    assert "&" not in to_yaml([labels, labels])


def test_comments_are_wrapped_and_further_lines_indented() -> None:
    text = commented([" ".join(["word"] * 40), "short"], (0, 2))
    first, second, third = text.splitlines()
    assert first.startswith("# word word")
    assert second.startswith("#   word")
    assert third == "# short"
    assert max(map(len, text.splitlines())) <= 110
