/* Framing of a chunked body (RFC 9112 7.1), for chunks without extensions. */
#ifndef LLMTAP_FRAMING_H
#define LLMTAP_FRAMING_H

#include <stddef.h>
#include <stdint.h>

/*
 * Return how many bytes of the current chunk, with its CR LF, are still to come after these `len` bytes of a body.
 *
 * `left` is this number before the `len` bytes; 0: a chunk begins. Return -1 if Python has to read the bytes, because
 * they have the last chunk, a size line with an extension or without its end, or are not valid.
 */
int64_t llmtap_chunks_left(const unsigned char *data, size_t len, int64_t left);

#endif
