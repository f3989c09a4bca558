/* Token events that differ only in their text: twin of protocol/repetition.py.
 *
 * No memory is allocated and no byte outside [data, data + len) is read.
 */
#ifndef LLMTAP_MATCHER_H
#define LLMTAP_MATCHER_H

#include <stddef.h>

#define LLMTAP_BLOCK_BYTES_MAX 4096
#define LLMTAP_LOOSE_MAX 3

struct llmtap_bytes {
    const unsigned char *data;
    size_t len;
};

/* A value that changes, and the fixed bytes between it and the text. */
struct llmtap_loose {
    struct llmtap_bytes fixed;
    int is_string;
};

/* The fixed parts of an event, as LooseRepetition names them. */
struct llmtap_event {
    struct llmtap_bytes opening, closing;
    struct llmtap_loose ahead[LLMTAP_LOOSE_MAX], beyond[LLMTAP_LOOSE_MAX];
    int n_ahead, n_beyond;
    int chunked; /* the event is the one chunk of the read, with the framing around it */
};

struct llmtap_text {
    const unsigned char *at; /* inside the quotes, as it is spelt */
    size_t len;
    size_t block; /* bytes of the event, without framing */
    int is_plain; /* no escapes */
    int blank;    /* 1: only white space; 0: not; -1: unknown, as it has characters that were not looked up */
};

/* Return 1 and fill `text` if [data, data + len) is such an event with a text that is not empty; else 0. */
int llmtap_match(const struct llmtap_event *event, const unsigned char *data, size_t len, struct llmtap_text *text);

#endif
