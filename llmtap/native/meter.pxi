# The meter's part: recognise token events that differ only in their text. Python twins: wire/repetition.py,
# record/observer.py.

cdef extern from "matcher.h" nogil:
    int llmtap_matcher_abi()

MATCHER_ABI = llmtap_matcher_abi()
