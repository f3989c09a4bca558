#include "deadlines.h"

#include <stdio.h>
#include <stdlib.h>

static void place_at(struct deadlines *q, size_t index, struct deadline *d)
{
    q->heap[index] = d;
    d->place = index + 1;
}

/* Moves `d`, which belongs somewhere at or above `index`, to where it belongs. */
static void sift_towards_front(struct deadlines *q, size_t index, struct deadline *d)
{
    while (index > 0) {
        size_t parent = (index - 1) / 4;
        if (q->heap[parent]->due_ns <= d->due_ns)
            break;
        place_at(q, index, q->heap[parent]);
        index = parent;
    }
    place_at(q, index, d);
}

static void sift_towards_back(struct deadlines *q, size_t index, struct deadline *d)
{
    for (;;) {
        size_t child = 4 * index + 1;
        size_t beyond = child + 4 < q->count ? child + 4 : q->count;
        if (child >= q->count)
            break;
        for (size_t other = child + 1; other < beyond; other++)
            if (q->heap[other]->due_ns < q->heap[child]->due_ns)
                child = other;
        if (q->heap[child]->due_ns >= d->due_ns)
            break;
        place_at(q, index, q->heap[child]);
        index = child;
    }
    place_at(q, index, d);
}

static void settle(struct deadlines *q, size_t index, struct deadline *d)
{
    if (index > 0 && d->due_ns < q->heap[(index - 1) / 4]->due_ns)
        sift_towards_front(q, index, d);
    else
        sift_towards_back(q, index, d);
}

void deadline_set(struct deadlines *q, struct deadline *d, int64_t due_ns)
{
    d->due_ns = due_ns;
    if (d->place) {
        settle(q, d->place - 1, d);
        return;
    }
    if (q->count == q->room) {
        q->room = q->room ? 2 * q->room : 256;
        q->heap = realloc(q->heap, q->room * sizeof *q->heap);
        if (!q->heap) {
            perror("deadlines");
            exit(1);
        }
    }
    q->count++;
    sift_towards_front(q, q->count - 1, d);
}

void deadline_cancel(struct deadlines *q, struct deadline *d)
{
    if (!d->place)
        return;

    size_t hole = d->place - 1;
    struct deadline *last = q->heap[--q->count];

    d->place = 0;
    if (last != d)
        settle(q, hole, last);
}
