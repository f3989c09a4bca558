#include "histogram.h"

#include <math.h>

enum { FINE = 1 << HISTOGRAM_FINE_BITS };

static int bucket_of(int64_t value_ns)
{
    uint64_t v = (uint64_t)value_ns;

    if (v >> HISTOGRAM_TOP_BIT)
        return HISTOGRAM_BUCKETS - 1;
    if (v < FINE)
        return (int)v; /* one bucket per nanosecond down here */

    /* Drop low bits until HISTOGRAM_FINE_BITS remain below the leading one; the number dropped names the octave. */
    int dropped = 63 - __builtin_clzll(v) - HISTOGRAM_FINE_BITS;
    return (dropped + 1) * FINE + (int)((v >> dropped) - FINE);
}

static double middle_of(int bucket)
{
    if (bucket < FINE)
        return bucket;
    int dropped = bucket / FINE - 1;
    double lowest = ldexp(FINE + bucket % FINE, dropped);
    return lowest + ldexp(0.5, dropped);
}

void histogram_add(struct histogram *h, int64_t value_ns)
{
    if (value_ns < 0) {
        h->below_zero++;
        value_ns = 0;
    }
    if (h->n == 0 || value_ns < h->min_ns)
        h->min_ns = value_ns;
    if (value_ns > h->max_ns)
        h->max_ns = value_ns;
    h->n++;
    h->sum_ns += (double)value_ns;
    h->buckets[bucket_of(value_ns)]++;
}

double histogram_quantile_ns(const struct histogram *h, double share)
{
    if (h->n == 0)
        return 0;

    uint64_t rank = (uint64_t)ceil(share * (double)h->n);
    uint64_t passed = 0;

    for (int bucket = 0; bucket < HISTOGRAM_BUCKETS; bucket++) {
        passed += h->buckets[bucket];
        if (passed > 0 && passed >= rank)
            return fmax(fmin(middle_of(bucket), (double)h->max_ns), (double)h->min_ns);
    }
    return (double)h->max_ns;
}

void histogram_write_json(const struct histogram *h, FILE *out)
{
    static const struct {
        const char *name;
        double share;
    } shown[] = {{"p50", 0.50}, {"p90", 0.90}, {"p99", 0.99}, {"p99.9", 0.999}};

    fprintf(out, "{\"n\":%llu,\"mean\":%.2f,\"min\":%.2f", (unsigned long long)h->n,
            h->n ? h->sum_ns / (double)h->n / 1e3 : 0.0, (double)h->min_ns / 1e3);
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
        fprintf(out, ",\"%s\":%.2f", shown[i].name, histogram_quantile_ns(h, shown[i].share) / 1e3);
    fprintf(out, ",\"max\":%.2f}", (double)h->max_ns / 1e3);
}
