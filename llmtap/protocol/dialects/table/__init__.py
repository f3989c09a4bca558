"""Dialects that are tables: declaration (`declaration.py`), compiled rules (`rules.py`) and reader
(`reader.py`).

Other packages use `DialectTable` and `decode_table` (`declaration.py`) and `notes_on` (`notes.py`).
"""
