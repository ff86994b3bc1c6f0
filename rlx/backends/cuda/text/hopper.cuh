// What kernels for compute capability 9.0 are written in, after prelude.cuh: barriers in shared memory, copies by the
// tensor memory accelerator (TMA), products by warp groups (wgmma). A group is 128 threads whose first is at a multiple
// of 128. tests/backends/cuda/host.h does the same on a processor.
struct __align__(64) TMap { u64 w[16]; };  // a CUtensorMap: 128 bytes that only the driver and the device know

#ifndef RLX_HOST
#define RLX_MAP const __grid_constant__ TMap
// ---- shared memory: addresses of 32 bits

RLX_DEVICE u8* dynamic_shared() {
  extern __shared__ __align__(1024) u8 dynamic_memory[];
  return dynamic_memory;
}
RLX_DEVICE u32 shared_address(const void* p) {
  u32 a;
  asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(a) : "l"(p));
  return a;
}
// the value at the same place of the shared memory of another block of the cluster
RLX_DEVICE float4 remote_four(const float* p, u32 rank) {
  float4 v;
  asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %4, %5;\n"
    "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [r];}"
    : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared_address(p)), "r"(rank) : "memory");
  return v;
}

// ---- barriers

RLX_DEVICE void bar_init(u32 a, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(a), "r"(count) : "memory");
}
RLX_DEVICE void bars_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
RLX_DEVICE void bar_expect(u32 a, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(a), "r"(bytes) : "memory");
}
RLX_DEVICE void bar_arrive(u32 a) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(a) : "memory"); }
RLX_DEVICE void bar_wait(u32 a, u32 parity) {  // a lost arrival ends the kernel with an error after seconds
  for (u32 i = 0; i < 20000000u; ++i) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(done) : "r"(a), "r"(parity) : "memory");
    if (done) return;
  }
  asm volatile("trap;");
}
RLX_DEVICE void sync_threads(int name, int count) {
  asm volatile("bar.sync %0, %1;" :: "r"(name), "r"(count) : "memory");
}
RLX_DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory"); }
RLX_DEVICE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

// ---- copies into shared memory

#define RLX_TMA(rank, places, ...)                                                                                    \
  asm volatile("cp.async.bulk.tensor." #rank "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "           \
               "[%1, {" places "}], [%2];" :: "r"(to), "l"(map), "r"(bar), __VA_ARGS__ : "memory")
RLX_DEVICE void tma(u32 to, const TMap* map, u32 bar, int x, int y) { RLX_TMA(2, "%3, %4", "r"(x), "r"(y)); }
RLX_DEVICE void tma(u32 to, const TMap* map, u32 bar, int x, int y, int z) {
  RLX_TMA(3, "%3, %4, %5", "r"(x), "r"(y), "r"(z));
}
RLX_DEVICE void tma(u32 to, const TMap* map, u32 bar, int x, int y, int z, int u) {
  RLX_TMA(4, "%3, %4, %5, %6", "r"(x), "r"(y), "r"(z), "r"(u));
}
RLX_DEVICE void tma(u32 to, const TMap* map, u32 bar, int x, int y, int z, int u, int v) {
  RLX_TMA(5, "%3, %4, %5, %6, %7", "r"(x), "r"(y), "r"(z), "r"(u), "r"(v));
}
// channels of windows, from the one that begins at x, y of an image on, at a tap that is so far right and down
RLX_DEVICE void tma_windows(u32 to, const TMap* map, u32 bar, int c, int x, int y, int n, int right, int down) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
    "[%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
    :: "r"(to), "l"(map), "r"(bar), "r"(c), "r"(x), "r"(y), "r"(n), "h"((u16)right), "h"((u16)down) : "memory");
}
RLX_DEVICE void map_soon(const TMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// ---- products

RLX_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
RLX_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> RLX_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}
// c[64][2 N] += A[64][16] * B[16][2 N] by a group, operands as `product_operand` says. Kernels define what they
// use, and `products_done`, which waits for all products that are summed there.
template <int A, int B, int N> __device__ void wgmma_bf16(float (&c)[N], u64 a, u64 b);
template <int A, int B, int N> __device__ void wgmma_f16(float (&c)[N], u64 a, u64 b);
template <int N> __device__ void products_done(float (&c)[N]);
RLX_DEVICE int from_first(int v) { return __shfl_sync(0xffffffffu, v, 0); }
template <int COUNT> RLX_DEVICE void registers_less() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}
template <int COUNT> RLX_DEVICE void registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}
#endif

// What wgmma is told of an operand's 64 places of the depth in shared memory, at a multiple of 1024 bytes; in each 1024
// bytes the 16 bytes number i of line r lie at i ^ r (swizzle of 128 bytes).
//   by depth:  lines of 64 places of the depth, one for each row; 16 places are 32 bytes further
//   by lines:  lines of 64 rows, one for each place of the depth, 8 KB for each 64 rows; 16 places are 2048 bytes further
template <int BY_LINES> RLX_DEVICE u64 product_operand(u32 at) {
  u64 between = BY_LINES ? 512 : 1;  // in 16 bytes: between 64 rows
  return (u64)((at & 0x3ffff) >> 4) | between << 16 | 64ull << 32 | 1ull << 62;
}
template <int BY_LINES> RLX_DEVICE int product_step() { return BY_LINES ? 128 : 2; }  // 16 places, in 16 bytes

RLX_DEVICE void store_four(float* to, const float* v) { *(float4*)to = make_float4(v[0], v[1], v[2], v[3]); }
RLX_DEVICE void store_four(u16* to, const u16* v) {
  *(uint2*)to = make_uint2((u32)v[0] | (u32)v[1] << 16, (u32)v[2] | (u32)v[3] << 16);
}
RLX_DEVICE void store_four(int* to, const int* v) { *(int4*)to = make_int4(v[0], v[1], v[2], v[3]); }
RLX_DEVICE void store_four(u32* to, const u32* v) { *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]); }
RLX_DEVICE void store_four(short* to, const short* v) { store_four((u16*)to, (const u16*)v); }
