/* Distribution of durations in nanoseconds, from 0 to 2^40 ns (18 minutes), at a relative error below 0.2 %.
 *
 * Values are counted in buckets whose width doubles with each power of two, 256 buckets per doubling: the idea of
 * HdrHistogram. Memory is fixed, adding is a shift and an increment, and no sample is ever thrown away. */
#ifndef HISTOGRAM_H
#define HISTOGRAM_H

#include <stdint.h>
#include <stdio.h>

#define HISTOGRAM_FINE_BITS 8
#define HISTOGRAM_TOP_BIT 40
#define HISTOGRAM_BUCKETS ((HISTOGRAM_TOP_BIT - HISTOGRAM_FINE_BITS + 1) << HISTOGRAM_FINE_BITS)

struct histogram {
    uint64_t buckets[HISTOGRAM_BUCKETS];
    uint64_t n;
    uint64_t below_zero; /* a stamp from the future: clocks or code are wrong, so it is shown, and counted as 0 */
    int64_t min_ns;
    int64_t max_ns;
    double sum_ns;
};

void histogram_add(struct histogram *h, int64_t value_ns);

/* The value at or below which `share` (0..1) of the samples lie: nearest rank, and the middle of its bucket. */
double histogram_quantile_ns(const struct histogram *h, double share);

/* {"n":..,"mean":..,"min":..,"p50":..,"p90":..,"p99":..,"p99.9":..,"max":..} in microseconds. */
void histogram_write_json(const struct histogram *h, FILE *out);

#endif
