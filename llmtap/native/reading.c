#include "reading.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define NS_PER_S 1000000000
#ifndef SO_TIMESTAMPNS
#define SO_TIMESTAMPNS 35 /* Linux asm-generic/socket.h; not in every C library's headers */
#endif

int64_t llmtap_mono_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

ssize_t llmtap_receive(int fd, void *to, size_t room, int stamped, int64_t *wall_ns) {
    union {
        struct cmsghdr header; /* not read; gives the buffer the alignment of a header */
        char bytes[64];
    } control;
    struct iovec part = {.iov_base = to, .iov_len = room};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (!stamped) return recv(fd, to, room, MSG_DONTWAIT);
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    ssize_t size = recvmsg(fd, &message, MSG_DONTWAIT);
    if (size <= 0) return size;
    struct cmsghdr *found = CMSG_FIRSTHDR(&message);
    if (found && found->cmsg_level == SOL_SOCKET && found->cmsg_type == SO_TIMESTAMPNS &&
        found->cmsg_len == CMSG_LEN(sizeof(struct timespec))) {
        struct timespec stamp;
        memcpy(&stamp, CMSG_DATA(found), sizeof stamp);
        *wall_ns = (int64_t)stamp.tv_sec * NS_PER_S + stamp.tv_nsec;
    }
    return size;
}

ssize_t llmtap_peek(int fd) {
    char byte;
    return recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
}

ssize_t llmtap_send(int fd, const void *data, size_t len) { return send(fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL); }
