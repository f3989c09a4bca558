#include "gaps.h"

#include <string.h>

#define MANTISSA_BITS_DROPPED 14 /* bits of a float that its bucket ignores, as in metrics/histogram.py */

int llmtap_gaps(const int64_t *times, size_t n, int64_t step, int64_t *gaps, struct llmtap_gaps *out) {
    __int128 sum = 0, squares = 0, square;
    int64_t due = 0, wait;
    out->longest = INT64_MIN;
    out->wait = times[0];
    for (size_t i = 1; i < n; i++) {
        int64_t gap;
        if (__builtin_sub_overflow(times[i], times[i - 1], &gap)) return 0;
        if (__builtin_add_overflow(due, step, &due) || __builtin_sub_overflow(times[i], due, &wait)) return 0;
        if (wait > out->wait) out->wait = wait;
        if (gap > out->longest) out->longest = gap;
        square = (__int128)gap * gap;
        if (__builtin_add_overflow(squares, square, &squares)) return 0;
        sum += gap;
        gaps[i - 1] = gap;
    }
    if (__builtin_mul_overflow(squares, (__int128)(n - 1), &squares)) return 0;
    if (__builtin_mul_overflow(sum, sum, &square) || __builtin_sub_overflow(squares, square, &squares)) return 0;
    out->deviation = (double)squares;
    return 1;
}

int llmtap_sum(const int64_t *values, size_t n, int64_t *sum) {
    *sum = 0;
    for (size_t i = 0; i < n; i++)
        if (__builtin_add_overflow(*sum, values[i], sum)) return 0;
    return 1;
}

uint32_t llmtap_float_bucket(int64_t value) {
    float number = (float)(double)value; /* rounded twice, as array("f") does */
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits >> MANTISSA_BITS_DROPPED;
}

void llmtap_count_buckets(const int64_t *values, size_t n, struct llmtap_count *places, size_t size) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bucket = llmtap_float_bucket(values[i]);
        size_t place = bucket & (size - 1);
        while (places[place].n && places[place].bucket != bucket) place = (place + 1) & (size - 1);
        places[place].bucket = bucket;
        places[place].n++;
    }
}

size_t llmtap_edge_bucket(const int64_t *edges, size_t n, int64_t value) {
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (edges[middle] < value) low = middle + 1;
        else high = middle;
    }
    return low;
}
