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
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct Index3 { unsigned x, y, z; };
static Index3 threadIdx, blockIdx, blockDim, gridDim;
static const unsigned MOST = 3072;  // threads of a cluster of blocks
static unsigned cluster = 1, self;  // blocks of a cluster, and the number of the thread among all of it
static unsigned long long lanes[MOST];
static ucontext_t scheduler, contexts[MOST];
static bool done[MOST];

static void turn() {  // to the next thread; comes back when all others have got here
  swapcontext(&contexts[self], &scheduler);
}
struct Meeting { unsigned there, generation; };
static Meeting meetings[8][16], all_blocks;
static void meet(Meeting& m, unsigned count) {
  unsigned own = m.generation;
  if (++m.there == count) { m.there = 0; ++m.generation; return; }
  while (m.generation == own) turn();
}
static unsigned cluster_rank() { return self / blockDim.x; }
static void sync_threads(int name, int count) { meet(meetings[cluster_rank()][name], count); }
static void __syncthreads() { if (blockDim.x > 1) sync_threads(0, blockDim.x); }
static void cluster_sync() { meet(all_blocks, cluster * blockDim.x); }
static unsigned long long exchange(unsigned long long v, int mask) {
  lanes[self] = v;
  __syncthreads();
  unsigned long long got = lanes[self ^ mask];
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
static unsigned held_a[MOST][4], held_b[MOST][2];
static void multiply(float* c, const unsigned* a, const unsigned* b, float (*value)(unsigned short)) {
  unsigned me = self, first = me / 32 * 32, lane = me % 32;
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
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
#define __align__(n) __attribute__((aligned(n)))

// ---- what hopper.cuh has on a device: shared memory of each block of a cluster, barriers there, copies and products

#define RLX_MAP const TMap&
static const unsigned SHARED = 256 * 1024;
alignas(1024) static unsigned char shared_memory[8][SHARED];
static unsigned char* dynamic_shared() { return shared_memory[cluster_rank()]; }
static unsigned shared_address(const void* p) { return (unsigned)((const unsigned char*)p - dynamic_shared()); }
static float4 remote_four(const float* p, unsigned rank) { return *(float4*)(shared_memory[rank] + shared_address(p)); }
static int from_first(int v) { return v; }

struct Bar { unsigned char phase, count, pending, unused; int bytes; };
static Bar& bar_at(unsigned a) { return *(Bar*)(dynamic_shared() + a); }
static void bar_init(unsigned a, unsigned count) { bar_at(a) = {0, (unsigned char)count, (unsigned char)count, 0, 0}; }
static void bars_ready() {}
static void bar_passed(Bar& b) { if (!b.pending && !b.bytes) { b.phase ^= 1; b.pending = b.count; } }
static void bar_arrive(unsigned a) { Bar& b = bar_at(a); --b.pending; bar_passed(b); }
static void bar_expect(unsigned a, unsigned bytes) { bar_at(a).bytes += bytes; bar_arrive(a); }
static void bar_wait(unsigned a, unsigned parity) { while (bar_at(a).phase == (parity & 1)) turn(); }

struct Map { unsigned long long address; unsigned rank, sizes[5]; unsigned long long pitches[4]; unsigned short box[5]; };
static void copy_box(unsigned to, const void* given, unsigned bar, const int* at) {
  const Map& m = *(const Map*)given;
  int lines = m.box[1];
  for (int r = 0; r < lines; ++r)
    for (int e = 0; e < 64; ++e) {
      bool inside = at[0] + e >= 0 && at[0] + e < (int)m.sizes[0] && at[1] + r >= 0 && at[1] + r < (int)m.sizes[1];
      unsigned long long from = m.address + 2ull * (at[0] + e) + m.pitches[0] * (at[1] + r);
      for (unsigned d = 2; d < m.rank; ++d) {
        inside = inside && at[d] >= 0 && at[d] < (int)m.sizes[d];
        from += m.pitches[d - 1] * at[d];
      }
      unsigned place = to + r * 128 + e * 2;
      place ^= (place >> 7 & 7) << 4;
      *(unsigned short*)(dynamic_shared() + place) = inside ? *(unsigned short*)from : 0;
    }
  bar_at(bar).bytes -= lines * 128;
  bar_passed(bar_at(bar));
}
template <class... At> static void tma(unsigned to, const void* map, unsigned bar, At... at) {
  int places[] = {at...};
  copy_box(to, map, bar, places);
}
struct Windows {
  unsigned long long address;
  unsigned sizes[4];
  unsigned long long pitches[3];
  int low[2], high[2], strides[2], lines;
};
static void tma_windows(unsigned to, const void* given, unsigned bar, int c, int x, int y, int n, int right, int down) {
  const Windows& m = *(const Windows*)given;
  for (int r = 0; r < m.lines; ++r) {
    int at[4] = {c, x + right, y + down, n};
    for (int e = 0; e < 64; ++e) {
      at[0] = c + e;
      bool inside = true;
      for (int d = 0; d < 4; ++d) inside = inside && at[d] >= 0 && at[d] < (int)m.sizes[d];
      unsigned long long from = m.address + 2ll * at[0] + (long long)m.pitches[0] * at[1] + (long long)m.pitches[1] * at[2] +
                                (long long)m.pitches[2] * at[3];
      unsigned place = to + r * 128 + e * 2;
      place ^= (place >> 7 & 7) << 4;
      *(unsigned short*)(dynamic_shared() + place) = inside ? *(unsigned short*)from : 0;
    }
    x += m.strides[0];
    if (x < (int)m.sizes[1] + m.high[0]) continue;
    x = m.low[0];
    y += m.strides[1];
    if (y < (int)m.sizes[2] + m.high[1]) continue;
    y = m.low[1];
    ++n;
  }
  bar_at(bar).bytes -= m.lines * 128;
  bar_passed(bar_at(bar));
}
static void map_soon(const void*) {}

static void products_begin() {}
static void products_commit() {}
template <int LEFT> static void products_wait() {}
template <int N> static void registers_less() {}
template <int N> static void registers_more() {}
template <int BY_LINES> static unsigned short operand_at(unsigned long long o, int line, int k) {
  unsigned base = (unsigned)(o & 0x3fff) << 4, lead = (unsigned)(o >> 16 & 0x3fff) << 4, stride = (unsigned)(o >> 32 & 0x3fff) << 4;
  unsigned at = BY_LINES ? base + line / 64 * lead + line % 64 * 2 + k / 8 * stride + k % 8 * 128
                         : base + line / 8 * stride + line % 8 * 128 + k * 2;
  return *(unsigned short*)(dynamic_shared() + (at ^ (at >> 7 & 7) << 4));
}
template <int A, int B, int N>
static void group_product(float (&c)[N], unsigned long long a, unsigned long long b, float (*value)(unsigned short)) {
  int t = threadIdx.x % 128, row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
  for (int i = 0; i < N; ++i) {
    float sum = c[i];
    for (int k = 0; k < 16; ++k)
      sum += value(operand_at<A>(a, row + i / 2 % 2 * 8, k)) * value(operand_at<B>(b, i / 4 * 8 + column + i % 2, k));
    c[i] = sum;
  }
}
#define wgmma_bf16 host_wgmma_bf16
#define wgmma_f16 host_wgmma_f16
#define products_done host_products_done
template <int A, int B, int N> static void host_wgmma_bf16(float (&c)[N], unsigned long long a, unsigned long long b) {
  group_product<A, B>(c, a, b, bf16_value);
}
template <int A, int B, int N> static void host_wgmma_f16(float (&c)[N], unsigned long long a, unsigned long long b) {
  group_product<A, B>(c, a, b, f16_to_f32);
}
template <int N> static void host_products_done(float (&c)[N]) {}

// ---- launches

typedef void (*Kernel)(const void*, const void*, const void*);
static Kernel running;
static const void *argument, *maps;
static void thread_main() {
  running(argument, maps, (const char*)maps + 128);
  done[self] = true;
  turn();
}
static void run_blocks(unsigned first, unsigned threads) {
  static char* stacks = (char*)malloc((size_t)MOST * 65536);
  unsigned all = threads * cluster;
  memset(meetings, 0, sizeof(meetings));
  memset(&all_blocks, 0, sizeof(all_blocks));
  memset(shared_memory, 0xff, cluster * SHARED);
  for (unsigned t = 0; t < all; ++t) {
    done[t] = false;
    getcontext(&contexts[t]);
    contexts[t].uc_stack.ss_sp = stacks + (size_t)t * 65536;
    contexts[t].uc_stack.ss_size = 65536;
    contexts[t].uc_link = 0;
    makecontext(&contexts[t], thread_main, 0);
  }
  long rounds = 0;
  for (unsigned left = all; left;) {
    left = 0;
    if (++rounds > 10000000) abort();
    for (unsigned t = 0; t < all; ++t)
      if (!done[t]) {
        self = t;
        threadIdx.x = t % threads;
        blockIdx.x = first + t / threads;
        swapcontext(&scheduler, &contexts[t]);
        left += !done[t];
      }
  }
}
extern "C" void launch(Kernel kernel, unsigned blocks, unsigned threads, const void* words, const void* boxes, int waits,
                       unsigned together) {
  running = kernel;
  argument = words;
  maps = boxes;
  gridDim.x = blocks;
  blockDim.x = threads;
  cluster = together;
  for (unsigned b = 0; b < blocks; b += together) {
    blockIdx.x = b;
    if (waits) { run_blocks(b, threads); continue; }
    for (unsigned t = 0; t < threads; ++t) { self = threadIdx.x = t; kernel(words, 0, 0); }
  }
}
