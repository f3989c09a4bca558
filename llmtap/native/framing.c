#include "framing.h"

#define SIZE_DIGITS_MAX 15 /* maximum number of digits of a chunk size, as in protocol/http1.py */

static int hex(unsigned char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

int64_t llmtap_chunks_left(const unsigned char *data, size_t len, int64_t left) {
    const unsigned char *p = data, *end = data + len;
    if (left < 0) return -1;
    for (;;) {
        if (left) {
            /* A chunk must end with CR LF. A read may end before, between or after these two bytes. */
            int64_t here = end - p < left ? end - p : left;
            if (here == left) {
                if (p[here - 1] != '\n' || (here > 1 && p[here - 2] != '\r')) return -1;
            } else if (here == left - 1 && here && p[here - 1] != '\r') {
                return -1;
            }
            p += here;
            left -= here;
            if (left || p == end) return left;
        }
        if (p == end) return 0;
        int digits = 0, digit;
        while (p < end && digits < SIZE_DIGITS_MAX && (digit = hex(*p)) >= 0) {
            left = left << 4 | digit;
            digits++;
            p++;
        }
        if (!digits || !left || end - p < 2 || p[0] != '\r' || p[1] != '\n') return -1;
        p += 2;
        left += 2;
    }
}
