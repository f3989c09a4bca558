# Plain heads (heads.h): parse and write them. Python twins: protocol/http1.py, vantage/relay/heads.py.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy

cdef extern from "heads.h" nogil:
    enum:
        LLMTAP_FIELDS_MAX
        LLMTAP_PASS
        LLMTAP_HOP
        LLMTAP_HOST
    struct llmtap_span:
        unsigned int at
        unsigned int len
    struct llmtap_field:
        llmtap_span name
        llmtap_span value
        unsigned char kind
    struct llmtap_head:
        llmtap_span method
        llmtap_span target
        llmtap_span reason
        int status
        long long length
        int chunked
        int keep_alive
        int host
        int n
        llmtap_field fields[64]
    int llmtap_plain_request(const unsigned char *data, size_t len, llmtap_head *head)
    int llmtap_plain_response(const unsigned char *data, size_t len, llmtap_head *head)
    int llmtap_field_kind(const unsigned char *name, size_t len)


cdef inline bytes _cut(const char *data, llmtap_span span):
    return PyBytes_FromStringAndSize(data + span.at, span.len)


cdef list _fields_of(const char *data, llmtap_head *head):
    cdef list fields = []
    cdef int i
    for i in range(head.n):
        fields.append((_cut(data, head.fields[i].name), _cut(data, head.fields[i].value)))
    return fields


def plain_request(bytes raw not None):
    """Return (method, target, fields, host, length, chunked, keep_alive) of a plain request head, else None.

    `length` is -1 without Content-Length; `keep_alive`: whether the field Connection contains `keep-alive`.
    """
    cdef llmtap_head head
    cdef const char *data = PyBytes_AS_STRING(raw)
    if not llmtap_plain_request(<const unsigned char *> data, PyBytes_GET_SIZE(raw), &head):
        return None
    cdef list fields = _fields_of(data, &head)
    return (
        b"POST" if head.method.len == 4 else b"GET", _cut(data, head.target), fields, fields[head.host][1],
        head.length, bool(head.chunked), bool(head.keep_alive),
    )


def plain_response(bytes raw not None):
    """Return (status, reason, fields, length, chunked, keep_alive) of a plain response head, else None."""
    cdef llmtap_head head
    cdef const char *data = PyBytes_AS_STRING(raw)
    if not llmtap_plain_response(<const unsigned char *> data, PyBytes_GET_SIZE(raw), &head):
        return None
    return (
        head.status, _cut(data, head.reason), _fields_of(data, &head), head.length, bool(head.chunked),
        bool(head.keep_alive),
    )


def write_head(bytes start not None, list fields not None, bytes host, bytes end not None):
    """Return `start`, the fields that are not for this hop only, and `end`; `host` replaces the value of Host.

    None if a field needs a rule that only the Python twin has.
    """
    cdef Py_ssize_t n = len(fields), size = PyBytes_GET_SIZE(start) + PyBytes_GET_SIZE(end), i
    cdef int kinds[LLMTAP_FIELDS_MAX]
    cdef tuple field
    cdef bytes name, value, out
    cdef char *to
    if n > LLMTAP_FIELDS_MAX:
        return None
    for i in range(n):
        field = <tuple?> fields[i]
        name, value = <bytes?> field[0], <bytes?> field[1]
        kinds[i] = llmtap_field_kind(<const unsigned char *> PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        if kinds[i] < 0:
            return None
        if kinds[i] == LLMTAP_HOST and host is not None:
            value = host
        if kinds[i] != LLMTAP_HOP:
            size += PyBytes_GET_SIZE(name) + PyBytes_GET_SIZE(value) + 4
    out = PyBytes_FromStringAndSize(NULL, size)
    to = _put(PyBytes_AS_STRING(out), start)
    for i in range(n):
        if kinds[i] == LLMTAP_HOP:
            continue
        field = <tuple> fields[i]
        to = _put(to, <bytes> field[0])
        memcpy(to, b": ", 2)
        to = _put(to + 2, host if kinds[i] == LLMTAP_HOST and host is not None else <bytes> field[1])
        memcpy(to, b"\r\n", 2)
        to += 2
    _put(to, end)
    return out


cdef inline char *_put(char *to, bytes data):
    memcpy(to, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
    return to + PyBytes_GET_SIZE(data)
