/* What a set of processes and all their descendants spend: CPU time and resident memory, read from /proc.
 *
 * CPU comes from /proc/PID/task/TID/schedstat, the scheduler's own account in nanoseconds, because the usual
 * utime + stime count in ticks of 10 ms. Threads that end take their schedstat with them, so the ticks are kept beside it
 * as a check, and are used where the kernel keeps no schedstat. */
#ifndef PROCTREE_H
#define PROCTREE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum { PROCTREE_LIMIT = 128, COMMAND_LIMIT = 160 };

struct process {
    pid_t pid;
    bool gone;
    char command[COMMAND_LIMIT];
    int64_t sched_ns, sched_ns_start;
    int64_t wait_ns, wait_ns_start; /* runnable, while others had the CPU: how disturbed the measurement was */
    int64_t ticks_ns, ticks_ns_start;
    long rss_kb, rss_kb_start, rss_kb_max;
};

struct proctree {
    int count;
    int roots;
    struct process processes[PROCTREE_LIMIT];
};

/* Adds a process whose descendants count too. */
void proctree_add_root(struct proctree *t, pid_t pid);

/* Looks for descendants that are new; they count from zero. Walks /proc, so it takes milliseconds. */
void proctree_find_descendants(struct proctree *t);

/* CPU, and memory, are counted from what they were when last read before this. */
void proctree_mark_cpu(struct proctree *t);
void proctree_mark_memory(struct proctree *t);

void proctree_read(struct proctree *t);

/* Memory only: a few microseconds per process, so it may happen inside the window. */
void proctree_read_memory(struct proctree *t);

void proctree_write_json(const struct proctree *t, uint64_t events, uint64_t requests, FILE *out);

#endif
