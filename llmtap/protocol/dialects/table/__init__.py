"""Dialects that are tables: `declaration.py` declares them, `rules.py` compiles, `reader.py` reads answers.

Other packages use `DialectTable` and `decode_table` (`declaration.py`) and `notes_on` (`notes.py`).
"""
