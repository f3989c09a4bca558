/* Figures from the times of one exchange. Twins: metrics/latency.py, metrics/histogram.py, export/buckets.py. */
#ifndef LLMTAP_GAPS_H
#define LLMTAP_GAPS_H

#include <stddef.h>
#include <stdint.h>

struct llmtap_gaps {
    int64_t longest;  /* longest gap */
    int64_t wait;     /* maximum of times[i] - i * step, for the wait of a reader */
    double deviation; /* n sum(gap^2) - sum(gap)^2, rounded once: n^2 times the variance of the gaps */
};

/* Fill `out`, and `gaps` with the n - 1 gaps of n > 0 times. Return 0 on overflow: the caller then uses Python. */
int llmtap_gaps(const int64_t *times, size_t n, int64_t step, int64_t *gaps, struct llmtap_gaps *out);

/* Set `sum` to the sum of n values. Return 0 on overflow: the caller then uses Python. */
int llmtap_sum(const int64_t *values, size_t n, int64_t *sum);

/* Return the bucket of a value: the upper 18 bits of its 32-bit float, as in metrics/histogram.py. */
uint32_t llmtap_float_bucket(int64_t value);

struct llmtap_count {
    uint32_t bucket;
    uint32_t n; /* count of the bucket; 0: the place is empty */
};

/* Count n values (fewer than 2^32) by bucket, in a hash table of `size` empty places: a power of two, more than n. The
 * place of a bucket is the first free one from its lower bits on, so neighbouring buckets do not collide. */
void llmtap_count_buckets(const int64_t *values, size_t n, struct llmtap_count *places, size_t size);

/* Return the index of the first of n ascending edges that is not less than the value; n if there is none. */
size_t llmtap_edge_bucket(const int64_t *edges, size_t n, int64_t value);

#endif
