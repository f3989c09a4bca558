/* The one clock of this benchmark.
 *
 * Server and client stamp with CLOCK_MONOTONIC of the same host, so the difference of two stamps is a
 * one-way latency and needs no synchronisation. */
#ifndef MONOTONIC_H
#define MONOTONIC_H

#include <stdint.h>
#include <time.h>

#define NS_PER_S INT64_C(1000000000)
#define NS_PER_MS INT64_C(1000000)

static inline int64_t ns_of_timespec(struct timespec t)
{
    return t.tv_sec * NS_PER_S + t.tv_nsec;
}

static inline int64_t mono_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return ns_of_timespec(t);
}

static inline struct timespec timespec_of_ns(int64_t ns)
{
    if (ns < 0)
        ns = 0;
    return (struct timespec){.tv_sec = ns / NS_PER_S, .tv_nsec = ns % NS_PER_S};
}

#endif
