"""The Exchange (record of one request and its answer), and the sans-IO code that builds one from bytes.

`exchange.py` is the record. `observer.py` builds it from timestamped bytes; `request.py`, `answer.py` and
`verdict.py` parse and judge its parts.
"""
