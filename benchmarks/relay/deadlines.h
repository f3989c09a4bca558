/* A queue of things that want to happen at a time: a four-way heap of pointers into their owners.
 *
 * The owner embeds a `struct deadline` and is found again with DEADLINE_OWNER; moving or cancelling one costs
 * log4(n), which at 2,500 streams is six steps. */
#ifndef DEADLINES_H
#define DEADLINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct deadline {
    int64_t due_ns;
    size_t place; /* 1-based place in the heap; 0 says: not queued. A zeroed owner is therefore a valid one */
};

struct deadlines {
    struct deadline **heap;
    size_t count;
    size_t room;
};

#define DEADLINE_OWNER(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))

void deadline_set(struct deadlines *q, struct deadline *d, int64_t due_ns);
void deadline_cancel(struct deadlines *q, struct deadline *d);

static inline struct deadline *deadline_first(const struct deadlines *q)
{
    return q->count ? q->heap[0] : NULL;
}

#endif
