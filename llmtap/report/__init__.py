"""Reports: documents made of public JSON, and their renderers for a terminal, Markdown and HTML."""
