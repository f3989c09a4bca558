# Python classes for the forwarding thread (forwarder.h). They have no Python twins: without the thread, the event
# loop forwards all bodies.

cimport cython

cdef extern from "forwarder.h" nogil:
    enum llmtap_reason:
        LLMTAP_BLOCKED
        LLMTAP_NOT_PLAIN
        LLMTAP_NOT_PLACED
        LLMTAP_CLIENT_LOST
        LLMTAP_UPSTREAM_LOST
        LLMTAP_UPSTREAM_ENDED
    struct llmtap_loan:
        int upstream, client, chunked
        int64_t seq
        int tapped
        int64_t left
        llmtap_received received
        void *object
        int64_t forwarded_bytes
        int64_t unstamped_ns
        llmtap_reason reason
        int error
        unsigned char *bytes
        size_t size
        int64_t now_ns, wall_ns
        int64_t last_ns
    struct llmtap_forwarder_options:
        const int64_t *lag_edges_ns
        uint8_t data_kind, at_once_kind, drop_kind
    struct llmtap_forwarder:
        pass
    llmtap_forwarder *llmtap_forwarder_start(const llmtap_forwarder_options *options)
    void llmtap_forwarder_stop(llmtap_forwarder *forwarder)
    int llmtap_forwarder_fd(const llmtap_forwarder *forwarder)
    void llmtap_acknowledge(llmtap_forwarder *forwarder)
    void llmtap_set_clock(llmtap_forwarder *forwarder, int64_t offset_ns, int64_t since_ns)
    void llmtap_set_room(llmtap_forwarder *forwarder, int64_t size)
    int64_t llmtap_frames_size(llmtap_forwarder *forwarder)
    int llmtap_lend(llmtap_forwarder *forwarder, llmtap_loan *loan)
    void llmtap_recall(llmtap_forwarder *forwarder, llmtap_loan *loan)
    llmtap_loan *llmtap_returned(llmtap_forwarder *forwarder)
    const llmtap_rows *llmtap_collect(llmtap_forwarder *forwarder, llmtap_lags *lags)
    void llmtap_forget(llmtap_forwarder *forwarder)
    void llmtap_loan_clear(llmtap_loan *loan)

cdef enum:
    DROP = 14  # FrameKind.DROP
    # After each return of a body, multiply the number of reads until it is lent again; at most READS_MAX.
    READS_FACTOR = 4
    READS_MAX = 4096


cdef class Loan:
    """Both sockets of an exchange, lent to the thread for the rest of a body.

    A loan that the thread returns ends in three steps: `settle` (the loop watches the sockets again), collection of the
    thread's frames, and `deliver`. `reclaim` takes the sockets back earlier; `handle` may then follow.
    """

    cdef llmtap_loan c
    cdef Forwarder forwarder
    cdef Passage passage
    cdef Reader upstream
    cdef bint was_tapped

    def __cinit__(self, Forwarder forwarder, Passage passage, Reader upstream):
        flow = passage.flow
        self.forwarder, self.passage, self.upstream, self.was_tapped = forwarder, passage, upstream, flow.tapped
        self.c.upstream, self.c.client = upstream.fd, passage.client.fd
        self.c.chunked = passage.framing == BY_CHUNKS
        self.c.seq, self.c.tapped, self.c.left, self.c.last_ns = flow.seq, flow.tapped, passage.left, flow.last_ns
        self.c.received = upstream.received
        self.c.object = <void *> self

    def __dealloc__(self):
        llmtap_loan_clear(&self.c)

    @property
    def last_ns(self):
        """Time of the last read."""
        return self.c.last_ns

    cdef int settle(self) except -1:
        passage, flow = self.passage, self.passage.flow
        self.forwarder.loans.discard(self)
        flow.loan = self.upstream.loan = passage.client.loan = None
        passage.left = self.c.left
        passage.epoch = -1  # so that `offer_data` asks the tap again whether it measures the exchange
        flow.last_ns = max(flow.last_ns, self.c.last_ns)
        self.upstream.received = self.c.received
        self.upstream.unstamped_ns = max(self.upstream.unstamped_ns, self.c.unstamped_ns)
        flow.response_bytes += self.c.forwarded_bytes
        if not self.c.tapped:
            flow.tapped = False
        self.upstream.stream.take_back()
        passage.client.stream.take_back()
        return 0

    cdef int conclude(self) except -1:
        """Drop the measurement if the thread had no room, and keep unsent bytes, even if the exchange ends now."""
        passage = self.passage
        if self.was_tapped and not self.c.tapped:
            (<object> passage.flow).drop_measurement()
        if self.c.reason == LLMTAP_BLOCKED and self.is_current():
            passage.client.stream.keep(self.bytes_read())
        return 0

    cdef bint is_current(self):
        """Whether the exchange still has both connections."""
        return self.upstream.passage is self.passage and self.passage.client.stream is not None

    cdef bytes bytes_read(self):
        return PyBytes_FromStringAndSize(<const char *> self.c.bytes, self.c.size)

    def reclaim(self):
        """Take both sockets back now."""
        cdef llmtap_forwarder *forwarder = self.forwarder.c
        cdef llmtap_loan *loan = &self.c
        with nogil:
            llmtap_recall(forwarder, loan)
        self.settle()
        (<object> self.passage.flow).collect_frames()
        self.conclude()

    def deliver(self):
        """Continue a body that the thread has returned."""
        self.conclude()
        self.handle()

    def handle(self):
        """Handle the reason for which the thread returned the sockets."""
        passage, stream, reason = self.passage, self.upstream.stream, self.c.reason
        cdef int64_t t_ns = self.c.now_ns
        if not self.is_current():
            return  # The exchange ended in the meantime.
        if reason == LLMTAP_BLOCKED:
            (<object> passage.flow).pause_upstream()
        elif reason == LLMTAP_NOT_PLAIN or reason == LLMTAP_NOT_PLACED:
            if reason == LLMTAP_NOT_PLACED:
                t_ns = self.upstream.placed(t_ns, self.c.wall_ns)
            if not passage.take(self.upstream, self.c.bytes, self.c.size, t_ns):
                passage.store()
                stream.handler.on_data(self.bytes_read(), t_ns)
                passage.load()
        elif reason == LLMTAP_CLIENT_LOST:
            (<object> passage.flow).client_gone()
        elif reason == LLMTAP_UPSTREAM_LOST:
            stream.lose(OSError(self.c.error, strerror(self.c.error).decode()))
        elif reason == LLMTAP_UPSTREAM_ENDED:
            stream.ended()


@cython.no_gc_clear  # the garbage collector must not release the loans before the thread has ended
cdef class Forwarder:
    """The forwarding thread. A body is lent to the thread after `reads` plain reads."""

    cdef llmtap_forwarder *c  # NULL: closed
    cdef set loans
    cdef LagMeter lag
    cdef readonly int64_t reads, lent_total

    def __cinit__(self, LagMeter lag not None, int64_t reads):
        cdef llmtap_forwarder_options options
        options.lag_edges_ns = LAG_EDGES_NS
        options.data_kind, options.at_once_kind, options.drop_kind = RESPONSE_DATA, RESPONSE_AT_ONCE, DROP
        self.lag, self.reads, self.loans = lag, reads, set()
        self.c = llmtap_forwarder_start(&options)
        if self.c == NULL:
            raise OSError(errno, strerror(errno).decode())

    def __dealloc__(self):
        if self.c != NULL:
            llmtap_forwarder_stop(self.c)

    def fileno(self):
        return llmtap_forwarder_fd(self.c)

    def close(self):
        """Take all bodies back, and end the thread."""
        if self.c == NULL:
            return
        for loan in list(self.loans):
            (<Loan> loan).reclaim()
        cdef llmtap_forwarder *c = self.c
        self.c = NULL
        with nogil:
            llmtap_forwarder_stop(c)

    @property
    def size(self):
        return llmtap_frames_size(self.c) if self.c != NULL else 0

    @property
    def lent(self):
        """Number of bodies that are lent to the thread."""
        return len(self.loans)

    def set_clock(self, int64_t offset_ns, int64_t since_ns):
        """Pass the result of Timebase.resample() to the thread."""
        if self.c != NULL:
            llmtap_set_clock(self.c, offset_ns, since_ns)

    def set_room(self, int64_t size):
        if self.c != NULL:
            llmtap_set_room(self.c, size)

    def forget(self):
        """Drop the waiting frames, and stop measuring the lent bodies."""
        if self.c != NULL:
            llmtap_forget(self.c)

    def collect(self, FrameRows rows not None):
        """Move the frames to `rows` and the lags to the meter. Return the exchanges dropped for lack of memory."""
        cdef llmtap_lags lags
        cdef const llmtap_rows *frames
        cdef list dropped = []
        cdef size_t i
        if self.c == NULL:
            return dropped
        frames = llmtap_collect(self.c, &lags)
        self.lag.add_all(&lags)
        if frames.n:
            rows.append_all(frames)
        if frames.drops:
            for i in range(frames.n):
                if frames.rows[i].kind == DROP:
                    dropped.append(frames.rows[i].seq)
        return dropped

    cdef int lend(self, Reader upstream, Passage passage) except -1:
        """Lend the rest of a body to the thread, if nothing else happens on its sockets."""
        passage.reads_next = min(passage.reads_next * READS_FACTOR, READS_MAX)
        passage.reads_left = max(passage.reads_next, 1)
        if (
            self.c == NULL or passage.left < 0 or upstream.passage is not passage or not upstream.stamped
            or upstream.doubt_ns != LAG_DOUBT_NS or not (<object> passage.flow).may_be_lent()
        ):
            return 0
        cdef Loan loan = Loan(self, passage, upstream)
        upstream.stream.lend()
        passage.client.stream.lend()
        self.loans.add(loan)
        self.lent_total += 1
        passage.flow.loan = upstream.loan = passage.client.loan = loan
        if not llmtap_lend(self.c, &loan.c):
            passage.forwarder = None  # The kernel watches no more descriptors, so the event loop keeps this body.
            loan.settle()
            (<object> passage.flow).collect_frames()
            loan.deliver()
        return 0

    def take_returned(self):
        """Take the loans that the thread has returned, `settle` each, and return them. The caller collects the frames
        before it calls `deliver`."""
        cdef llmtap_loan *c
        cdef list loans = []
        cdef Loan loan
        if self.c == NULL:
            return loans
        llmtap_acknowledge(self.c)
        while True:
            c = llmtap_returned(self.c)
            if c == NULL:
                return loans
            loan = <Loan> c.object
            loan.settle()
            loans.append(loan)
