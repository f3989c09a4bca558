# Compiled computation of the metrics of an ended exchange, and of histograms. Python twins: metrics/latency.py,
# metrics/histogram.py, export/buckets.py.

from cpython.dict cimport PyDict_SetItem
from cpython.long cimport PyLong_CheckExact

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1

cdef extern from "gaps.h" nogil:
    struct llmtap_gaps_s "llmtap_gaps":
        int64_t longest
        int64_t wait
        double deviation
    int llmtap_gaps(const int64_t *times, size_t n, int64_t step, int64_t *gaps, llmtap_gaps_s *out)
    int llmtap_sum(const int64_t *values, size_t n, int64_t *sum)
    struct llmtap_count_s "llmtap_count":
        uint32_t bucket
        uint32_t n
    void llmtap_count_buckets(const int64_t *values, size_t n, llmtap_count_s *places, size_t size)
    size_t llmtap_edge_bucket(const int64_t *edges, size_t n, int64_t value)


cdef class _Numbers:
    """The numbers of a sequence as a C array; `values` is NULL if one is not an int of at most 64 bits."""

    cdef int64_t *values
    cdef Py_ssize_t n

    def __cinit__(self, numbers, Py_ssize_t room=0):
        cdef int overflow = 0
        cdef Py_ssize_t i = 0
        self.n = len(numbers)
        self.values = <int64_t *> PyMem_Malloc((self.n + room + 1) * sizeof(int64_t))
        if self.values == NULL:
            raise MemoryError
        if type(numbers) is array.array and (<array.array> numbers).typecode == "q":
            memcpy(self.values, (<array.array> numbers).data.as_voidptr, self.n * sizeof(int64_t))
            return
        for number in numbers:
            if i < self.n and PyLong_CheckExact(number):
                self.values[i] = PyLong_AsLongLongAndOverflow(number, &overflow)
                i += 1
            else:
                overflow = 1
            if overflow:
                break
        if overflow or i < self.n:
            PyMem_Free(self.values)
            self.values = NULL

    def __dealloc__(self):
        PyMem_Free(self.values)


def gap_figures(list times not None, step):
    """Return the gaps between times, the longest, n^2 times their variance, and the greatest `times[i] - i step`.

    None if there are fewer than two times, or if 64 bits overflow: the caller then computes in Python.
    """
    cdef _Numbers numbers = _Numbers(times, room=len(times))
    cdef _Numbers steps = _Numbers((step,))
    cdef llmtap_gaps_s found
    cdef Py_ssize_t n = numbers.n, i
    if numbers.values == NULL or steps.values == NULL or n < 2:
        return None
    cdef int64_t *gaps = numbers.values + n
    if not llmtap_gaps(numbers.values, n, steps.values[0], gaps, &found):
        return None
    return [gaps[i] for i in range(n - 1)], found.longest, found.deviation, found.wait


def count_by_float(list values not None, counts):
    """Count values in `counts`, a dict, by the upper bits of their 32-bit floats.

    Return the sum, the minimum and the maximum of the values. Without values, or if 64 bits overflow, return
    None and count nothing: the caller then counts in Python.
    """
    cdef _Numbers numbers = _Numbers(values)
    cdef int64_t total, low, high
    cdef Py_ssize_t i
    cdef size_t size = 1
    cdef llmtap_count_s *places
    cdef PyObject *before
    if not isinstance(counts, dict):
        raise TypeError(f"expected a dict, got {counts!r}")
    if numbers.values == NULL or not numbers.n or not llmtap_sum(numbers.values, numbers.n, &total):
        return None
    low = high = numbers.values[0]
    for i in range(numbers.n):
        low, high = min(low, numbers.values[i]), max(high, numbers.values[i])
    while size <= <size_t> numbers.n:
        size *= 2
    places = <llmtap_count_s *> PyMem_Calloc(size, sizeof(llmtap_count_s))
    if places == NULL:
        raise MemoryError
    try:
        llmtap_count_buckets(numbers.values, numbers.n, places, size)
        for i in range(<Py_ssize_t> size):
            if places[i].n:
                bucket = places[i].bucket
                before = PyDict_GetItemWithError(counts, bucket)
                PyDict_SetItem(counts, bucket, places[i].n + (0 if before == NULL else <object> before))
    finally:
        PyMem_Free(places)
    return total, low, high


def count_by_edge(values not None, edges not None, array.array counts not None):
    """Count each value in `counts` (array "Q") at the first edge that is not below it. Return the sum of all.

    If 64 bits overflow, return None and count nothing. The last place in `counts` is for values above all edges.
    """
    cdef _Numbers numbers = _Numbers(values), bounds = _Numbers(edges)
    cdef int64_t total
    cdef Py_ssize_t i
    if counts.typecode != "Q" or len(counts) != bounds.n + 1:
        raise ValueError(f"expected {bounds.n + 1} counts of type Q")
    if numbers.values == NULL or bounds.values == NULL:
        return None
    if not llmtap_sum(numbers.values, numbers.n, &total):
        return None
    for i in range(numbers.n):
        counts.data.as_ulonglongs[llmtap_edge_bucket(bounds.values, bounds.n, numbers.values[i])] += 1
    return total
