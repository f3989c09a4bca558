"""Reading of answers that have no known dialect, by the structure of their events.

`infer` returns a reader for an answer, and `draft_table` a table in TOML for a user to check. `structure.py`
finds places of output, counts and ends; `tables.py` makes a table of them; `reader.py` reads with this table;
`candidates.py` finds values that the table possibly lacks.
"""

from llmtap.protocol.structure.draft import draft_table as draft_table
from llmtap.protocol.structure.reader import InferredReader as InferredReader
from llmtap.protocol.structure.reader import infer as infer
from llmtap.protocol.structure.structure import Structure as Structure
