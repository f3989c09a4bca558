/* Bytes that grow, and numbers written without printf: an event is formatted ten thousand times a second. */
#ifndef BYTES_H
#define BYTES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A queue of bytes: appended at the end, consumed from the front. */
struct bytes {
    char *base;
    size_t from; /* the first byte not consumed yet */
    size_t to;
    size_t room;
};

static inline size_t bytes_len(const struct bytes *b)
{
    return b->to - b->from;
}

static inline char *bytes_at(const struct bytes *b)
{
    return b->base + b->from;
}

/* Room for `more` bytes at the end; returns where they go. Call bytes_added() with what was really put there. */
static inline char *bytes_reserve(struct bytes *b, size_t more)
{
    if (b->room - b->to < more && b->from > 0) {
        memmove(b->base, b->base + b->from, bytes_len(b));
        b->to -= b->from;
        b->from = 0;
    }
    if (b->room - b->to < more) {
        b->room = 2 * (b->to + more);
        b->base = realloc(b->base, b->room);
        if (!b->base) {
            perror("bytes");
            exit(1);
        }
    }
    return b->base + b->to;
}

static inline void bytes_added(struct bytes *b, size_t n)
{
    b->to += n;
}

static inline void bytes_append(struct bytes *b, const void *data, size_t n)
{
    memcpy(bytes_reserve(b, n), data, n);
    b->to += n;
}

static inline void bytes_consume(struct bytes *b, size_t n)
{
    b->from += n;
    if (b->from == b->to)
        b->from = b->to = 0;
}

static inline void bytes_free(struct bytes *b)
{
    free(b->base);
    *b = (struct bytes){0};
}

/* put_*: write at `at`, return the end. The caller has made sure of the room. */
static inline char *put_bytes(char *at, const char *data, size_t n)
{
    memcpy(at, data, n);
    return at + n;
}

#define PUT_LITERAL(at, text) put_bytes((at), (text), sizeof(text) - 1)

static inline char *put_number(char *at, uint64_t value, unsigned base)
{
    char digits[24];
    size_t n = sizeof digits;

    do {
        digits[--n] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value);
    return put_bytes(at, digits + n, sizeof digits - n);
}

static inline char *put_decimal(char *at, uint64_t value)
{
    return put_number(at, value, 10);
}

#endif
