/* The framing of a chunked body (RFC 9112 7.1), as far as it is plain. */
#ifndef LLMTAP_FRAMING_H
#define LLMTAP_FRAMING_H

#include <stddef.h>
#include <stdint.h>

/*
 * Find out what is left of the current chunk, its CR LF included, behind `len` bytes of a body.
 *
 * `left` is what was left before them; 0: a chunk begins. Returns -1 if Python has to read these bytes: the last
 * chunk, a size line with an extension or without its end, or anything that is not valid.
 */
int64_t llmtap_chunks_left(const unsigned char *data, size_t len, int64_t left);

#endif
