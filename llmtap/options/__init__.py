"""Options: each is declared only once, as a field of a msgspec struct whose type has a description.

`fields.py` declares and describes options, for help, documentation and lists. `values.py` converts and checks
one value by its type; the value is decoded TOML, or a text from a flag, the environment, `--set` or a request
header. `tables.py` collects the values of many keys from several sources, with the place of each, and makes
structs from them or reports all mistakes. `cli/flags.py` derives the flags of commands.
"""
