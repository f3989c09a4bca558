"""Data sets that define workloads and that llmtap does not contain: their names and where they are published.

`registry.py` names them if a file is missing. `ietf.py` describes a workload with generated texts as their
stand-in, and the checks of compliance name them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PublishedDataSet:
    """A data set that llmtap does not contain, because others hold the rights."""

    title: str
    place: str
    """Name and file of the data set on the Hugging Face Hub."""
    kind: str
    """Kind of the workload that reads it."""

    @property
    def where_text(self) -> str:
        return f"the data set is {self.place} on the Hugging Face Hub, and {self.kind}:FILE uses it"

    def stand_in_text(self, statistics: str) -> str:
        """Return a sentence on the missing file. `statistics`: description of the texts that replace it."""
        return (
            f"no file of {self.title} was given, so this is a licence-free generated stand-in, with"
            f" {statistics}; {self.where_text}"
        )


PUBLISHED: Final[Mapping[str, PublishedDataSet]] = {
    data_set.kind: data_set
    for data_set in (
        PublishedDataSet(
            "ShareGPT (A.3.1)",
            "anon8231489123/ShareGPT_Vicuna_unfiltered (ShareGPT_V3_unfiltered_cleaned_split.json)",
            "conversation",
        ),
        PublishedDataSet(
            "The Stack (A.4.1)",
            "bigcode/the-stack (data/python, data/javascript, data/typescript)",
            "code-completion",
        ),
        PublishedDataSet(
            "Sharegpt_gpt4", "shibing624/sharegpt_gpt4 (sharegpt_gpt4.jsonl)", "long-conversation"
        ),
    )
}
"""By kind of workload: the data set that defines it."""
