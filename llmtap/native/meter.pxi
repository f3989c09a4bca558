# Compiled code of the meter: recognise token events that repeat, and collect them without calling Python. All other
# frames go to Python. Python twins: protocol/repetition.py, channel/frames.py.

from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItemWithError
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

import array
import msgspec

cdef extern from "Python.h":
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    int PyUnicode_KIND(object text)

cdef extern from "matcher.h" nogil:
    enum:
        LLMTAP_LOOSE_MAX
    struct llmtap_bytes:
        const unsigned char *data
        size_t len
    struct llmtap_loose:
        llmtap_bytes fixed
        int is_string
        int is_count
        int64_t offset
    struct llmtap_event:
        llmtap_bytes opening
        llmtap_bytes closing
        llmtap_loose ahead[3]
        llmtap_loose beyond[3]
        int n_ahead
        int n_beyond
        int chunked
    struct llmtap_text:
        const unsigned char *at
        size_t len
        size_t block
        int is_plain
        int blank
        int64_t count
    int llmtap_match(const llmtap_event *event, const unsigned char *data, size_t len, llmtap_text *text)

cdef enum:
    ROOM = 256  # maximum number of collected events, 33 bytes each
    ROOM_WITH_TEXTS = 64
    TEXTS_BYTES_MAX = 6144  # maximum memory of the collected texts
    TEXT_BYTES = 76  # memory of a text in addition to its characters
    RESPONSE_DATA = 8  # FrameKind.RESPONSE_DATA
    RESPONSE_AT_ONCE = 21  # FrameKind.RESPONSE_AT_ONCE
    COLUMNS_AT = 20  # number of bytes before the columns of a batch
    # Maximum number, and size, of frames that are handled before one goes to Python: 15 to 50 us of work.
    PASSED_MAX = 256
    PASSED_BYTES_MAX = 65536

ctypedef struct Columns:
    int64_t t_ns[ROOM]
    int64_t added_ns[ROOM]
    long sizes[ROOM]
    long counts[ROOM]
    char blanks[ROOM]

cdef object _decode_text = msgspec.json.Decoder(str).decode
cdef array.array _STAMPS = array.array("q")
cdef array.array _SIZES = array.array("l")


cdef llmtap_bytes _bytes_at(bytes data) except *:
    cdef llmtap_bytes found
    if data is None:
        raise TypeError("expected bytes, got None")
    found.data = <const unsigned char *> PyBytes_AS_STRING(data)
    found.len = PyBytes_GET_SIZE(data)
    return found


cdef int _set_loose(llmtap_loose *to, tuple parts) except -1:
    cdef Py_ssize_t i
    if len(parts) > LLMTAP_LOOSE_MAX:
        raise ValueError(f"expected at most {LLMTAP_LOOSE_MAX} loose values, got {len(parts)}")
    for i in range(len(parts)):
        fixed, is_string, offset = parts[i]
        to[i].fixed = _bytes_at(<bytes?> fixed)
        to[i].is_string = bool(is_string)
        to[i].is_count = offset is not None
        to[i].offset = 0 if offset is None else offset
    return <int> len(parts)


cdef array.array _column(array.array like, const void *values, Py_ssize_t n):
    cdef array.array column = array.clone(like, n, zero=False)
    memcpy(column.data.as_voidptr, values, n * column.ob_descr.itemsize)
    return column


cdef class TokenRun:
    """Twin of `PythonTokenRun` in protocol/repetition.py."""

    cdef llmtap_event event
    cdef object fixed  # owns the bytes that `event` points to
    cdef Columns *columns
    cdef Py_ssize_t n
    cdef list texts
    cdef Py_ssize_t texts_bytes
    cdef bint has_counts
    cdef public bint keeps_texts

    def __cinit__(self, fixed, bint chunked, bint keeps_texts):
        opening, ahead, beyond, closing = fixed
        self.event.opening = _bytes_at(<bytes?> opening)
        self.event.n_ahead = _set_loose(self.event.ahead, ahead)
        self.event.n_beyond = _set_loose(self.event.beyond, beyond)
        self.event.closing = _bytes_at(<bytes?> closing)
        self.event.chunked = chunked
        self.has_counts = any(offset is not None for _, _, offset in (*ahead, *beyond))
        self.fixed = fixed
        self.keeps_texts = keeps_texts
        self.texts = []

    def __dealloc__(self):
        PyMem_Free(self.columns)

    def __len__(self):
        return self.n

    @property
    def full(self):
        return self.n >= (ROOM_WITH_TEXTS if self.keeps_texts else ROOM) or self.texts_bytes >= TEXTS_BYTES_MAX

    def add(self, bytes data not None, int64_t t_ns, int64_t added_ns):
        return self.n < ROOM and self.put(
            <const unsigned char *> PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), t_ns, added_ns, True
        )

    cdef bint put(
        self, const unsigned char *data, size_t size, int64_t t_ns, int64_t added_ns, bint may_fill
    ) except -1:
        """Collect the event. Return 0 if it is not a repetition, or if it would fill the run and `may_fill` is 0."""
        cdef llmtap_text found
        cdef bint blank
        cdef Py_ssize_t texts_bytes = self.texts_bytes
        cdef str text = None
        if not may_fill and self.n + 1 >= (ROOM_WITH_TEXTS if self.keeps_texts else ROOM):
            return 0
        if not llmtap_match(&self.event, data, size, &found):
            return 0
        if self.keeps_texts or found.blank < 0:
            if found.is_plain:
                text = PyUnicode_DecodeUTF8(<const char *> found.at, found.len, NULL)
            else:
                text = _decode_text(b'"%b"' % PyBytes_FromStringAndSize(<const char *> found.at, found.len))
        blank = found.blank if found.blank >= 0 else text.isspace()
        if self.keeps_texts:
            texts_bytes += TEXT_BYTES + PyUnicode_GET_LENGTH(text) * PyUnicode_KIND(text)
            if not may_fill and texts_bytes >= TEXTS_BYTES_MAX:
                return 0
        if self.columns == NULL:
            self.columns = <Columns *> PyMem_Malloc(sizeof(Columns))
            if self.columns == NULL:
                raise MemoryError
        if self.keeps_texts:
            self.texts.append(text)
            self.texts_bytes = texts_bytes
        self.columns.t_ns[self.n] = t_ns
        self.columns.added_ns[self.n] = added_ns
        self.columns.sizes[self.n] = found.block
        self.columns.blanks[self.n] = blank
        self.columns.counts[self.n] = found.count
        self.n += 1
        return 1

    def take(self):
        cdef Columns *columns = self.columns
        cdef Py_ssize_t n = self.n
        if columns == NULL:
            raise ValueError("expected at least one event")
        texts, self.texts = self.texts, []
        self.columns, self.n, self.texts_bytes = NULL, 0, 0
        try:
            return (
                _column(_STAMPS, columns.t_ns, n), _column(_STAMPS, columns.added_ns, n),
                _column(_SIZES, columns.sizes, n), PyBytes_FromStringAndSize(columns.blanks, n), texts,
                _column(_SIZES, columns.counts, n if self.has_counts else 0),
            )
        finally:
            PyMem_Free(columns)


cdef inline int64_t _int64_at(const char *column, Py_ssize_t i):
    cdef int64_t value
    memcpy(&value, column + 8 * i, 8)
    return value


cdef class FrameBatch:
    """Twin of `PythonFrameBatch` in channel/frames.py."""

    cdef bytes packed  # owns the columns and the data
    cdef const char *kinds
    cdef const char *seqs
    cdef const char *t_ns
    cdef const char *extra_ns
    cdef const char *lengths
    cdef const char *data
    cdef const char *end
    cdef Py_ssize_t n, i
    cdef dict live

    def __cinit__(self, bytes packed not None, Py_ssize_t n):
        if n < 0 or PyBytes_GET_SIZE(packed) < COLUMNS_AT or n > (PyBytes_GET_SIZE(packed) - COLUMNS_AT) // 29:
            raise ValueError(f"expected {n} frames in {PyBytes_GET_SIZE(packed)} bytes")
        self.packed, self.n = packed, n
        self.kinds = PyBytes_AS_STRING(packed) + COLUMNS_AT
        self.seqs = self.kinds + n
        self.t_ns = self.seqs + 8 * n
        self.extra_ns = self.t_ns + 8 * n
        self.lengths = self.extra_ns + 8 * n
        self.data = self.lengths + 4 * n
        self.end = PyBytes_AS_STRING(packed) + PyBytes_GET_SIZE(packed)

    def __len__(self):
        return self.n

    @property
    def last_ns(self):
        return _int64_at(self.t_ns, self.n - 1) if self.n else None

    def unrecognised(self, dict live not None):
        self.live = live
        return self

    def __iter__(self):
        return self

    def __next__(self):
        cdef Py_ssize_t passed = 0, passed_bytes = 0, size, i
        cdef uint32_t length
        cdef const char *data
        cdef int64_t seq
        cdef PyObject *observer
        cdef object run
        while self.i < self.n:
            i = self.i
            memcpy(&length, self.lengths + 4 * i, 4)
            data, size = self.data, min(<Py_ssize_t> length, self.end - self.data)
            self.i += 1
            self.data += size
            seq = _int64_at(self.seqs, i)
            if self.kinds[i] == RESPONSE_DATA and passed < PASSED_MAX and passed_bytes < PASSED_BYTES_MAX:
                observer = NULL if self.live is None else PyDict_GetItemWithError(self.live, seq)
                run = None if observer == NULL else (<object> observer).token_run
                # Leave the event that fills a run to Python, which then logs the run.
                if type(run) is TokenRun and (<TokenRun> run).put(
                    <const unsigned char *> data,
                    size,
                    _int64_at(self.t_ns, i),
                    _int64_at(self.extra_ns, i),
                    False,
                ):
                    passed += 1
                    passed_bytes += size
                    continue
            return (
                <unsigned char> self.kinds[i], seq, _int64_at(self.t_ns, i), _int64_at(self.extra_ns, i),
                PyBytes_FromStringAndSize(data, size),
            )
        raise StopIteration
