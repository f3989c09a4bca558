"""Newline-delimited JSON: bytes of a body to lines, whatever way the bytes were cut.

A line ends in LF or CR LF; the last one of a body may lack it. Each line is one event, so it is reported
in the form that event streams have. An empty line says nothing but that the server lives.

Source: ndjson.org, jsonlines.org; shared/dialects/dialects.md section 1 (units).
"""

from llmtap.protocol.sse import EVENT_BYTES_MAX, SseEvent

__all__ = ["LineParser"]


class LineParser:
    """Cuts one body into lines. Any cut of the bytes gives the same ones.

    Keeps the bytes of one unfinished line, at most `line_bytes_max` of them: a longer line is passed over to
    its end and counted in `skipped`.
    """

    __slots__ = ("_line_bytes_max", "_size", "_tail", "offset", "skipped")

    def __init__(self, line_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.offset = 0
        """Bytes of the body seen so far."""
        self.skipped = 0
        """Lines longer than `line_bytes_max`."""
        self._line_bytes_max = line_bytes_max
        self._tail = bytearray()
        self._size = 0  # bytes of the unfinished line, kept or not

    def feed(self, data: bytes) -> list[SseEvent]:
        """The lines that these bytes complete."""
        out: list[SseEvent] = []
        begin = 0
        while (newline := data.find(b"\n", begin)) >= 0:
            self._keep(data[begin : newline + 1])
            begin = newline + 1
            self._end(out)
        self._keep(data[begin:])
        return out

    def close(self) -> list[SseEvent]:
        """The line that the end of the body completes, if any."""
        out: list[SseEvent] = []
        if self._size:
            self._end(out)
        return out

    def _keep(self, part: bytes) -> None:
        self.offset += len(part)
        self._size += len(part)
        if self._size > self._line_bytes_max:
            self._tail.clear()
        else:
            self._tail += part

    def _end(self, out: list[SseEvent]) -> None:
        if self._size > self._line_bytes_max:
            self.skipped += 1
        else:
            line = bytes(self._tail).rstrip(b"\r\n")
            out.append(SseEvent(self.offset - self._size, self.offset, line))
        self._tail.clear()
        self._size = 0
