"""Dialects that are tables: their declaration (`declaration.py`), compiled (`dialect.py`), and their reader.

Other packages use `DialectTable` and `decode_table` (`declaration.py`) and `notes_on` (`notes.py`).
"""
