/* Plain request and response heads (RFC 9112): a strict subset of what protocol/http1.py accepts.
 *
 * A head is plain if it can be read in one way only and needs no rule that this file does not have. The Python parser
 * reads all other heads. No memory is allocated and no byte outside [data, data + len) is read.
 */
#ifndef LLMTAP_HEADS_H
#define LLMTAP_HEADS_H

#include <stddef.h>
#include <stdint.h>

#define LLMTAP_FIELDS_MAX 64

/* How a field is forwarded: unchanged, removed (hop-by-hop), or with another host. Twin of vantage/relay/heads.py. */
enum llmtap_field_kind { LLMTAP_PASS, LLMTAP_HOP, LLMTAP_HOST };

struct llmtap_span {
    uint32_t at, len;
};

struct llmtap_field {
    struct llmtap_span name, value;
    uint8_t kind;
};

struct llmtap_head {
    struct llmtap_span method, target, reason;
    int status;
    int64_t length; /* value of Content-Length; -1: there is no such field */
    int chunked;    /* whether there is Transfer-Encoding: chunked */
    int keep_alive; /* whether there is Connection: keep-alive */
    int host;       /* index of the Host field; -1: there is none */
    int n;          /* number of fields */
    struct llmtap_field fields[LLMTAP_FIELDS_MAX];
};

/* Return 1 and fill `head` if [data, data + len) is one head, with its empty line, and plain (see the top); else 0. */
int llmtap_plain_request(const unsigned char *data, size_t len, struct llmtap_head *head);
int llmtap_plain_response(const unsigned char *data, size_t len, struct llmtap_head *head);

/* Return LLMTAP_PASS, LLMTAP_HOP or LLMTAP_HOST for a field's name; -1 if Python has to decide. */
int llmtap_field_kind(const unsigned char *name, size_t len);

#endif
