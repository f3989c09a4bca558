"""Gates for CI: requirements on the figures of a result, and the limit of a regression between two results.

`figures.py` is the table of figures with their places in public JSON, `requirements.py` judges `--require` of
`replay`, `bench`, `report` and `sim run`, and `regression.py` judges `--fail-if-worse` of `report --compare`.
These modules take public JSON and return public JSON, which `report/gates.py` renders.
"""
