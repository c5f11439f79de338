// The program around the job: links it and NCCL (-DLINKED), or loads both as Python loads PyTorch, RTLD_LOCAL.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef LINKED
int job(const char *);

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
static __thread long count;
long allocations(void) { return count; }
void *malloc(size_t n) { return count++, __libc_malloc(n); }
void *calloc(size_t n, size_t m) { return count++, __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { return count++, __libc_realloc(p, n); }
#endif

int main(int argc, char **argv) {
#ifndef LINKED
  void *lib = dlopen("libjob.so", RTLD_NOW | RTLD_LOCAL);
  if (!lib) return fprintf(stderr, "%s\n", dlerror()), 8;
  int (*job)(const char *) = dlsym(lib, "job");
#endif
  return argc > 1 ? job(argv[1]) : 7;
}
