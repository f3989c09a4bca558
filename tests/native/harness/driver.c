/* Runs a fuzz target on seeded inputs: ./target COUNT SEED FILE...

   Each input is one of the FILEs, two of them spliced, or random bytes, with a few random mutations. It is in a heap
   buffer of exactly its size, so that AddressSanitizer sees an access one byte beyond it. The entry point is
   libFuzzer's, so a target also runs under clang's fuzzer. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { SIZE_MAX_BYTES = 4096, MUTATIONS_MAX = 6 };

static uint64_t state;

static uint32_t next(uint32_t below) {
    state ^= state << 13; /* xorshift64 */
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)((state >> 16) % below) : 0;
}

typedef struct {
    uint8_t *data;
    size_t size;
} Sample;

static Sample *samples;
static size_t samples_n;

static void load(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        exit(2);
    }
    Sample sample = {malloc(SIZE_MAX_BYTES), 0};
    sample.size = fread(sample.data, 1, SIZE_MAX_BYTES, file);
    fclose(file);
    samples = realloc(samples, (samples_n + 1) * sizeof *samples);
    samples[samples_n++] = sample;
}

static size_t generate(uint8_t *out) {
    static const uint8_t special[] = "\r\n0123456789abcdefABCDEF;:{}[]\",\\ ud\0\177\200\377";
    size_t size = 0;
    if (samples_n == 0 || next(16) == 0) {
        size = next(64);
        for (size_t i = 0; i < size; i++) out[i] = (uint8_t)next(256);
    } else {
        const Sample *first = &samples[next((uint32_t)samples_n)];
        size = next(4) ? first->size : next((uint32_t)first->size + 1);
        memcpy(out, first->data, size);
        if (next(4) == 0) {
            const Sample *second = &samples[next((uint32_t)samples_n)];
            size_t from = next((uint32_t)second->size + 1), room = SIZE_MAX_BYTES - size;
            size_t more = second->size - from < room ? second->size - from : room;
            memcpy(out + size, second->data + from, more);
            size += more;
        }
    }
    for (uint32_t left = next(MUTATIONS_MAX + 1); left > 0 && size > 0; left--) {
        size_t at = next((uint32_t)size);
        switch (next(4)) {
        case 0: out[at] ^= (uint8_t)(1u << next(8)); break;
        case 1: out[at] = special[next(sizeof special - 1)]; break;
        case 2: /* delete */
            memmove(out + at, out + at + 1, size - at - 1);
            size--;
            break;
        default: /* insert */
            if (size == SIZE_MAX_BYTES) break;
            memmove(out + at + 1, out + at, size - at);
            out[at] = special[next(sizeof special - 1)];
            size++;
        }
    }
    return size;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s COUNT SEED FILE...\n", argv[0]);
        return 2;
    }
    uint64_t count = strtoull(argv[1], NULL, 10);
    state = strtoull(argv[2], NULL, 10) * 2 + 0x9E3779B97F4A7C15u;
    for (int i = 3; i < argc; i++) load(argv[i]);
    static uint8_t scratch[SIZE_MAX_BYTES];
    for (uint64_t i = 0; i < count; i++) {
        size_t size = generate(scratch);
        uint8_t *exact = malloc(size);
        memcpy(exact, scratch, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    for (size_t i = 0; i < samples_n; i++) free(samples[i].data);
    free(samples);
    printf("%llu inputs, seed %s\n", (unsigned long long)count, argv[2]);
    return 0;
}
