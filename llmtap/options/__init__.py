"""Options: a field of a msgspec struct with a described type is their only declaration.

`fields.py` declares and describes options, for help, documentation and lists. `values.py` reads and checks
one value by its type: of decoded TOML, or of a text from a flag, the environment, `--set` or a request
header. `tables.py` collects values of many keys from several sources, with the place of each, and makes the
structs or reports all mistakes. The flags of commands are derived in `cli/flags.py`.
"""
