/* Reads one byte beyond its input: if the sanitizers miss that, they find nothing. */

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return data[size] == 0 ? 0 : 1;
}
