"""The ten tests of the IETF draft, a module each, and the loads of two of them (`mixes`).

Each module of a test declares it as `TEST`; `bench/run/perform.py` calls its `check` and `run` with a
session, which sends the loads, and the parameters.
"""
