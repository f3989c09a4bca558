#define _GNU_SOURCE
#include "answer.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

void answer_begin(struct answer *a)
{
    a->place = IN_HEAD;
    a->status = 0;
    a->keep_alive = true;
    a->left = 0;
    a->chunks = 0;
    a->held = 0;
}

static void read_field(struct answer *a, const char *name, size_t name_len, const char *value, size_t value_len)
{
    if (name_len == 14 && !strncasecmp(name, "content-length", 14) && a->place != IN_CHUNK_SIZE) {
        a->left = strtoull(value, NULL, 10);
        a->place = IN_LENGTH;
    } else if (name_len == 17 && !strncasecmp(name, "transfer-encoding", 17)) {
        a->place = IN_CHUNK_SIZE; /* RFC 9112 6.3: it overrides Content-Length */
    } else if (name_len == 10 && !strncasecmp(name, "connection", 10)) {
        a->keep_alive = value_len < 5 || strncasecmp(value, "close", 5) != 0;
    }
}

/* Reads the head held in a->line, which ends with an empty line, and decides how the body is framed. */
static void read_head(struct answer *a)
{
    char *line = a->line;
    char *end = a->line + a->held;

    if (a->held < 14 || memcmp(line, "HTTP/1.", 7)) {
        a->place = ANSWER_BROKEN;
        return;
    }
    a->keep_alive = line[7] == '1';
    a->status = atoi(line + 9);
    a->place = IN_UNTIL_CLOSE;
    while ((line = memchr(line, '\n', (size_t)(end - line))) && ++line < end) {
        char *line_end = memchr(line, '\r', (size_t)(end - line));
        char *colon = line_end ? memchr(line, ':', (size_t)(line_end - line)) : NULL;
        if (!colon)
            continue;
        char *value = colon + 1;
        while (value < line_end && *value == ' ')
            value++;
        read_field(a, line, (size_t)(colon - line), value, (size_t)(line_end - value));
    }
    if (a->status >= 100 && a->status < 200)
        answer_begin(a); /* an interim answer; the real one follows */
    else if (a->status == 204 || a->status == 304 || (a->place == IN_LENGTH && a->left == 0))
        a->place = ANSWER_COMPLETE;
    else if (a->place == IN_UNTIL_CLOSE)
        a->keep_alive = false;
    a->held = 0;
}

/* Moves bytes into a->line up to and with the next line feed. `whole` says whether it came. */
static size_t hold_line(struct answer *a, const char *data, size_t len, bool *whole)
{
    const char *feed = memchr(data, '\n', len);
    size_t n = feed ? (size_t)(feed - data) + 1 : len;

    *whole = feed != NULL;
    if (n > sizeof a->line - 1 - a->held) {
        a->place = ANSWER_BROKEN;
        return n;
    }
    memcpy(a->line + a->held, data, n);
    a->held += n;
    a->line[a->held] = 0;
    return n;
}

static void on_line(struct answer *a)
{
    char *end_of_number;

    switch (a->place) {
    case IN_HEAD:
        if (a->held >= 4 && !memcmp(a->line + a->held - 4, "\r\n\r\n", 4))
            read_head(a);
        return; /* otherwise the head grows on in a->line */
    case IN_CHUNK_SIZE:
        a->left = strtoull(a->line, &end_of_number, 16);
        if (end_of_number == a->line) {
            a->place = ANSWER_BROKEN;
            return;
        }
        a->place = a->left ? IN_CHUNK : IN_TRAILER;
        a->chunks++;
        break;
    case IN_CHUNK_END:
        a->place = a->held == 2 ? IN_CHUNK_SIZE : ANSWER_BROKEN;
        break;
    case IN_TRAILER:
        if (a->held == 2)
            a->place = ANSWER_COMPLETE;
        break;
    default:
        break;
    }
    a->held = 0;
}

size_t answer_feed(struct answer *a, const char *data, size_t len, body_slice_fn *on_body, void *owner)
{
    size_t at = 0;

    while (at < len && a->place < ANSWER_COMPLETE) {
        size_t n = len - at;
        bool whole;

        switch (a->place) {
        case IN_CHUNK:
        case IN_LENGTH:
            if (n > a->left)
                n = a->left;
            on_body(owner, data + at, n);
            a->left -= n;
            if (a->left == 0)
                a->place = a->place == IN_CHUNK ? IN_CHUNK_END : ANSWER_COMPLETE;
            break;
        case IN_UNTIL_CLOSE:
            on_body(owner, data + at, n);
            break;
        default:
            n = hold_line(a, data + at, n, &whole);
            if (whole && a->place != ANSWER_BROKEN)
                on_line(a);
        }
        at += n;
    }
    return at;
}

bool answer_closed(struct answer *a)
{
    if (a->place != IN_UNTIL_CLOSE)
        return false;
    a->place = ANSWER_COMPLETE;
    return true;
}
