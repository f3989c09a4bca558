#include "matcher.h"

#include <string.h>

#define SIZE_DIGITS_MAX 4 /* number of hexadecimal digits of LLMTAP_BLOCK_BYTES_MAX */
#define COUNT_DIGITS_MAX 8 /* as in protocol/repetition.py */

struct look {
    int visible, unknown, escapes;
};

static int hex(unsigned char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* Return the value of the four hexadecimal digits of \u at `p`; -1 if there are not four. */
static int code_unit(const unsigned char *p, const unsigned char *end) {
    int unit = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int digit = hex(p[i]);
        if (digit < 0) return -1;
        unit = unit << 4 | digit;
    }
    return unit;
}

/* RFC 8259 7: return the length of the escape that begins with the backslash at `p`; 0 if it is invalid. A surrogate
 * is valid only as part of a pair. */
static int escape(const unsigned char *p, const unsigned char *end, struct look *look) {
    look->escapes = 1;
    if (end - p < 2) return 0;
    switch (p[1]) {
    case '"': case '\\': case '/': case 'b':
        look->visible = 1;
        return 2;
    case 'f': case 'n': case 'r': case 't':
        return 2;
    case 'u':
        break;
    default:
        return 0;
    }
    look->unknown = 1;
    int unit = code_unit(p + 2, end);
    if (unit < 0 || (unit >= 0xdc00 && unit < 0xe000)) return 0;
    if (unit < 0xd800 || unit >= 0xe000) return 6;
    if (end - p < 12 || p[6] != '\\' || p[7] != 'u') return 0;
    int low = code_unit(p + 8, end);
    return low >= 0xdc00 && low < 0xe000 ? 12 : 0;
}

static int continues(unsigned char c) { return (c & 0xc0) == 0x80; }

/* RFC 3629 4: return the length of the UTF-8 character at `p`, which is not ASCII; 0 if it is invalid. */
static int utf8(const unsigned char *p, const unsigned char *end) {
    size_t left = (size_t)(end - p);
    unsigned char c = p[0];
    if (c < 0xc2 || c > 0xf4 || left < 2 || !continues(p[1])) return 0;
    if (c < 0xe0) return 2;
    if ((c == 0xe0 && p[1] < 0xa0) || (c == 0xed && p[1] > 0x9f)) return 0;
    if (left < 3 || !continues(p[2])) return 0;
    if (c < 0xf0) return 3;
    if ((c == 0xf0 && p[1] < 0x90) || (c == 0xf4 && p[1] > 0x8f)) return 0;
    return left >= 4 && continues(p[3]) ? 4 : 0;
}

/* Return whether [p, end) is the content of one JSON string. */
static int is_string(const unsigned char *p, const unsigned char *end, struct look *look) {
    *look = (struct look){0, 0, 0};
    while (p < end) {
        unsigned char c = *p;
        int n = 1;
        if (c < 0x20 || c == '"') return 0;
        if (c == '\\') {
            n = escape(p, end, look);
        } else if (c >= 0x80) {
            look->unknown = 1;
            n = utf8(p, end);
        } else if (c != ' ') {
            look->visible = 1;
        }
        if (!n) return 0;
        p += n;
    }
    return 1;
}

/* Return whether the bytes are a whole number in decimal digits, without leading zeros. */
static int is_number(const unsigned char *p, const unsigned char *end) {
    if (p == end || (*p == '0' && end - p > 1)) return 0;
    for (; p < end; p++)
        if (*p < '0' || *p > '9') return 0;
    return 1;
}

/* Return whether the bytes are a valid value; for a count, one that fits `count`, which is set if it is 0. */
static int is_value(const unsigned char *p, const unsigned char *end, const struct llmtap_loose *loose, int64_t *count) {
    struct look look;
    if (loose->is_string) return is_string(p, end, &look);
    if (!is_number(p, end)) return 0;
    if (!loose->is_count) return 1;
    int64_t shown = 0;
    if (end - p > COUNT_DIGITS_MAX) return 0;
    for (; p < end; p++) shown = 10 * shown + (*p - '0');
    shown -= loose->offset;
    if (shown <= 0 || (*count && shown != *count)) return 0;
    *count = shown;
    return 1;
}

/* Return the first (step 1) or last (step -1) place of `fixed` in [p, end); NULL if there is none. */
static const unsigned char *find(const unsigned char *p, const unsigned char *end, struct llmtap_bytes fixed, int step) {
    if (!fixed.len || (size_t)(end - p) < fixed.len) return NULL;
    size_t places = (size_t)(end - p) - fixed.len + 1;
    for (size_t i = 0; i < places; i++) {
        const unsigned char *at = step > 0 ? p + i : p + (places - 1 - i);
        if (*at == *fixed.data && !memcmp(at, fixed.data, fixed.len)) return at;
    }
    return NULL;
}

/* RFC 9112 7.1: return the length of the size line if [p, p + len) is one chunk, its size in
 * lower-case hexadecimal without leading zeros or extension; else 0. */
static size_t size_line(const unsigned char *p, size_t len) {
    for (size_t digits = 1; digits <= SIZE_DIGITS_MAX && digits + 5 <= len; digits++) {
        size_t size = len - digits - 4;
        if (size >> (4 * digits)) continue;
        for (size_t i = 0; i < digits; i++)
            if (p[i] != "0123456789abcdef"[size >> (4 * (digits - 1 - i)) & 15]) return 0;
        if (p[0] == '0' || memcmp(p + digits, "\r\n", 2) || memcmp(p + len - 2, "\r\n", 2)) return 0;
        return digits + 2;
    }
    return 0;
}

int llmtap_match(const struct llmtap_event *event, const unsigned char *data, size_t len, struct llmtap_text *text) {
    const unsigned char *p = data, *end = data + len;
    struct look look;
    if (event->chunked) {
        size_t line = size_line(data, len);
        if (!line) return 0;
        p += line;
        end -= 2;
    }
    text->block = (size_t)(end - p);
    if (text->block > LLMTAP_BLOCK_BYTES_MAX || text->block < event->opening.len + event->closing.len) return 0;
    end -= event->closing.len;
    if (memcmp(p, event->opening.data, event->opening.len) || memcmp(end, event->closing.data, event->closing.len))
        return 0;
    p += event->opening.len;
    text->count = 0;
    for (int i = 0; i < event->n_ahead; i++) {
        const struct llmtap_loose *loose = &event->ahead[i];
        const unsigned char *stop = find(p, end, loose->fixed, 1);
        if (!stop || !is_value(p, stop, loose, &text->count)) return 0;
        p = stop + loose->fixed.len;
    }
    for (int i = 0; i < event->n_beyond; i++) {
        const struct llmtap_loose *loose = &event->beyond[i];
        const unsigned char *stop = find(p, end, loose->fixed, -1);
        if (!stop || !is_value(stop + loose->fixed.len, end, loose, &text->count)) return 0;
        end = stop;
    }
    if (p == end || !is_string(p, end, &look)) return 0;
    text->at = p;
    text->len = (size_t)(end - p);
    text->is_plain = !look.escapes;
    text->blank = look.visible ? 0 : look.unknown ? -1 : 1;
    return 1;
}
