/* One HTTP/1.1 answer, read as it comes: head, then the body in slices with the transfer coding taken off. */
#ifndef ANSWER_H
#define ANSWER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ANSWER_HEAD_LIMIT = 16384 }; /* gateways add two dozen headers; this is ten times that */

enum answer_place {
    IN_HEAD,
    IN_CHUNK_SIZE,
    IN_CHUNK,
    IN_CHUNK_END,
    IN_TRAILER,
    IN_LENGTH,      /* Content-Length counts down */
    IN_UNTIL_CLOSE, /* the end of the connection is the end of the body */
    ANSWER_COMPLETE,
    ANSWER_BROKEN,
};

struct answer {
    enum answer_place place;
    int status;
    bool keep_alive;
    uint64_t left;   /* of this chunk, or of the body */
    uint64_t chunks;
    size_t held;     /* bytes of `line` in use: the head, or a line split over reads */
    char line[ANSWER_HEAD_LIMIT];
};

typedef void body_slice_fn(void *owner, const char *data, size_t len);

void answer_begin(struct answer *a);

/* Takes bytes from the connection; returns how many, fewer than len only once the answer is complete or broken. */
size_t answer_feed(struct answer *a, const char *data, size_t len, body_slice_fn *on_body, void *owner);

/* The peer has closed. True when that is how this answer was to end. */
bool answer_closed(struct answer *a);

#endif
