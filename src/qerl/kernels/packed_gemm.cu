// y[s, m, n] = sum over the k of split s of x[m, k] * w[n, k], w in NVFP4, for few tokens (M <= 64).
//
// At these sizes a product is as fast as its weight is read, so the kernel is a stream: every warp reads codes
// straight from global memory into registers, 16 bytes a lane, and keeps DEPTH such loads in flight ahead of the
// ones it multiplies. Nothing of the weight passes through shared memory, because no byte of it is used twice.
// The activations (a few KB) are in shared memory, in the order in which mma.sync wants them.
//
// Weight layout, the one quack-kernels uses ("blob"), so that both libraries run on one resident copy:
//   codes  [N/64, K/64, 128 threads, 16 bytes]: thread t = 32 w + l of a 64 x 64 tile holds, for each of four
//          k16 blocks, one 32-bit word = the A fragment of mma.m16n8k16 for rows 16 w + l/4 (+8):
//          byte 0: (row, k 2c, 2c+1)  byte 1: (row+8, same k)  byte 2: (row, k+8)  byte 3: (row+8, k+8), c = l%4
//   scales [N/64, K/64, 32 rows r with r%16 < 8, 4 k16 blocks, (row, row+8)] E4M3
//
// Decoding. A code s e e m becomes the bf16 bits s 0000000 ee m 000000, which is w * 2^-126, exactly, subnormal
// included; a scale byte shifted left by 4 is sf * 2^-120. The scale is raised by 2^238 in two multiplications,
// so that the product of both is w * sf * 2^-8: exact in bf16 (at most 6 significant bits). The caller multiplies
// by 2^8 / global scale. A register takes the codes of one bit position in both halves of the word, that is
// k = 2c and 2c+8 (or 2c+1 and 2c+9) instead of neighbours; the activations are stored in the same order, and a
// sum does not care.
//
// Splits: the grid's y dimension cuts K; each split writes its own fp32 partial sums, and whoever reads the
// output adds them in order. That costs no extra launch here, because every reader is a kernel of ours, and it
// keeps results independent of timing.
//
// Compile-time: TILES token tiles of 8, ROWS 16-row blocks a warp, WARPS_N x WARPS_K warps a block, DEPTH.

typedef unsigned int u32;

#define THREADS (32 * WARPS_N * WARPS_K)

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 mul2_low(u32 a, u32 b) {
  u32 d;
  asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; mul.bf16x2 %0, %1, t;}"
      : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 mul2_high(u32 a, u32 b) {
  u32 d;
  asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; mul.bf16x2 %0, %1, t;}"
      : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint4 stream16(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 stream8(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ void mma(float* d, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One word of codes and its pair of scale bytes -> the four registers of an A fragment.
__device__ __forceinline__ void decode(u32 codes, u32 scale_word, int odd, u32* a) {
  const u32 sign = 0x80008000u, magnitude = 0x01C001C0u;
  u32 bytes = __byte_perm(scale_word, 0, odd ? 0x4342 : 0x4140) << 4;
  u32 scale = mul2(mul2(bytes, 0x7F007F00u), 0x77007700u);  // 2^127, then 2^111
  u32 low = codes << 8;
  u32 r_hi = ((low) & sign) | ((low >> 6) & magnitude);           // bits 4-7: row, odd k
  u32 r_lo = ((low << 4) & sign) | ((low >> 2) & magnitude);      // bits 0-3: row, even k
  u32 s_hi = ((codes) & sign) | ((codes >> 6) & magnitude);       // bits 12-15: row+8, odd k
  u32 s_lo = ((codes << 4) & sign) | ((codes >> 2) & magnitude);  // bits 8-11: row+8, even k
  a[0] = mul2_low(r_lo, scale);
  a[1] = mul2_high(s_lo, scale);
  a[2] = mul2_low(r_hi, scale);
  a[3] = mul2_high(s_hi, scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
packed_gemm(const uint4* __restrict__ x, const uint4* __restrict__ codes, const uint2* __restrict__ scales,
            float* __restrict__ y, int M, int N, int K) {
  extern __shared__ uint4 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
  const int k_tiles = K / 64;
  const int first = (int)((long long)blockIdx.y * k_tiles / gridDim.y);
  const int count = (int)((long long)(blockIdx.y + 1) * k_tiles / gridDim.y) - first;
  const int row_block = (blockIdx.x * WARPS_N + warp_n) * ROWS;  // in 16 rows
  const int row_blocks = N / 16;

  const uint4* code_at[ROWS];
  const uint2* scale_at[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int b = min(row_block + r, row_blocks - 1);
    long long tile = (long long)(b / 4) * k_tiles + first;
    code_at[r] = codes + tile * 128 + (b % 4) * 32 + lane;
    scale_at[r] = scales + tile * 32 + (b % 4) * 8 + lane / 4;
  }

  uint4 code[DEPTH][ROWS];
  uint2 scale[DEPTH][ROWS];
  auto fetch = [&](int d, int kt) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (kt < count) {
        code[d][r] = stream16(code_at[r] + (long long)kt * 128);
        scale[d][r] = stream8(scale_at[r] + (long long)kt * 32);
      }
    }
  };
#pragma unroll
  for (int d = 0; d < DEPTH; d++) fetch(d, warp_k + d * WARPS_K);

  // The weight does not depend on the kernel before this one: its reads are under way before this wait.
  asm volatile("griddepcontrol.wait;" ::: "memory");

  // Activations: for token m and k16 block b, lane group c finds (x[2c], x[2c+8]) and (x[2c+1], x[2c+9]) side by
  // side. 64 bytes of padding put neighbouring tokens into different banks.
  const int stride = count * 8 + 4;  // in 16 bytes
  for (int i = threadIdx.x; i < TILES * 8 * count * 4; i += THREADS) {
    int m = i / (count * 4), block = i % (count * 4);
    uint4 lo = make_uint4(0, 0, 0, 0), hi = lo;
    if (m < M) {
      const uint4* from = x + ((long long)m * K + (long long)first * 64) / 8 + block * 2;
      lo = from[0];
      hi = from[1];
    }
    uint2* to = (uint2*)(shared + m * stride + (block / 4) * 8 + (block % 4) / 2 * 4) + block % 2;
    to[0] = make_uint2(__byte_perm(lo.x, hi.x, 0x5410), __byte_perm(lo.x, hi.x, 0x7632));
    to[2] = make_uint2(__byte_perm(lo.y, hi.y, 0x5410), __byte_perm(lo.y, hi.y, 0x7632));
    to[4] = make_uint2(__byte_perm(lo.z, hi.z, 0x5410), __byte_perm(lo.z, hi.z, 0x7632));
    to[6] = make_uint2(__byte_perm(lo.w, hi.w, 0x5410), __byte_perm(lo.w, hi.w, 0x7632));
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");

  float acc[ROWS][TILES][4] = {};
  const uint4* activations = shared + (lane / 4) * stride + lane % 4;
  for (int base = warp_k; base < count; base += DEPTH * WARPS_K) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      int kt = base + d * WARPS_K;
      if (kt < count) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 a[2][ROWS][4];
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            u32 sf = half ? scale[d][r].y : scale[d][r].x;
            decode(half ? code[d][r].z : code[d][r].x, sf, 0, a[0][r]);
            decode(half ? code[d][r].w : code[d][r].y, sf, 1, a[1][r]);
          }
#pragma unroll
          for (int t = 0; t < TILES; t++) {
            uint4 b = activations[t * 8 * stride + kt * 8 + half * 4];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
              mma(acc[r][t], a[0][r], b.x, b.y);
              mma(acc[r][t], a[1][r], b.z, b.w);
            }
          }
        }
        fetch(d, kt + DEPTH * WARPS_K);
      }
    }
  }

  // Warps that shared rows and cut K between them are added in order.
#if WARPS_K > 1
  float* partial = (float*)shared;
  const int values = ROWS * TILES * 4;
  __syncthreads();
  if (warp_k > 0) {
#pragma unroll
    for (int i = 0; i < values; i++)
      partial[(((warp_k - 1) * WARPS_N + warp_n) * values + i) * 32 + lane] = ((float*)acc)[i];
  }
  __syncthreads();
  if (warp_k > 0) return;
#pragma unroll
  for (int k = 0; k < WARPS_K - 1; k++)
#pragma unroll
    for (int i = 0; i < values; i++) ((float*)acc)[i] += partial[((k * WARPS_N + warp_n) * values + i) * 32 + lane];
#endif

#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (row_block + r >= row_blocks) break;
    int n = (row_block + r) * 16 + lane / 4;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      int m = t * 8 + lane % 4 * 2;
      float* to = y + ((long long)blockIdx.y * M + m) * N + n;
      if (m < M) { to[0] = acc[r][t][0]; to[8] = acc[r][t][2]; }
      if (m + 1 < M) { to[N] = acc[r][t][1]; to[N + 8] = acc[r][t][3]; }
    }
  }
}
