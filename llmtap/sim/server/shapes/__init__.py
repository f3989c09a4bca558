"""How answers look on the wire: one file per API, each from what is said to bytes. Pure."""
