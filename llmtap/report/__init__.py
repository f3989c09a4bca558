"""Reports for a terminal, as Markdown and as HTML pages, made from the public JSON of results.

Modules named after a result (`replay`, `capture`, `bench`, `sweep`) turn JSON into blocks of text, tables and
charts (`document`), which `render` outputs.
"""
