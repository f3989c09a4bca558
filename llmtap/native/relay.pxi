# The relay's part: receive, scan the framing, send, append the frame. Python twins: net/stream.py, net/lag.py,
# wire/http1.py, tap/channel.py.

cdef extern from "framing.h" nogil:
    int llmtap_framing_abi()

FRAMING_ABI = llmtap_framing_abi()
