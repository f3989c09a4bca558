# Compiled code of the relay: forward a read of a body from socket to socket, and add a frame of it to the tap.
# Python twins: net/lag.py (LagMeter), channel/frames.py (FrameRows), net/stream.py (Reader),
# vantage/relay/flow.py (FlowState, Passage).

from cpython.mem cimport PyMem_Calloc, PyMem_Realloc
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport UINT32_MAX, uint8_t, uint64_t
from libc.string cimport memmove, strerror

cdef extern from "framing.h" nogil:
    int64_t llmtap_chunks_left(const unsigned char *data, size_t len, int64_t left)

cdef extern from "reading.h" nogil:
    enum:
        LLMTAP_UNSTAMPED
        READ_BYTES_MAX "LLMTAP_READ_BYTES_MAX"
        MAPPING_NS "LLMTAP_MAPPING_NS"
        LAG_DOUBT_NS "LLMTAP_LAG_DOUBT_NS"
    struct llmtap_received:
        pass
    void llmtap_add_read(llmtap_received *received, size_t size, size_t room)
    bint llmtap_came_at_once(llmtap_received *received, int fd, const unsigned char *data, size_t size)
    bint llmtap_out_of_order(int fd)
    int64_t llmtap_mono_ns()
    Py_ssize_t llmtap_receive(int fd, void *to, size_t room, int stamped, int64_t *wall_ns)
    Py_ssize_t llmtap_peek(int fd)
    Py_ssize_t llmtap_send(int fd, const void *data, size_t len)

cdef extern from "forwarder.h" nogil:
    enum:
        FRAME_BYTES "LLMTAP_FRAME_BYTES"
        LAG_BUCKETS "LLMTAP_LAG_BUCKETS"
    ctypedef struct Row "struct llmtap_row":
        int64_t seq
        int64_t t_ns
        int64_t extra_ns
        uint32_t size
        uint8_t kind
    struct llmtap_rows:
        Row *rows
        char *data
        size_t n, data_bytes, drops
    struct llmtap_lags:
        int64_t *counts
        int64_t sum_ns, max_ns

cdef class Loan
cdef class Forwarder

cdef enum:
    PEAKS_MAX = 4096
    HELLO = 1  # FrameKind.HELLO
    MAGIC = 0x4C4C5402

cdef int64_t[15] LAG_EDGES_NS = [
    50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000,
    100_000_000, 200_000_000, 500_000_000, 1_000_000_000, 5_000_000_000,
]

ctypedef struct Peak:
    int64_t t_ns
    int64_t lag_ns


cdef class LagMeter:
    """Twin of `PythonLagMeter` in net/lag.py."""

    cdef readonly int64_t floor_ns, sum_ns, max_ns
    cdef int64_t blind_ns, turns
    cdef int64_t counts[16]  # number of lags by bucket, as in channel/status.py
    cdef Peak *peaks  # ring buffer; from `first` on, each lag is lower than the one before
    cdef Py_ssize_t first, n

    def __cinit__(self, int64_t floor_ns, *, int64_t blind_ns=0, int64_t turns=1):
        self.floor_ns = floor_ns
        self.blind_ns, self.turns = blind_ns, turns
        self.peaks = <Peak *> PyMem_Calloc(PEAKS_MAX, sizeof(Peak))
        if self.peaks == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.peaks)

    cdef inline Peak *peak(self, Py_ssize_t i) noexcept:
        return &self.peaks[(self.first + i) % PEAKS_MAX]

    @property
    def buckets(self):
        return [self.counts[i] for i in range(LAG_BUCKETS)]

    def note(self, int64_t t_ns, int64_t lag_ns):
        self.add(t_ns, lag_ns)

    cdef void add(self, int64_t t_ns, int64_t lag_ns) noexcept:
        cdef int i = 0
        while i < LAG_BUCKETS - 1 and lag_ns > LAG_EDGES_NS[i]:
            i += 1
        self.counts[i] += 1
        self.sum_ns += lag_ns
        self.add_peak(t_ns, lag_ns)

    cdef void add_peak(self, int64_t t_ns, int64_t lag_ns) noexcept:
        self.max_ns = max(self.max_ns, lag_ns)
        if lag_ns <= self.floor_ns:
            return
        while self.n and self.peak(self.n - 1).lag_ns <= lag_ns:
            self.n -= 1
        if self.n == PEAKS_MAX:
            # Merge the two oldest peaks: the older lag, which is larger, at the later time.
            self.peak(1).lag_ns = self.peak(0).lag_ns
            self.first = (self.first + 1) % PEAKS_MAX
            self.n -= 1
        self.peak(self.n).t_ns = t_ns
        self.peak(self.n).lag_ns = lag_ns
        self.n += 1

    cdef void add_all(self, const llmtap_lags *lags) noexcept:
        """Add the lags of the forwarding thread. The longest one gets the present time, as its own is unknown."""
        for i in range(LAG_BUCKETS):
            self.counts[i] += lags.counts[i]
        self.sum_ns += lags.sum_ns
        self.add_peak(llmtap_mono_ns(), lags.max_ns)

    def worst_since(self, int64_t t_ns):
        cdef Py_ssize_t low = 0, high = self.n, middle
        while low < high:
            middle = (low + high) // 2
            if self.peak(middle).t_ns < t_ns:
                low = middle + 1
            else:
                high = middle
        cdef int64_t worst = self.peak(low).lag_ns * self.turns if low < self.n else self.floor_ns
        return worst + self.blind_ns

    def forget_before(self, int64_t t_ns):
        while self.n > 1 and self.peak(0).t_ns < t_ns:
            self.first = (self.first + 1) % PEAKS_MAX
            self.n -= 1

    def take_max(self):
        worst, self.max_ns = self.max_ns, 0
        return worst


cdef class FrameRows:
    """Twin of `PythonFrameRows` in channel/frames.py."""

    cdef public int64_t bound, epoch
    cdef readonly int64_t size
    cdef Row *rows
    cdef char *data
    cdef Py_ssize_t n, room, data_bytes, data_room

    def __cinit__(self):
        self.rows = <Row *> _grown(NULL, &self.room, 1, sizeof(Row))
        self.data = <char *> _grown(NULL, &self.data_room, 1, 1)

    def __dealloc__(self):
        PyMem_Free(self.rows)
        PyMem_Free(self.data)

    def __len__(self):
        return self.n

    def put(self, uint8_t kind, int64_t seq, int64_t t_ns, int64_t extra_ns, bytes data not None):
        self.append(kind, seq, t_ns, extra_ns, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    def add(self, uint8_t kind, int64_t seq, int64_t t_ns, int64_t extra_ns, bytes data not None):
        return self.append_within(kind, seq, t_ns, extra_ns, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    cdef bint append_within(
        self, uint8_t kind, int64_t seq, int64_t t_ns, int64_t extra_ns, const char *data, Py_ssize_t size
    ) except -1:
        if not self.n or self.size + size + FRAME_BYTES > self.bound:
            return 0
        self.append(kind, seq, t_ns, extra_ns, data, size)
        return 1

    cdef int append(
        self, uint8_t kind, int64_t seq, int64_t t_ns, int64_t extra_ns, const char *data, Py_ssize_t size
    ) except -1:
        cdef Row *row
        if size > UINT32_MAX:
            raise OverflowError(f"a frame of {size} bytes")
        if self.n == self.room:
            self.rows = <Row *> _grown(self.rows, &self.room, self.n + 1, sizeof(Row))
        if self.data_bytes + size > self.data_room:
            self.data = <char *> _grown(self.data, &self.data_room, self.data_bytes + size, 1)
        row = &self.rows[self.n]
        row.kind, row.seq, row.t_ns, row.extra_ns, row.size = kind, seq, t_ns, extra_ns, <uint32_t> size
        memcpy(self.data + self.data_bytes, data, size)
        self.n += 1
        self.data_bytes += size
        self.size += size + FRAME_BYTES
        return 0

    cdef int append_all(self, const llmtap_rows *frames) except -1:
        cdef Py_ssize_t n = frames.n, data_bytes = frames.data_bytes
        if self.n + n > self.room:
            self.rows = <Row *> _grown(self.rows, &self.room, self.n + n, sizeof(Row))
        if self.data_bytes + data_bytes > self.data_room:
            self.data = <char *> _grown(self.data, &self.data_room, self.data_bytes + data_bytes, 1)
        memcpy(self.rows + self.n, frames.rows, n * sizeof(Row))
        memcpy(self.data + self.data_bytes, frames.data, data_bytes)
        self.n += n
        self.data_bytes += data_bytes
        self.size += data_bytes + n * FRAME_BYTES
        return 0

    def pack(self, uint64_t batch_no, news=None):
        """Return all frames as one batch, and remove them. `news`: frame to put before all except HELLO."""
        if news is not None:
            self.put(*news)
            self.to_front(1 if self.rows[0].kind == HELLO else 0)
        cdef Py_ssize_t n = self.n, i
        cdef bytes batch = PyBytes_FromStringAndSize(NULL, COLUMNS_AT + 29 * n + self.data_bytes)
        cdef char *head = PyBytes_AS_STRING(batch)
        cdef uint32_t[3] counts = [MAGIC, <uint32_t> n, <uint32_t> self.data_bytes]
        memcpy(head, counts, 12)
        memcpy(head + 12, &batch_no, 8)
        cdef char *kinds = head + COLUMNS_AT
        cdef char *seqs = kinds + n
        cdef char *lengths = seqs + 24 * n
        for i in range(n):
            kinds[i] = <char> self.rows[i].kind
            memcpy(seqs + 8 * i, &self.rows[i].seq, 8)
            memcpy(seqs + 8 * (n + i), &self.rows[i].t_ns, 8)
            memcpy(seqs + 8 * (2 * n + i), &self.rows[i].extra_ns, 8)
            memcpy(lengths + 4 * i, &self.rows[i].size, 4)
        memcpy(lengths + 4 * n, self.data, self.data_bytes)
        self.clear()
        return batch

    cdef int to_front(self, Py_ssize_t at) except -1:
        """Move the last frame to index `at`."""
        cdef Row last = self.rows[self.n - 1]
        cdef Py_ssize_t before = 0, i
        for i in range(at):
            before += self.rows[i].size
        cdef bytes data = PyBytes_FromStringAndSize(self.data + self.data_bytes - last.size, last.size)
        memmove(self.data + before + last.size, self.data + before, self.data_bytes - before - last.size)
        memcpy(self.data + before, PyBytes_AS_STRING(data), last.size)
        memmove(&self.rows[at + 1], &self.rows[at], (self.n - 1 - at) * sizeof(Row))
        self.rows[at] = last
        return 0

    def clear(self):
        self.n = self.data_bytes = self.size = 0


cdef void *_grown(void *block, Py_ssize_t *room, Py_ssize_t wanted, size_t item) except NULL:
    """Enlarge a block of memory to at least `wanted` items. Return the block."""
    cdef Py_ssize_t fresh = wanted + wanted // 2 + 64
    block = PyMem_Realloc(block, fresh * item)
    if block == NULL:
        raise MemoryError
    room[0] = fresh
    return block


cdef class FlowState:
    """Twin of `PythonFlowState` in vantage/relay/flow.py."""

    cdef public int64_t seq, last_ns, response_bytes
    cdef public bint tapped
    cdef public object loan  # Loan while the forwarding thread has the body, else None


cdef enum:  # values of Framing in protocol/http1.py
    BY_LENGTH = 1
    BY_CHUNKS = 2
    BY_CLOSE = 3


cdef class Passage:
    """Forwards plain reads of an answer's body, as `Flow.on_data` does.

    A read is plain if the body continues after it, the framing is plain (framing.h), and no bytes wait to be sent.
    After a number of plain reads, the body goes to the forwarding thread, if there is one.
    """

    cdef FlowState flow
    cdef Reader client  # reader of the client's side: gives the stream and the descriptor that the answer is sent to
    cdef object scanner
    cdef FrameRows rows
    cdef int framing
    cdef int64_t epoch  # value of `rows.epoch` when the tap last confirmed that it measures the exchange
    cdef int64_t left  # remaining bytes of the body (BY_LENGTH) or chunk; -1: Python has to read the next bytes
    cdef Forwarder forwarder  # None: there is no thread, or the thread cannot take this body
    # reads_left: plain reads to forward here until the body is lent to the thread; reads_next: value of reads_left
    # at the latest attempt to lend, which increases with each attempt.
    cdef int64_t reads_left, reads_next

    def __cinit__(
        self, FlowState flow not None, Reader client not None, int framing, scanner, FrameRows rows not None,
        Forwarder forwarder=None,
    ):
        self.flow, self.client, self.framing, self.scanner = flow, client, framing, scanner
        self.rows, self.epoch = rows, rows.epoch
        if forwarder is not None and framing != BY_CLOSE:
            self.forwarder, self.reads_left = forwarder, forwarder.reads
            self.reads_next = forwarder.reads
        self.load()

    cdef int load(self) except -1:
        """Copy the state of the body from the scanner."""
        scanner = self.scanner
        if self.framing == BY_CLOSE:
            self.left = 0
        elif self.framing == BY_CHUNKS and (scanner.line_part or scanner.trailer_lines >= 0):
            self.left = -1
        else:
            self.left = scanner.left
        return 0

    cdef int store(self) except -1:
        """Copy the state of the body to the scanner."""
        if self.framing != BY_CLOSE and self.left >= 0:
            self.scanner.left = self.left
        return 0

    cdef int64_t left_behind(self, const unsigned char *data, Py_ssize_t size) noexcept:
        """Return how many bytes of the chunk (with its CR LF) or of the body follow `data`; -1: `data` is not plain."""
        if self.framing == BY_CHUNKS:
            return llmtap_chunks_left(data, size, self.left)
        if self.framing == BY_LENGTH:
            return self.left - size if self.left > size else -1
        return 0

    cdef bint take(self, Reader upstream, const unsigned char *data, Py_ssize_t size, int64_t t_ns) except -1:
        """Forward the bytes and return 1. Return 0 without any effect if the bytes are not plain."""
        client, flow = self.client.stream, self.flow
        if client is None or client.pending:
            return 0
        cdef int64_t left = self.left_behind(data, size), added_ns
        if left < 0:
            return 0
        cdef Py_ssize_t sent = llmtap_send(self.client.fd, data, size)
        if sent < 0:
            if errno != EAGAIN and errno != EINTR:
                (<object> flow).client_gone()
                return 1
            sent = 0
        self.left = left
        if sent < size:
            client.keep(PyBytes_FromStringAndSize(<const char *> data + sent, size - sent))
        flow.last_ns = t_ns
        flow.response_bytes += size
        if flow.tapped:
            added_ns = llmtap_mono_ns() - t_ns
            # In a new epoch, `offer_data` asks the tap whether this exchange is still measured.
            if self.rows.epoch != self.epoch or not self.rows.append_within(
                RESPONSE_AT_ONCE if upstream.at_once(data, size) else RESPONSE_DATA,
                flow.seq, t_ns, added_ns, <const char *> data, size
            ):
                (<object> flow).offer_data(t_ns, added_ns, PyBytes_FromStringAndSize(<const char *> data, size))
                self.epoch = self.rows.epoch
        if sent < size:
            (<object> flow).pause_upstream()
        return 1


# One buffer for all streams: the bytes of a read are forwarded or copied before other Python code reads again.
cdef unsigned char[READ_BYTES_MAX] _buffer


cdef class Reader:
    """The callback that reads a stream, as `KernelStream._readable`, or `PlainStream._readable` if not `stamped`.

    `passage`, if there is one, takes plain reads. Its flow is the stream's handler, and removes it at the body's end.
    """

    cdef object stream, timebase
    cdef LagMeter lag
    cdef int fd
    cdef bint stamped
    cdef public int64_t doubt_ns  # lag from which `stream.place` checks the stamp
    cdef llmtap_received received
    cdef int64_t unstamped_ns  # time of the last read without a timestamp of the kernel; 0: there was none
    cdef public Passage passage
    cdef Loan loan  # Loan while the forwarding thread has the socket, else None

    def __cinit__(self, stream, timebase, bint stamped):
        self.stream, self.timebase = stream, timebase
        self.lag = timebase.lag
        self.fd = stream.fileno()
        self.stamped = stamped
        self.doubt_ns = LAG_DOUBT_NS

    def reclaim(self):
        """Take the socket back from the forwarding thread, if it has it."""
        if self.loan is not None:
            self.loan.reclaim()

    def close(self):
        """Stop reading, because the file descriptor may belong to another socket from now on."""
        self.stream = self.passage = None

    def came_at_once(self, const unsigned char[::1] data not None):
        """Twin of `KernelStream.came_at_once`."""
        return self.at_once(&data[0], data.shape[0])

    cdef inline bint at_once(self, const unsigned char *data, Py_ssize_t size) noexcept:
        return self.stamped and llmtap_came_at_once(&self.received, self.fd, data, size)

    def stamped_since(self, int64_t t_ns):
        """Return whether all reads since `t_ns` have exact timestamps of the kernel."""
        return self.stamped and self.unstamped_ns < t_ns and not llmtap_out_of_order(self.fd)

    def is_quiet(self):
        """Return whether the connection is open and has no unread bytes."""
        return self.stream is not None and llmtap_peek(self.fd) < 0 and errno == EAGAIN

    def __call__(self):
        cdef int64_t wall_ns = LLMTAP_UNSTAMPED, now_ns, t_ns
        cdef Py_ssize_t size
        stream, passage = self.stream, self.passage
        if stream is None:
            return
        size = llmtap_receive(self.fd, _buffer, READ_BYTES_MAX, self.stamped, &wall_ns)
        if size < 0:
            if errno != EAGAIN and errno != EINTR:
                stream.lose(OSError(errno, strerror(errno).decode()))
            return
        now_ns = llmtap_mono_ns()
        if not size:
            stream.ended()
            return
        if wall_ns != LLMTAP_UNSTAMPED:
            t_ns = self.placed(now_ns, wall_ns)
        else:
            t_ns = self.unstamped_ns = now_ns
        llmtap_add_read(&self.received, size, READ_BYTES_MAX)
        if passage is None:
            stream.handler.on_data(PyBytes_FromStringAndSize(<const char *> _buffer, size), t_ns)
        elif not passage.take(self, _buffer, size, t_ns):
            passage.store()
            stream.handler.on_data(PyBytes_FromStringAndSize(<const char *> _buffer, size), t_ns)
            passage.load()
        elif passage.forwarder is not None:
            passage.reads_left -= 1
            if passage.reads_left <= 0:
                passage.forwarder.lend(self, passage)

    cdef int64_t placed(self, int64_t now_ns, int64_t wall_ns) except? -1:
        """Convert a kernel stamp to monotonic time, and note the lag of the read."""
        cdef int64_t offset_ns = self.timebase.offset_ns
        cdef int64_t lag_ns = now_ns - wall_ns - offset_ns, t_ns
        if 0 <= lag_ns < self.doubt_ns:
            self.lag.add(now_ns, lag_ns)
        elif -MAPPING_NS < lag_ns < 0:
            # The stamp is later than the read, within the error of the clocks' mapping: use the time of the read.
            self.lag.add(now_ns, 0)
            return now_ns
        else:
            if self.passage is not None:
                self.passage.epoch = -1  # so that `offer_data` subtracts the time that the read waited for the client
            t_ns = self.stream.place(now_ns, wall_ns)
            if t_ns == now_ns:
                self.unstamped_ns = now_ns
            return t_ns
        return now_ns - lag_ns
