"""The passive vantage: converts packets of an interface or a file to the frames of a relay.

`ConnectionTable` takes IP packets and reports exchanges to a `FrameSink`: the channel to the meter, or the
reader of a capture file. `segments` parses headers, `reassembly` orders bytes, `conversation` cuts HTTP/1.1
messages, `ring` and `pcap_file` bring packets, `watcher` is the live process.
"""
