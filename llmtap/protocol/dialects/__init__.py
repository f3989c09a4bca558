"""Parsers of stream dialects, one file each. ADDING.md describes how to add one."""
