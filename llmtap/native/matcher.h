/* Token events that differ only in their text: twin of protocol/repetition.py.
 *
 * No memory is allocated and no byte outside [data, data + len) is read.
 */
#ifndef LLMTAP_MATCHER_H
#define LLMTAP_MATCHER_H

#include <stddef.h>
#include <stdint.h>

#define LLMTAP_BLOCK_BYTES_MAX 4096
#define LLMTAP_LOOSE_MAX 3

struct llmtap_bytes {
    const unsigned char *data;
    size_t len;
};

/* A value that differs from event to event, and the fixed bytes between it and the next value toward the text. */
struct llmtap_loose {
    struct llmtap_bytes fixed;
    int is_string;
    int is_count; /* whether it is a number of a running usage: the number of output tokens so far, plus `offset` */
    int64_t offset;
};

/* Parts of a repeated event around its text, named as in `Repetition` (protocol/repetition.py). `opening` and `closing`
 * are equal in each event; the values `ahead` of the text and `beyond` it (the last first) can differ. */
struct llmtap_event {
    struct llmtap_bytes opening, closing;
    struct llmtap_loose ahead[LLMTAP_LOOSE_MAX], beyond[LLMTAP_LOOSE_MAX];
    int n_ahead, n_beyond;
    int chunked; /* whether a read is one HTTP chunk, framing included, that has the event as its content */
};

struct llmtap_text {
    const unsigned char *at; /* content of the JSON string, with its escapes */
    size_t len;
    size_t block; /* number of bytes of the event, without the framing of a chunk */
    int is_plain; /* whether the text has no escapes */
    int blank;    /* 1: only white space; 0: other characters; -1: unknown: escapes or characters beyond ASCII */
    int64_t count; /* number of output tokens so far; 0 without a running usage */
};

/* Return 1 and fill `text` if [data, data + len) is `event` with another text, which is not empty; else 0. */
int llmtap_match(const struct llmtap_event *event, const unsigned char *data, size_t len, struct llmtap_text *text);

#endif
