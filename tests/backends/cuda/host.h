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

static float bf16_value(unsigned short u) { unsigned w = (unsigned)u << 16; float f; memcpy(&f, &w, 4); return f; }
static unsigned short f32_to_bf16(float x) {
  unsigned u;
  memcpy(&u, &x, 4);
  return x != x ? (unsigned short)((u >> 16) | 0x40) : (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// what the lanes of a warp hold of a[16][16] and b[16][8]
static unsigned held_a[1024][4], held_b[1024][2];
static void multiply(float* c, const unsigned* a, const unsigned* b, float (*value)(unsigned short)) {
  unsigned me = threadIdx.x, first = me / 32 * 32, lane = me % 32;
  memcpy(held_a[me], a, 16);
  memcpy(held_b[me], b, 8);
  __syncthreads();
  for (int i = 0; i < 4; ++i) {
    int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      unsigned x = held_a[first + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      unsigned y = held_b[first + column * 4 + k % 8 / 2][k / 8];
      c[i] += value((unsigned short)(x >> (k % 2 * 16))) * value((unsigned short)(y >> (k % 2 * 16)));
    }
  }
  __syncthreads();
}
static void mma_bf16(float* c, const unsigned* a, const unsigned* b) { multiply(c, a, b, bf16_value); }
static void mma_f16(float* c, const unsigned* a, const unsigned* b) { multiply(c, a, b, f16_to_f32); }
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
#define __align__(n) __attribute__((aligned(n)))

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
