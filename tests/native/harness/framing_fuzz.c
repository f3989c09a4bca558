/* Holds the framing scan against a machine that goes byte by byte. The first byte of the input is what was left before
   it, the second one where the input is cut in two. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "framing.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What is left of the chunk behind the bytes; -1: not plain, or not valid. */
static int64_t byte_by_byte(const uint8_t *data, size_t size, int64_t left) {
    static const char digits[] = "0123456789abcdefABCDEF";
    int n = 0, cr = 0;
    int64_t length = 0;
    for (size_t i = 0; i < size; i++) {
        if (left) {
            if ((left == 2 && data[i] != '\r') || (left == 1 && data[i] != '\n')) return -1;
            left--;
        } else if (cr) {
            if (data[i] != '\n' || !length) return -1;
            left = length + 2;
            n = cr = 0;
            length = 0;
        } else if (data[i] == '\r' && n) {
            cr = 1;
        } else {
            const char *digit = data[i] ? strchr(digits, data[i]) : NULL;
            if (!digit || ++n > 15) return -1;
            int value = (int)(digit - digits);
            length = 16 * length + (value < 16 ? value : value - 6);
        }
    }
    return n || cr ? -1 : left;
}

static int64_t scan(const uint8_t *data, size_t size, int64_t left) {
    uint8_t *exact = malloc(size);
    memcpy(exact, data, size);
    int64_t found = llmtap_chunks_left(exact, size, left);
    if (found != byte_by_byte(data, size, left)) abort();
    free(exact);
    return found;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 3) return 0;
    int64_t left = data[0] & 31;
    size_t cut = data[1] % (size - 1);
    data += 2;
    size -= 2;
    int64_t whole = scan(data, size, left), first = scan(data, cut, left);
    if (first >= 0) {
        int64_t both = scan(data + cut, size - cut, first);
        if (both != whole) abort();
    }
    return 0;
}
