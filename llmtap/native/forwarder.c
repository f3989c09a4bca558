#include "forwarder.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "framing.h"
#include "reading.h"

#define NS_PER_S 1000000000
enum {
    EVENTS_MAX = 64,
    ROWS_MIN = 256,
    DATA_BYTES_MIN = 64 * 1024,
    DATA_BYTES_KEPT = 1024 * 1024, /* a larger buffer is released when it is empty */
    PROBE_NS = 10000000,           /* period of the probe; same value as in vantage/reporter.py */
    PROBE_GRAIN_NS = 1000000,
    STEP_NS = 1000000, /* if the wall clock moves by more, it was set; as in net/stream.py */
};
#define LAG_ABSURD_NS 60000000000 /* a longer lag means that the wall clock was set; as in net/stream.py */

struct llmtap_forwarder {
    struct llmtap_forwarder_options options;
    pthread_t thread;
    int events_fd;
    int notify_fd;  /* wakes the caller */
    int command_fd; /* wakes the thread */
    int probe_fd;
    _Atomic int commanded; /* whether a command (recall or end) waits; the thread reads this without the lock */
    _Atomic int64_t offset_ns, since_ns, room;

    pthread_mutex_t lock; /* guards the fields down to `stopped`; held for microseconds, never during I/O */
    pthread_cond_t recalled_back;
    struct llmtap_loan *recalled;
    struct llmtap_loan *lent;
    struct llmtap_loan *returned_first, *returned_last;
    struct llmtap_rows frames;
    struct llmtap_lags lags;
    int64_t probe_due_ns; /* next expiry of the timer by which the thread measures its lag; 0: the timer is off */
    int wants_first;      /* whether to notify the caller of the next frame */
    int notified;
    int stopped;

    struct llmtap_rows spare; /* frames that the caller took last; only the caller uses them */

    /* Only the thread uses the fields below. */
    struct epoll_event events[EVENTS_MAX];
    int at, n; /* index of the event that is being handled, and number of events */
    unsigned char buffer[LLMTAP_READ_BYTES_MAX];
};

/* `data` of an event: the address of one of these marks for the thread's own descriptors, or the address of a loan,
 * plus 1 if the event is from the client's socket. */
static char command_mark, probe_mark;

static void notify(int fd) {
    uint64_t one = 1;
    /* The write fails only if the count is at its maximum, and then the descriptor is readable already. */
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) continue;
}

static uint64_t clear(int fd) {
    uint64_t count = 0;
    return read(fd, &count, sizeof count) == sizeof count ? count : 0;
}

/* ---- frames; the caller of these functions holds the lock */

static int grow(void **block, size_t *room, size_t wanted, size_t least, size_t item) {
    if (wanted <= *room) return 1;
    size_t fresh = wanted + wanted / 2;
    if (fresh < least) fresh = least;
    void *grown = realloc(*block, fresh * item);
    if (!grown) return 0;
    *block = grown;
    *room = fresh;
    return 1;
}

static int put(struct llmtap_rows *frames, struct llmtap_row row, const void *data) {
    void *rows = frames->rows, *all = frames->data;
    int has_room = grow(&rows, &frames->room, frames->n + 1, ROWS_MIN, sizeof row);
    frames->rows = rows;
    if (!has_room) return 0;
    has_room = grow(&all, &frames->data_room, frames->data_bytes + row.size, DATA_BYTES_MIN, 1);
    frames->data = all;
    if (!has_room) return 0;
    if (row.size) memcpy(frames->data + frames->data_bytes, data, row.size);
    frames->rows[frames->n++] = row;
    frames->data_bytes += row.size;
    return 1;
}

static int64_t size_of(const struct llmtap_rows *frames) {
    return (int64_t)(frames->data_bytes + frames->n * LLMTAP_FRAME_BYTES);
}

static void empty(struct llmtap_rows *frames) { frames->n = frames->data_bytes = frames->drops = 0; }

static void release(struct llmtap_rows *frames) {
    free(frames->rows);
    free(frames->data);
    *frames = (struct llmtap_rows){0};
}

static void note_lag(struct llmtap_forwarder *f, int64_t lag_ns) {
    struct llmtap_lags *lags = &f->lags;
    int i = 0;
    while (i < LLMTAP_LAG_BUCKETS - 1 && lag_ns > f->options.lag_edges_ns[i]) i++;
    lags->counts[i]++;
    lags->sum_ns += lag_ns;
    if (lag_ns > lags->max_ns) lags->max_ns = lag_ns;
}

/* ---- functions of the thread */

/* Report a read. If there is no room, report only that the whole exchange is dropped. */
static void report(struct llmtap_forwarder *f, struct llmtap_loan *loan, int64_t t_ns, size_t size, int64_t lag_ns) {
    int64_t added_ns = llmtap_mono_ns() - t_ns;
    struct llmtap_row row = {loan->seq, t_ns, added_ns, (uint32_t)size, f->options.data_kind};
    if (loan->tapped && llmtap_came_at_once(&loan->received, loan->upstream, f->buffer, size))
        row.kind = f->options.at_once_kind;
    int wakes = 0;
    pthread_mutex_lock(&f->lock);
    if (lag_ns >= 0) note_lag(f, lag_ns);
    if (loan->tapped) {
        if (size_of(&f->frames) > atomic_load(&f->room) || !put(&f->frames, row, f->buffer)) {
            row.kind = f->options.drop_kind;
            row.extra_ns = row.size = 0;
            loan->tapped = 0;
            /* If there is no memory even for this frame, the caller drops the exchange when the loan returns. */
            f->frames.drops += (size_t)put(&f->frames, row, NULL);
        }
        wakes = !f->notified && (f->wants_first || size_of(&f->frames) > LLMTAP_NOTIFY_BYTES);
        f->notified |= wakes;
        f->wants_first &= !wakes;
    }
    pthread_mutex_unlock(&f->lock);
    if (wakes) notify(f->notify_fd);
}

static void give_back(struct llmtap_forwarder *f, struct llmtap_loan *loan, enum llmtap_reason reason) {
    /* The caller may release a returned loan, so remove its address from the events that are not handled yet. */
    for (int i = f->at + 1; i < f->n; i++) {
        char *data = f->events[i].data.ptr;
        if (data == (char *)loan || data == (char *)loan + 1) f->events[i].data.ptr = NULL;
    }
    loan->reason = reason;
    pthread_mutex_lock(&f->lock);
    epoll_ctl(f->events_fd, EPOLL_CTL_DEL, loan->upstream, NULL);
    epoll_ctl(f->events_fd, EPOLL_CTL_DEL, loan->client, NULL);
    if (loan->previous) loan->previous->next = loan->next;
    else f->lent = loan->next;
    if (loan->next) loan->next->previous = loan->previous;
    loan->next = NULL;
    loan->previous = f->returned_last;
    if (f->returned_last) f->returned_last->next = loan;
    else f->returned_first = loan;
    f->returned_last = loan;
    atomic_store(&loan->owner, LLMTAP_RETURNED);
    int wakes = f->recalled != loan;
    if (!wakes) pthread_cond_signal(&f->recalled_back);
    pthread_mutex_unlock(&f->lock);
    if (wakes) notify(f->notify_fd);
}

/* Give a loan back to the event loop, with a copy of the bytes [from, to) of the buffer, which were not sent. */
static void give_back_bytes(
    struct llmtap_forwarder *f, struct llmtap_loan *loan, enum llmtap_reason reason, size_t from, size_t to
) {
    loan->bytes = malloc(to - from);
    if (loan->bytes) {
        memcpy(loan->bytes, f->buffer + from, to - from);
        loan->size = to - from;
    } else {
        /* The bytes are lost, so the answer cannot be completed. */
        reason = LLMTAP_UPSTREAM_LOST;
        loan->error = ENOMEM;
    }
    give_back(f, loan, reason);
}

/* Return how long the bytes of a read waited, by their kernel stamp; -1: the stamp is wrong. Twin: Timebase.place(). */
static int64_t lag_of(struct llmtap_forwarder *f, int64_t now_ns, int64_t wall_ns) {
    int64_t offset_ns = atomic_load(&f->offset_ns), lag_ns = now_ns - wall_ns - offset_ns;
    if (lag_ns >= 0 && lag_ns < LLMTAP_LAG_DOUBT_NS) return lag_ns;
    if (lag_ns > -LLMTAP_MAPPING_NS && lag_ns < 0) return 0;
    if (lag_ns < 0 || lag_ns >= LAG_ABSURD_NS || now_ns - lag_ns < atomic_load(&f->since_ns)) return -1;
    /* Either the read is late, or the wall clock was set since `offset_ns` was measured: find out which. */
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    int64_t moved_ns = llmtap_mono_ns() - ((int64_t)wall.tv_sec * NS_PER_S + wall.tv_nsec) - offset_ns;
    return moved_ns < -STEP_NS || moved_ns > STEP_NS ? -1 : lag_ns;
}

static void forward(struct llmtap_forwarder *f, struct llmtap_loan *loan) {
    int64_t wall_ns = LLMTAP_UNSTAMPED, lag_ns = -1;
    ssize_t got = llmtap_receive(loan->upstream, f->buffer, sizeof f->buffer, 1, &wall_ns);
    if (got < 0) {
        if (errno == EAGAIN || errno == EINTR) return;
        loan->error = errno;
        give_back(f, loan, LLMTAP_UPSTREAM_LOST);
        return;
    }
    int64_t now_ns = llmtap_mono_ns(), t_ns = now_ns;
    if (!got) {
        give_back(f, loan, LLMTAP_UPSTREAM_ENDED);
        return;
    }
    size_t size = (size_t)got;
    loan->now_ns = now_ns;
    llmtap_add_read(&loan->received, size, sizeof f->buffer);
    if (wall_ns == LLMTAP_UNSTAMPED) {
        loan->unstamped_ns = now_ns;
    } else {
        lag_ns = lag_of(f, now_ns, wall_ns);
        if (lag_ns < 0) {
            loan->wall_ns = wall_ns;
            give_back_bytes(f, loan, LLMTAP_NOT_PLACED, 0, size);
            return;
        }
        loan->now_ns = t_ns = now_ns - lag_ns;
    }
    int64_t left = loan->left > got ? loan->left - got : -1;
    if (loan->chunked) left = llmtap_chunks_left(f->buffer, size, loan->left);
    if (left < 0) {
        pthread_mutex_lock(&f->lock);
        if (lag_ns >= 0) note_lag(f, lag_ns);
        pthread_mutex_unlock(&f->lock);
        give_back_bytes(f, loan, LLMTAP_NOT_PLAIN, 0, size);
        return;
    }
    ssize_t sent = llmtap_send(loan->client, f->buffer, size);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR) {
            give_back(f, loan, LLMTAP_CLIENT_LOST);
            return;
        }
        sent = 0;
    }
    loan->left = left;
    loan->forwarded_bytes += got;
    atomic_store_explicit(&loan->last_ns, t_ns, memory_order_relaxed);
    report(f, loan, t_ns, size, lag_ns);
    if (sent < got) {
        give_back_bytes(f, loan, LLMTAP_BLOCKED, (size_t)sent, size);
    } else if (size == sizeof f->buffer) {
        /* More bytes possibly wait. Request an event for them and do not read now, so that other streams come first. */
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.ptr = loan};
        epoll_ctl(f->events_fd, EPOLL_CTL_MOD, loan->upstream, &event);
    }
}

/* Record how late the thread runs. The timer of the probe shows that even if no stream has bytes. */
static void probe(struct llmtap_forwarder *f) {
    uint64_t expired = clear(f->probe_fd);
    int64_t now_ns = llmtap_mono_ns();
    pthread_mutex_lock(&f->lock);
    if (f->probe_due_ns && expired) {
        int64_t late_ns = now_ns - f->probe_due_ns;
        if (late_ns > PROBE_GRAIN_NS) note_lag(f, late_ns);
        f->probe_due_ns += (int64_t)expired * PROBE_NS;
        if (!f->lent) {
            struct itimerspec never = {{0, 0}, {0, 0}};
            timerfd_settime(f->probe_fd, 0, &never, NULL);
            f->probe_due_ns = 0;
        }
    }
    pthread_mutex_unlock(&f->lock);
}

/* Execute the commands of the caller. Return 0 if the thread is to end. */
static int obey(struct llmtap_forwarder *f) {
    pthread_mutex_lock(&f->lock);
    atomic_store(&f->commanded, 0);
    int stopped = f->stopped;
    struct llmtap_loan *loan = f->recalled;
    /* Ignore a recall if the loan was returned meanwhile. Only this thread changes the owner LLMTAP_THREAD. */
    if (loan && atomic_load(&loan->owner) != LLMTAP_THREAD) loan = NULL;
    pthread_mutex_unlock(&f->lock);
    if (loan) give_back(f, loan, LLMTAP_RECALLED);
    return !stopped;
}

static void *run(void *argument) {
    struct llmtap_forwarder *f = argument;
    prctl(PR_SET_NAME, "llmtap-forward");
    for (;;) {
        f->at = -1;
        f->n = epoll_wait(f->events_fd, f->events, EVENTS_MAX, -1);
        for (f->at = 0; f->at < f->n; f->at++) {
            if (atomic_load(&f->commanded)) {
                /* Decrement `at`: give_back() removes the recalled loan only from the events after `at`. */
                f->at--;
                int goes_on = obey(f);
                f->at++;
                if (!goes_on) return NULL;
            }
            char *data = f->events[f->at].data.ptr;
            uint32_t kinds = f->events[f->at].events;
            if (data == &command_mark) {
                clear(f->command_fd);
            } else if (data == &probe_mark) {
                probe(f);
            } else if (data) {
                int is_client = (int)((uintptr_t)data & 1);
                struct llmtap_loan *loan = (struct llmtap_loan *)(data - is_client);
                if (is_client || kinds & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) give_back(f, loan, LLMTAP_ACTIVITY);
                else forward(f, loan);
            }
        }
        if (atomic_load(&f->commanded) && !obey(f)) return NULL;
    }
}

/* ---- functions of the caller */

static int watch(int events_fd, int fd, uint32_t kinds, void *data) {
    struct epoll_event event = {.events = kinds, .data.ptr = data};
    return epoll_ctl(events_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static int start_thread(struct llmtap_forwarder *f) {
    sigset_t all, before;
    sigfillset(&all);
    /* Block all signals in the new thread: only the thread that runs Python handles them. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&f->thread, NULL, run, f);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return !error;
}

static void destroy(struct llmtap_forwarder *f) {
    const int fds[] = {f->events_fd, f->notify_fd, f->command_fd, f->probe_fd};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0) close(fds[i]);
    release(&f->frames);
    release(&f->spare);
    pthread_cond_destroy(&f->recalled_back);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

struct llmtap_forwarder *llmtap_forwarder_start(const struct llmtap_forwarder_options *options) {
    struct llmtap_forwarder *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->options = *options;
    f->wants_first = 1;
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->recalled_back, NULL);
    f->events_fd = epoll_create1(EPOLL_CLOEXEC);
    f->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    f->command_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    f->probe_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (f->events_fd >= 0 && f->notify_fd >= 0 && f->command_fd >= 0 && f->probe_fd >= 0 &&
        watch(f->events_fd, f->command_fd, EPOLLIN, &command_mark) &&
        watch(f->events_fd, f->probe_fd, EPOLLIN, &probe_mark) && start_thread(f))
        return f;
    int error = errno;
    destroy(f);
    errno = error;
    return NULL;
}

/* Wake the thread, so that it executes a command. The caller holds the lock. */
static void command(struct llmtap_forwarder *f) {
    atomic_store(&f->commanded, 1);
    notify(f->command_fd);
}

void llmtap_forwarder_stop(struct llmtap_forwarder *f) {
    pthread_mutex_lock(&f->lock);
    f->stopped = 1;
    command(f);
    pthread_mutex_unlock(&f->lock);
    pthread_join(f->thread, NULL);
    for (struct llmtap_loan *loan = f->lent; loan; loan = loan->next) atomic_store(&loan->owner, LLMTAP_CALLER);
    for (struct llmtap_loan *loan = f->returned_first; loan; loan = loan->next)
        atomic_store(&loan->owner, LLMTAP_CALLER);
    destroy(f);
}

int llmtap_forwarder_fd(const struct llmtap_forwarder *f) { return f->notify_fd; }

void llmtap_set_clock(struct llmtap_forwarder *f, int64_t offset_ns, int64_t since_ns) {
    atomic_store(&f->since_ns, since_ns);
    atomic_store(&f->offset_ns, offset_ns);
}

void llmtap_set_room(struct llmtap_forwarder *f, int64_t bytes) { atomic_store(&f->room, bytes); }

int64_t llmtap_frames_size(struct llmtap_forwarder *f) {
    pthread_mutex_lock(&f->lock);
    int64_t size = size_of(&f->frames);
    pthread_mutex_unlock(&f->lock);
    return size;
}

int llmtap_lend(struct llmtap_forwarder *f, struct llmtap_loan *loan) {
    llmtap_loan_clear(loan);
    loan->forwarded_bytes = loan->unstamped_ns = 0;
    loan->error = 0;
    /* Hold the lock, so that the thread can return the loan only after both sockets are watched. */
    pthread_mutex_lock(&f->lock);
    loan->previous = NULL;
    loan->next = f->lent;
    if (f->lent) f->lent->previous = loan;
    f->lent = loan;
    atomic_store(&loan->owner, LLMTAP_THREAD);
    if (!f->probe_due_ns) {
        struct itimerspec every = {{0, PROBE_NS}, {0, PROBE_NS}};
        f->probe_due_ns = llmtap_mono_ns() + PROBE_NS;
        timerfd_settime(f->probe_fd, 0, &every, NULL);
    }
    int watched = watch(f->events_fd, loan->upstream, EPOLLIN | EPOLLRDHUP | EPOLLET, loan);
    int lent = watched && watch(f->events_fd, loan->client, EPOLLIN | EPOLLRDHUP | EPOLLET, (char *)loan + 1);
    int error = errno;
    if (!watched) {
        f->lent = loan->next;
        if (f->lent) f->lent->previous = NULL;
        atomic_store(&loan->owner, LLMTAP_CALLER);
    }
    pthread_mutex_unlock(&f->lock);
    /* The thread possibly handles an event of the loan already, so let the thread return the loan. */
    if (watched && !lent) llmtap_recall(f, loan);
    errno = error;
    return lent;
}

/* Remove a loan from the list of returned loans. The caller holds the lock. */
static void unlink_returned(struct llmtap_forwarder *f, struct llmtap_loan *loan) {
    if (loan->previous) loan->previous->next = loan->next;
    else f->returned_first = loan->next;
    if (loan->next) loan->next->previous = loan->previous;
    else f->returned_last = loan->previous;
    atomic_store(&loan->owner, LLMTAP_CALLER);
}

void llmtap_recall(struct llmtap_forwarder *f, struct llmtap_loan *loan) {
    pthread_mutex_lock(&f->lock);
    if (atomic_load(&loan->owner) == LLMTAP_THREAD) {
        f->recalled = loan;
        command(f);
        while (atomic_load(&loan->owner) == LLMTAP_THREAD) pthread_cond_wait(&f->recalled_back, &f->lock);
        f->recalled = NULL;
    }
    if (atomic_load(&loan->owner) == LLMTAP_RETURNED) unlink_returned(f, loan);
    pthread_mutex_unlock(&f->lock);
}

void llmtap_acknowledge(struct llmtap_forwarder *f) { clear(f->notify_fd); }

struct llmtap_loan *llmtap_returned(struct llmtap_forwarder *f) {
    pthread_mutex_lock(&f->lock);
    struct llmtap_loan *loan = f->returned_first;
    if (loan) unlink_returned(f, loan);
    pthread_mutex_unlock(&f->lock);
    return loan;
}

const struct llmtap_rows *llmtap_collect(struct llmtap_forwarder *f, struct llmtap_lags *lags) {
    empty(&f->spare);
    if (f->spare.data_room > DATA_BYTES_KEPT) release(&f->spare);
    pthread_mutex_lock(&f->lock);
    struct llmtap_rows frames = f->frames;
    f->frames = f->spare;
    f->spare = frames;
    f->wants_first = !frames.n;
    f->notified = 0;
    *lags = f->lags;
    f->lags = (struct llmtap_lags){0};
    pthread_mutex_unlock(&f->lock);
    return &f->spare;
}

void llmtap_forget(struct llmtap_forwarder *f) {
    pthread_mutex_lock(&f->lock);
    empty(&f->frames);
    for (struct llmtap_loan *loan = f->lent; loan; loan = loan->next) loan->tapped = 0;
    pthread_mutex_unlock(&f->lock);
}

void llmtap_loan_clear(struct llmtap_loan *loan) {
    free(loan->bytes);
    loan->bytes = NULL;
    loan->size = 0;
}
