# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=False
"""The compiled code: types in Cython; matcher, framing, heads and numbers in plain C.

Each type has a Python twin that is the reference, and falls back to it for everything unusual.
"""

cdef extern from *:
    const char* LLMTAP_FINGERPRINT

FINGERPRINT = LLMTAP_FINGERPRINT.decode()
"""Fingerprint of the sources that this module was built from (fingerprint.py)."""

include "meter.pxi"
include "gaps.pxi"
include "heads.pxi"
include "relay.pxi"
include "forwarder.pxi"
