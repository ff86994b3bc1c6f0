// What the printed kernels are written in. Nothing is included: NVRTC has no headers.
// RLX_HOST is defined where a C++ compiler for the processor runs the same text (tests/backends/cuda).
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef signed char i8;

#define RLX_KERNEL extern "C" __global__ void
#define RLX_DEVICE __device__ __forceinline__

template <int N> struct Words { i64 v[N]; };

// A kernel may start before the one before it in the stream is done: it lets the next one start, near its end, since
// blocks that wait take the place of those that work; and it waits before it reads or writes what other kernels do.
#if !defined(RLX_HOST) && __CUDA_ARCH__ >= 900
#define RLX_NEXT asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define RLX_WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define RLX_NEXT
#define RLX_WAIT
#endif

// ---- bits

template <class T, class S> RLX_DEVICE T bits(S s) {
  T t;
  memcpy(&t, &s, sizeof(T));
  return t;
}
#define RLX_INF32 bits<float>(0x7f800000u)
#define RLX_NAN32 bits<float>(0x7fc00000u)
#define RLX_INF64 bits<double>(0x7ff0000000000000ull)
#define RLX_NAN64 bits<double>(0x7ff8000000000000ull)

template <class T> struct Wrap { typedef T type; };  // in which arithmetic wraps
template <> struct Wrap<i8> { typedef u32 type; };
template <> struct Wrap<u8> { typedef u32 type; };
template <> struct Wrap<short> { typedef u32 type; };
template <> struct Wrap<u16> { typedef u32 type; };
template <> struct Wrap<int> { typedef u32 type; };
template <> struct Wrap<i64> { typedef u64 type; };
#define RLX_W typename Wrap<T>::type

// ---- arithmetic of equal types

template <class T> RLX_DEVICE T k_add(T a, T b) { return (T)((RLX_W)a + (RLX_W)b); }
template <class T> RLX_DEVICE T k_sub(T a, T b) { return (T)((RLX_W)a - (RLX_W)b); }
template <class T> RLX_DEVICE T k_mul(T a, T b) { return (T)((RLX_W)a * (RLX_W)b); }
template <class T> RLX_DEVICE T k_neg(T a) { return (T)((RLX_W)0 - (RLX_W)a); }
RLX_DEVICE float k_neg(float a) { return -a; }
RLX_DEVICE double k_neg(double a) { return -a; }
template <class T> RLX_DEVICE T k_abs(T a) { return a < 0 ? k_neg(a) : a; }
RLX_DEVICE float k_abs(float a) { return fabsf(a); }
RLX_DEVICE double k_abs(double a) { return fabs(a); }
template <class T> RLX_DEVICE T k_sign(T a) { return a > 0 ? (T)1 : a < 0 ? (T)-1 : a == 0 ? (T)0 : a; }
template <class T> RLX_DEVICE T k_max(T a, T b) { return a != a || a > b ? a : b; }
template <class T> RLX_DEVICE T k_min(T a, T b) { return a != a || a < b ? a : b; }
template <class T> RLX_DEVICE T k_and(T a, T b) { return (T)(a & b); }
template <class T> RLX_DEVICE T k_or(T a, T b) { return (T)(a | b); }
template <class T> RLX_DEVICE T k_xor(T a, T b) { return (T)(a ^ b); }
template <class T> RLX_DEVICE T k_not(T a) { return (T)~a; }
RLX_DEVICE bool k_not(bool a) { return !a; }
template <class T> RLX_DEVICE T k_shl(T a, T b) { return (T)((RLX_W)a << b); }
template <class T> RLX_DEVICE T k_shr(T a, T b) { return (T)(a >> b); }
template <class T> RLX_DEVICE T k_idiv(T a, T b) { return (T)(a / b); }
template <class T> RLX_DEVICE T k_irem(T a, T b) { return (T)(a % b); }
template <class T> RLX_DEVICE T k_floordiv(T a, T b) { return (T)(a / b - (a % b < 0)); }
template <class T> RLX_DEVICE T k_mod(T a, T b) { T r = (T)(a % b); return r < 0 ? (T)(r + b) : r; }
// most indices fit into 32 bits, where a division is far cheaper
RLX_DEVICE bool k_short(i64 a, i64 b) { return (((u64)a | (u64)b) >> 32) == 0; }
RLX_DEVICE i64 k_floordiv(i64 a, i64 b) { return k_short(a, b) ? (i64)((u32)a / (u32)b) : a / b - (a % b < 0); }
RLX_DEVICE i64 k_mod(i64 a, i64 b) {
  if (k_short(a, b)) return (i64)((u32)a % (u32)b);
  i64 r = a % b;
  return r < 0 ? r + b : r;
}

template <class T> RLX_DEVICE bool k_eq(T a, T b) { return a == b; }
template <class T> RLX_DEVICE bool k_ne(T a, T b) { return a != b; }
template <class T> RLX_DEVICE bool k_lt(T a, T b) { return a < b; }
template <class T> RLX_DEVICE bool k_le(T a, T b) { return a <= b; }
template <class T> RLX_DEVICE bool k_gt(T a, T b) { return a > b; }
template <class T> RLX_DEVICE bool k_ge(T a, T b) { return a >= b; }
template <class T> RLX_DEVICE bool k_isnan(T a) { return a != a; }
template <class T> RLX_DEVICE bool k_isinf(T a) { return a == a && a - a != a - a; }

// ---- functions of floats

template <class T> RLX_DEVICE T k_div(T a, T b) { return a / b; }
#define RLX_F1(name, f32, f64)                      \
  RLX_DEVICE float name(float x) { return f32(x); } \
  RLX_DEVICE double name(double x) { return f64(x); }
#define RLX_F2(name, f32, f64)                                  \
  RLX_DEVICE float name(float x, float y) { return f32(x, y); } \
  RLX_DEVICE double name(double x, double y) { return f64(x, y); }
RLX_F1(k_exp, expf, exp)
RLX_F1(k_log, logf, log)
RLX_F1(k_sqrt, sqrtf, sqrt)
RLX_F1(k_sin, sinf, sin)
RLX_F1(k_cos, cosf, cos)
RLX_F1(k_tanh, tanhf, tanh)
RLX_F1(k_erf, erff, erf)
RLX_F1(k_floor, floorf, floor)
RLX_F1(k_ceil, ceilf, ceil)
RLX_F1(k_round, rintf, rint)
RLX_F1(k_trunc, truncf, trunc)
RLX_F2(k_pow, powf, pow)
RLX_F2(k_fmod, fmodf, fmod)
RLX_DEVICE float k_normal_cdf(float x) { return erfcf(-x * 0.70710678118654752f) / 2; }
RLX_DEVICE double k_normal_cdf(double x) { return erfc(-x * 0.70710678118654752440) / 2; }
template <class T> RLX_DEVICE T k_sigmoid(T x) {
  T e = k_exp(-k_abs(x));
  return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}
// a * b + c; of floats rounded once
template <class T> RLX_DEVICE T k_fma(T a, T b, T c) { return k_add(k_mul(a, b), c); }
RLX_DEVICE float k_fma(float a, float b, float c) { return fmaf(a, b, c); }
RLX_DEVICE double k_fma(double a, double b, double c) { return fma(a, b, c); }

// ---- conversions, by the rule of rlx.ir.casting; f16 and bf16 are kept as their bits

template <class T, class F> RLX_DEVICE T to_whole(F x, T low, T high, F above) {
  return x >= above ? high : x <= (F)low ? low : x == x ? (T)x : (T)0;
}
// f64 as f32; of the two next to what it doesn't hold the one whose last bit is 1
RLX_DEVICE float to_odd(double x) {
  float near = (float)x;
  double back = (double)near;
  if (back == x || x != x) return near;
  return bits<float>((bits<u32>(near) - (u32)(fabs(back) > fabs(x))) | 1u);
}
template <class T> RLX_DEVICE double to_odd64(T x) { return (double)x; }
RLX_DEVICE double to_odd64(i64 x) {
  bool inexact = (x > (1ll << 53) || x < -(1ll << 53)) && (x & 2047) != 0;
  return (double)(inexact ? (x & ~4095ll) + 2048 : x);
}
RLX_DEVICE double to_odd64(u64 x) {
  bool inexact = x > (1ull << 53) && (x & 2047) != 0;
  return (double)(inexact ? (x & ~4095ull) + 2048 : x);
}
RLX_DEVICE float bf16_to_f32(u16 x) { return bits<float>((u32)x << 16); }
#ifndef RLX_HOST
RLX_DEVICE u16 f32_to_bf16(float x) { u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
RLX_DEVICE float f16_to_f32(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
RLX_DEVICE u16 f32_to_f16(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
#endif
// c[16][8] += a[16][16] * b[16][8], by a warp: lane l has rows l / 4 and l / 4 + 8, columns l % 4 * 2 and the next of c
#ifndef RLX_HOST
#define RLX_MMA(type)                                                                                          \
  RLX_DEVICE void mma_##type(float* c, const u32* a, const u32* b) {                                           \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 {%0,%1,%2,%3}, "               \
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                                      \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                          \
  }
RLX_MMA(bf16)
RLX_MMA(f16)
#endif
template <class T> RLX_DEVICE u16 to_bf16(T x) { return f32_to_bf16(to_odd(to_odd64(x))); }
RLX_DEVICE u16 to_bf16(float x) { return f32_to_bf16(x); }
template <class T> RLX_DEVICE u16 to_f16(T x) { return f32_to_f16((float)x); }
RLX_DEVICE u16 to_f16(double x) { return f32_to_f16(to_odd(x)); }

RLX_DEVICE int min_of(int a, int b) { return a < b ? a : b; }
RLX_DEVICE int max_of(int a, int b) { return a > b ? a : b; }

// ---- all threads of a block

template <class T> RLX_DEVICE T from_lane(T v, int mask) {
  if (sizeof(T) <= 4) {
    u32 w = 0;
    memcpy(&w, &v, sizeof(T) < 4 ? sizeof(T) : 4);
    w = __shfl_xor_sync(0xffffffffu, w, mask);
    memcpy(&v, &w, sizeof(T) < 4 ? sizeof(T) : 4);
    return v;
  }
  u64 w = 0;
  memcpy(&w, &v, sizeof(T) < 8 ? sizeof(T) : 8);
  w = __shfl_xor_sync(0xffffffffu, w, mask);
  memcpy(&v, &w, sizeof(T) < 8 ? sizeof(T) : 8);
  return v;
}

// the values of all threads as one, by a function that is the same in any order but for rounding
#define RLX_BLOCK(name, combine)                                                      \
  template <class T> RLX_DEVICE T name(T v) {                                          \
    __shared__ i64 raw[32];                                                            \
    T* part = (T*)raw; /* of 32 warps at most */                                       \
    for (int m = 16; m; m >>= 1) { T w = from_lane(v, m); v = combine(v, w); }         \
    if (blockDim.x > 32) {                                                             \
      if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;                         \
      __syncthreads();                                                                 \
      v = part[0];                                                                     \
      for (int w = 1; w < (int)(blockDim.x >> 5); ++w) v = combine(v, part[w]);        \
      __syncthreads();                                                                 \
    }                                                                                  \
    return v;                                                                          \
  }
RLX_BLOCK(block_add, k_add)
RLX_BLOCK(block_mul, k_mul)
RLX_BLOCK(block_max, k_max)
RLX_BLOCK(block_min, k_min)
RLX_BLOCK(block_and, k_and)
RLX_BLOCK(block_or, k_or)

// whether x at place i comes before y at place j; place -1 is none. SIGN 1: the larger one; LAST: the last of equal ones
template <int SIGN, bool LAST, class T> RLX_DEVICE bool k_beats(T x, i64 i, T y, i64 j) {
  if (i < 0 || j < 0) return i >= 0;
  bool nx = x != x, ny = y != y;
  if (nx != ny) return nx;
  if (!nx && x != y) return SIGN > 0 ? x > y : x < y;
  return LAST ? i > j : i < j;
}
template <int SIGN, bool LAST, class T> RLX_DEVICE i64 block_place(T v, i64 at) {
  __shared__ i64 raw[32], places[32];
  T* part = (T*)raw;
  for (int m = 16; m; m >>= 1) {
    T w = from_lane(v, m);
    i64 other = from_lane(at, m);
    if (k_beats<SIGN, LAST>(w, other, v, at)) { v = w; at = other; }
  }
  if (blockDim.x > 32) {
    int warp = threadIdx.x >> 5;
    if ((threadIdx.x & 31) == 0) { part[warp] = v; places[warp] = at; }
    __syncthreads();
    v = part[0];
    at = places[0];
    for (int w = 1; w < (int)(blockDim.x >> 5); ++w)
      if (k_beats<SIGN, LAST>(part[w], places[w], v, at)) { v = part[w]; at = places[w]; }
    __syncthreads();
  }
  return at;
}

// the values of the same lane of eight warps as one
#define RLX_SLICES(name, combine)                                                      \
  template <class T> RLX_DEVICE T name(T v) {                                          \
    __shared__ i64 raw[256];                                                           \
    T* part = (T*)raw;                                                                 \
    part[threadIdx.x] = v;                                                             \
    __syncthreads();                                                                   \
    v = part[threadIdx.x & 31];                                                        \
    for (int w = 32; w < 256; w += 32) v = combine(v, part[w + (threadIdx.x & 31)]);   \
    __syncthreads();                                                                   \
    return v;                                                                          \
  }
RLX_SLICES(slices_add, k_add)
RLX_SLICES(slices_mul, k_mul)
RLX_SLICES(slices_max, k_max)
RLX_SLICES(slices_min, k_min)
RLX_SLICES(slices_and, k_and)
RLX_SLICES(slices_or, k_or)
template <int SIGN, bool LAST, class T> RLX_DEVICE i64 slices_place(T v, i64 at) {
  __shared__ i64 raw[256], places[256];
  T* part = (T*)raw;
  part[threadIdx.x] = v;
  places[threadIdx.x] = at;
  __syncthreads();
  v = part[threadIdx.x & 31];
  at = places[threadIdx.x & 31];
  for (int w = 32 + (threadIdx.x & 31); w < 256; w += 32)
    if (k_beats<SIGN, LAST>(part[w], places[w], v, at)) { v = part[w]; at = places[w]; }
  __syncthreads();
  return at;
}

// the first failed check of a run: {1, site, bits of what it shows}, here and where the host reads it, which at[3] says
RLX_DEVICE void k_fail(i64 status, i64 site, i64 shown) {
  u64* at = (u64*)status;
  if (atomicCAS(at, 0ull, 1ull) == 0) {
    volatile u64* seen = (volatile u64*)at[3];
    at[1] = seen[1] = (u64)site;
    at[2] = seen[2] = (u64)shown;
    seen[0] = 1;
  }
}
