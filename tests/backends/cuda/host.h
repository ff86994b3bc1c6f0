// What CUDA gives a kernel, for a processor: the threads of a block are contexts that take turns at barriers.
#define RLX_HOST
#include <math.h>
#include <string.h>
#include <ucontext.h>
#include <stdlib.h>

#define __global__
#define __device__ static inline
#define __forceinline__
#define __shared__ static
#define __launch_bounds__(n)

struct Index3 { unsigned x, y, z; };
static Index3 threadIdx, blockIdx, blockDim, gridDim;
static unsigned long long lanes[1024];
static ucontext_t scheduler, contexts[1024];
static bool done[1024];

static void turn() {  // to the next thread; comes back when all others have got here
  unsigned me = threadIdx.x;
  swapcontext(&contexts[me], &scheduler);
}
static void __syncthreads() { if (blockDim.x > 1) turn(); }
static unsigned long long exchange(unsigned long long v, int mask) {
  lanes[threadIdx.x] = v;
  __syncthreads();
  unsigned long long got = lanes[threadIdx.x ^ mask];
  __syncthreads();
  return got;
}
static unsigned __shfl_xor_sync(unsigned, unsigned v, int mask) { return (unsigned)exchange(v, mask); }
static unsigned long long __shfl_xor_sync(unsigned, unsigned long long v, int mask) { return exchange(v, mask); }
static unsigned long long atomicCAS(unsigned long long* at, unsigned long long old, unsigned long long made) {
  unsigned long long found = *at;
  if (found == old) *at = made;
  return found;
}
static unsigned short f32_to_f16(float x) { _Float16 h = (_Float16)x; unsigned short u; memcpy(&u, &h, 2); return u; }
static float f16_to_f32(unsigned short u) { _Float16 h; memcpy(&h, &u, 2); return (float)h; }

typedef void (*Kernel)(const void*);
static Kernel running;
static const void* argument;
static void thread_main() {
  running(argument);
  done[threadIdx.x] = true;
  turn();
}
static void run_block(unsigned threads) {
  static char* stacks = (char*)malloc(1024 * 65536);
  for (unsigned t = 0; t < threads; ++t) {
    done[t] = false;
    getcontext(&contexts[t]);
    contexts[t].uc_stack.ss_sp = stacks + t * 65536;
    contexts[t].uc_stack.ss_size = 65536;
    contexts[t].uc_link = 0;
    makecontext(&contexts[t], thread_main, 0);
  }
  for (unsigned left = threads; left;) {
    left = 0;
    for (unsigned t = 0; t < threads; ++t)
      if (!done[t]) {
        threadIdx.x = t;
        swapcontext(&scheduler, &contexts[t]);
        left += !done[t];
      }
  }
}
extern "C" void launch(Kernel kernel, unsigned blocks, unsigned threads, const void* words, int waits) {
  running = kernel;
  argument = words;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx.x = b;
    if (waits) { run_block(threads); continue; }
    for (unsigned t = 0; t < threads; ++t) { threadIdx.x = t; kernel(words); }
  }
}
