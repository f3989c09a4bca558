#include "heads.h"

#include <string.h>

#define LENGTH_DIGITS_MAX 15
#define STATUS_LINE_BYTES 13 /* "HTTP/1.1 200 " */

/* RFC 9110 5.6.2: each token character in lower case; 0: the byte is not a token character. */
static const unsigned char TOKEN[256] = {
    ['!'] = '!', ['#'] = '#', ['$'] = '$', ['%'] = '%', ['&'] = '&', ['\''] = '\'', ['*'] = '*', ['+'] = '+',
    ['-'] = '-', ['.'] = '.', ['^'] = '^', ['_'] = '_', ['`'] = '`', ['|'] = '|', ['~'] = '~',
    ['0'] = '0', ['1'] = '1', ['2'] = '2', ['3'] = '3', ['4'] = '4', ['5'] = '5', ['6'] = '6', ['7'] = '7',
    ['8'] = '8', ['9'] = '9',
    ['a'] = 'a', ['b'] = 'b', ['c'] = 'c', ['d'] = 'd', ['e'] = 'e', ['f'] = 'f', ['g'] = 'g', ['h'] = 'h',
    ['i'] = 'i', ['j'] = 'j', ['k'] = 'k', ['l'] = 'l', ['m'] = 'm', ['n'] = 'n', ['o'] = 'o', ['p'] = 'p',
    ['q'] = 'q', ['r'] = 'r', ['s'] = 's', ['t'] = 't', ['u'] = 'u', ['v'] = 'v', ['w'] = 'w', ['x'] = 'x',
    ['y'] = 'y', ['z'] = 'z',
    ['A'] = 'a', ['B'] = 'b', ['C'] = 'c', ['D'] = 'd', ['E'] = 'e', ['F'] = 'f', ['G'] = 'g', ['H'] = 'h',
    ['I'] = 'i', ['J'] = 'j', ['K'] = 'k', ['L'] = 'l', ['M'] = 'm', ['N'] = 'n', ['O'] = 'o', ['P'] = 'p',
    ['Q'] = 'q', ['R'] = 'r', ['S'] = 's', ['T'] = 't', ['U'] = 'u', ['V'] = 'v', ['W'] = 'w', ['X'] = 'x',
    ['Y'] = 'y', ['Z'] = 'z',
};

/* RFC 3986 3.3 and 3.4: characters of a path and a query that are valid at any place. */
static int is_target_char(unsigned char c) {
    return (TOKEN[c] && c != '^' && c != '`' && c != '|' && c != '#') || c == '/' || c == '?' || c == '=' ||
           c == ':' || c == '@' || c == ',' || c == ';' || c == '(' || c == ')';
}

static int is_visible(unsigned char c) { return c > 0x20 && c < 0x7f; }

static int equals(const unsigned char *data, size_t len, const char *lower, size_t lower_len) {
    if (len != lower_len) return 0;
    for (size_t i = 0; i < len; i++)
        if (TOKEN[data[i]] != (unsigned char)lower[i]) return 0;
    return 1;
}

#define IS(data, len, text) equals(data, len, text, sizeof(text) - 1)

int llmtap_field_kind(const unsigned char *name, size_t len) {
    switch (len) {
    case 2:
        return IS(name, len, "te") ? -1 : LLMTAP_PASS;
    case 4:
        return IS(name, len, "host") ? LLMTAP_HOST : LLMTAP_PASS;
    case 6:
        return IS(name, len, "expect") ? -1 : LLMTAP_PASS;
    case 7:
        return IS(name, len, "upgrade") || IS(name, len, "trailer") ? -1 : LLMTAP_PASS;
    case 10:
        return IS(name, len, "connection") || IS(name, len, "keep-alive") ? LLMTAP_HOP : LLMTAP_PASS;
    case 12:
        return IS(name, len, "max-forwards") ? -1 : LLMTAP_PASS;
    case 14:
        /* x-llmtap-label: LABEL_FIELD of exchange/label.py. */
        return IS(name, len, "http2-settings") || IS(name, len, "x-llmtap-label") ? LLMTAP_HOP : LLMTAP_PASS;
    case 16:
        return IS(name, len, "proxy-connection") ? LLMTAP_HOP : LLMTAP_PASS;
    default:
        return LLMTAP_PASS;
    }
}

/* Read the value of a field that decides the framing. Return 0 if the value is not plain. */
static int read_framing(const unsigned char *data, struct llmtap_field *field, struct llmtap_head *head) {
    const unsigned char *name = data + field->name.at, *value = data + field->value.at;
    size_t name_len = field->name.len, len = field->value.len;
    if (name_len == 14 && IS(name, name_len, "content-length")) {
        if (head->length >= 0 || len > LENGTH_DIGITS_MAX) return 0;
        int64_t length = 0;
        for (size_t i = 0; i < len; i++) {
            if (value[i] < '0' || value[i] > '9') return 0;
            length = 10 * length + (value[i] - '0');
        }
        head->length = length;
    } else if (name_len == 17 && IS(name, name_len, "transfer-encoding")) {
        if (head->chunked || !IS(value, len, "chunked")) return 0;
        head->chunked = 1;
    } else if (name_len == 10 && IS(name, name_len, "connection")) {
        if (head->keep_alive || !IS(value, len, "keep-alive")) return 0;
        head->keep_alive = 1;
    }
    return 1;
}

/* Read the field lines from `at` to the empty line, which has to end the data. */
static int read_fields(const unsigned char *data, size_t at, size_t len, struct llmtap_head *head) {
    head->length = -1;
    head->chunked = head->keep_alive = head->n = 0;
    head->host = -1;
    for (;;) {
        if (len - at < 2) return 0;
        if (data[at] == '\r') return data[at + 1] == '\n' && at + 2 == len && !(head->chunked && head->length >= 0);
        if (head->n == LLMTAP_FIELDS_MAX) return 0;
        struct llmtap_field *field = &head->fields[head->n];
        size_t start = at;
        while (at < len && TOKEN[data[at]]) at++;
        if (at == start || at == len || data[at] != ':') return 0;
        field->name = (struct llmtap_span){(uint32_t)start, (uint32_t)(at - start)};
        at++;
        if (at < len && data[at] == ' ') at++;
        start = at;
        while (at < len && (is_visible(data[at]) || data[at] == ' ')) at++;
        /* Refuse an empty value, white space around the value beyond one space, and other characters. */
        if (len - at < 2 || data[at] != '\r' || data[at + 1] != '\n') return 0;
        if (at == start || data[start] == ' ' || data[at - 1] == ' ') return 0;
        field->value = (struct llmtap_span){(uint32_t)start, (uint32_t)(at - start)};
        at += 2;
        int kind = llmtap_field_kind(data + field->name.at, field->name.len);
        if (kind < 0 || !read_framing(data, field, head)) return 0;
        if (kind == LLMTAP_HOST) {
            if (head->host >= 0) return 0;
            head->host = head->n;
        }
        field->kind = (uint8_t)kind;
        head->n++;
    }
}

int llmtap_plain_request(const unsigned char *data, size_t len, struct llmtap_head *head) {
    static const char PROTOCOL[] = " HTTP/1.1\r\n";
    size_t at;
    if (len > UINT32_MAX) return 0;
    if (len > 4 && !memcmp(data, "GET ", 4)) head->method = (struct llmtap_span){0, 3}, at = 4;
    else if (len > 5 && !memcmp(data, "POST ", 5)) head->method = (struct llmtap_span){0, 4}, at = 5;
    else return 0;
    size_t start = at;
    if (data[at] != '/') return 0;
    while (at < len && is_target_char(data[at])) at++;
    head->target = (struct llmtap_span){(uint32_t)start, (uint32_t)(at - start)};
    if (len - at < sizeof PROTOCOL - 1 || memcmp(data + at, PROTOCOL, sizeof PROTOCOL - 1)) return 0;
    head->reason = (struct llmtap_span){0, 0};
    head->status = 0;
    return read_fields(data, at + sizeof PROTOCOL - 1, len, head) && head->host >= 0;
}

int llmtap_plain_response(const unsigned char *data, size_t len, struct llmtap_head *head) {
    if (len > UINT32_MAX || len < STATUS_LINE_BYTES + 2 || memcmp(data, "HTTP/1.1 ", 9) || data[12] != ' ') return 0;
    int status = 0;
    for (int i = 9; i < 12; i++) {
        if (data[i] < '0' || data[i] > '9') return 0;
        status = 10 * status + (data[i] - '0');
    }
    if (status < 200 || status > 599 || status == 204 || status == 304 || status == 426) return 0;
    size_t at = STATUS_LINE_BYTES;
    while (at < len && (is_visible(data[at]) || data[at] == ' ')) at++;
    if (at == STATUS_LINE_BYTES || data[STATUS_LINE_BYTES] == ' ' || data[at - 1] == ' ') return 0;
    if (len - at < 2 || data[at] != '\r' || data[at + 1] != '\n') return 0;
    head->status = status;
    head->method = head->target = (struct llmtap_span){0, 0};
    head->reason = (struct llmtap_span){STATUS_LINE_BYTES, (uint32_t)(at - STATUS_LINE_BYTES)};
    return read_fields(data, at + 2, len, head);
}
