/* Runs the matcher on a read. The first byte of the input selects the fixed parts and whether the read is a chunk. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "matcher.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* In a heap buffer of exactly its size, so that an access beyond it is noticed. */
static struct llmtap_bytes fixed(const char *text) {
    struct llmtap_bytes found = {NULL, strlen(text)};
    unsigned char *copy = malloc(found.len);
    memcpy(copy, text, found.len);
    found.data = copy;
    return found;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct llmtap_event events[2];
    if (!events[0].opening.data) {
        events[0].opening = fixed("data: {\"text\":\"");
        events[0].closing = fixed("\"}\n\n");
        events[1] = events[0];
        events[1].opening = fixed("data: {\"id\":\"");
        events[1].ahead[0] = (struct llmtap_loose){fixed("\",\"n\":"), 1};
        events[1].ahead[1] = (struct llmtap_loose){fixed(",\"text\":\""), 0};
        events[1].beyond[0] = (struct llmtap_loose){fixed("\",\"pad\":\""), 1};
        events[1].n_ahead = 2;
        events[1].n_beyond = 1;
    }
    if (!size) return 0;
    struct llmtap_event event = events[data[0] & 1];
    event.chunked = data[0] >> 1 & 1;
    uint8_t *read = malloc(size - 1);
    memcpy(read, data + 1, size - 1);
    struct llmtap_text text;
    if (llmtap_match(&event, read, size - 1, &text)) {
        if (!text.len || text.at < read || text.at + text.len > read + size - 1) abort();
        if (text.block > LLMTAP_BLOCK_BYTES_MAX || text.block > size - 1) abort();
    }
    free(read);
    return 0;
}
