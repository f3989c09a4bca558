"""Measure from network packets (`llmtap watch`): convert them to the frames that a relay sends to the meter.

`ConnectionTable` gets IP packets and reports exchanges to a `FrameSink`: the channel to the meter, or the
reader of a capture file. `ring` and `file_vantage` read packets, `segments` parses their headers and
orders the bytes of a connection, `conversation` finds its HTTP/1.1 messages. `watcher` is the live process.
"""
