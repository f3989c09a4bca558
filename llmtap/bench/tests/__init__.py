"""The ten tests of the IETF draft, with a module for each, and the loads of two of them (`mixes`).

The module of a test declares it as `TEST`. `bench/run/perform.py` calls `check` and `run` of this declaration
with a session, which sends the loads, and with the parameters.
"""
