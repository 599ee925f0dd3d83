/* Runs kernels of an Arm machine under emulation.
 *
 *     neon_runner FILE ADDRESS BYTES
 *
 * FILE, which holds the tests' arrays, is mapped at ADDRESS: where the process that made them has it too. Each line of
 * standard input, "LIBRARY SYMBOL OP BLOCK SCRATCH", calls one kernel; its return value is a line of standard output.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef int (*kernel)(void *, void *, int64_t, int64_t, int64_t);

int main(int count, char **arguments) {
    static char path[4096], symbol[4096];
    int64_t slot[2], op, block, scratch;
    if (count != 4) return 2;
    int file = open(arguments[1], O_RDWR);
    void *wanted = (void *)strtoull(arguments[2], NULL, 10);
    size_t num_bytes = strtoull(arguments[3], NULL, 10);
    void *mapped = mmap(wanted, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    if (file < 0 || mapped != wanted) return perror(arguments[1]), 1;
    while (scanf("%4095s %4095s %ld %ld %ld", path, symbol, &op, &block, &scratch) == 5) {
        void *library = dlopen(path, RTLD_NOW);
        kernel call = library ? (kernel)dlsym(library, symbol) : NULL;
        if (!call) return fprintf(stderr, "%s\n", dlerror()), 1;
        printf("%d\n", call(slot, slot, op, block, scratch));
        fflush(stdout);
    }
    return 0;
}
