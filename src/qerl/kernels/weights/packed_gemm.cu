// y[s, m, n] = part s of the sum over k of x[m, k] * w[n, k], w in NVFP4, for few tokens (M <= 128).
//
// At these sizes a product is as fast as its weight is read, so the kernel is a stream. One block sits on each
// multiprocessor for the whole product. One of its warps does nothing but ask for the next pieces of weight and
// activations, up to STAGES of them ahead, into shared memory; the others decode and multiply. The weight does not
// depend on the kernel before this one, so the first STAGES pieces of it are asked for before that kernel has ended:
// its time is not lost for the memory.
//
// One source for every card since Ampere; qerl.kernels.cards says which switches a card has. BULK: one lane of the
// producing warp asks the copy engine, which counts bytes on a barrier; without it each lane copies 16 bytes at a time
// (cp.async), and the barrier counts lanes. WGMMA: see below. Below compute capability 9.0 a kernel starts when the
// one ahead of it has ended, and a product of two bf16 numbers is a fused multiply-add whose third operand is -0.
//
// Weight layout (qerl.kernels.weights.tiles), the one quack-kernels uses, so that both libraries run on one resident copy:
//   codes  [N/64, K/64, 128 threads, 16 bytes]: thread t = 32 w + l of a 64 x 64 tile holds, for each of four
//          k16 blocks, one 32-bit word = the A fragment of wgmma.m64nNk16 for rows 16 w + l/4 (+8):
//          byte 0: (row, k 2c, 2c+1)  byte 1: (row+8, same k)  byte 2: (row, k+8)  byte 3: (row+8, k+8), c = l%4
//   scales [N/64, K/64, 32 rows r with r%16 < 8, 4 k16 blocks, (row, row+8)] E4M3
//
// Activations [K/64, TOKENS/8, 8 chunks, 8 tokens, 8 k]: the core matrices of wgmma's second operand without
// swizzle. They are written in this order by the kernel that makes them (qerl.kernels.decode.common.store_operand).
//
// Multiplying. Up to 16 tokens each warp multiplies its own 16 rows (mma.sync): it waits for nobody, and the
// compiler decodes the next block while the last is multiplied. wgmma needs four warps in step and a wait; at 8 tokens
// that took 135 instructions a tile and warp instead of 95. From 32 tokens on its second operand straight from
// shared memory is worth that: mma.sync would read it once for every 16 rows. Cards without wgmma stay with mma.sync and
// give a warp two fragments of 16 rows (FRAGMENTS), so that it is read half as often. Where their accumulators were too
// many for the registers, two warps have the same fragments and half of the tokens each (SPLIT); both decode them.
//
// Decoding. A code s e e m becomes the bf16 bits s 0000000 ee m 000000, which is w * 2^-126, exactly, subnormal
// included; a scale byte shifted left by 4 is sf * 2^-120. The scale is raised by 2^238 in two multiplications,
// so that the product of both is w * sf * 2^-8: exact in bf16 (at most 6 significant bits). The caller multiplies
// by 2^8 / global scale. A register takes the codes of one bit position in both halves of the word, that is
// k = 2c and 2c+8 (or 2c+1 and 2c+9) instead of neighbours; the activations are stored in the same order, and a
// sum does not care. A multiplication by 2^12 + 2^6 moves sign and magnitude to their places at once, on the
// pipe that the logic instructions leave idle.
//
// Work. The product is a line of (rows / ROWS) x (K / 64) tiles, rows outermost, cut into one piece of equal
// length for each block. A block that starts or ends inside a row tile leaves a partial sum of it: contributor s
// of a row tile writes part s, and whoever reads the output adds the parts in order. That costs no launch here,
// because every reader is a kernel of ours, and it keeps results independent of timing.
//
// Compile-time: TOKENS (8, 16, 32, 64 or 128), TEAMS of warps that multiply, each with 64 rows: a warpgroup, or with two
// FRAGMENTS a warp half of one, times SPLIT; ROW_GROUPS 64-row groups of a row tile (TEAMS / ROW_GROUPS teams share K), TILES 64-wide
// k tiles a stage, TOGETHER tiles a team multiplies before it waits, STAGES, BULK and WGMMA.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

#if FRAGMENTS * SPLIT > 1 && (TOKENS <= 16 || WGMMA)
#error "Fragments and a split are for more than 16 tokens without wgmma."
#endif
#define TEAM (128 / FRAGMENTS * SPLIT)  // threads
#define K_GROUPS (TEAMS / ROW_GROUPS)
#define CONSUMERS (TEAMS * TEAM)
#define THREADS (CONSUMERS + 32)
#define CODE_BYTES 2048
#define SCALE_BYTES 256
#define X_BYTES (TOKENS * 128)
#define WEIGHT_BYTES (ROW_GROUPS * (CODE_BYTES + SCALE_BYTES))  // of a k tile
#define STAGE_BYTES (TILES * (WEIGHT_BYTES + X_BYTES))
#define WARP_TOKENS (TOKENS / SPLIT)
#define VALUES (FRAGMENTS * WARP_TOKENS / 2)  // accumulators a thread
#define WARPGROUP_MATH (WGMMA && TOKENS > 16)
// Sums of LoRA come after the product where they would cost it registers that it does not have.
#define ADD_LAST (TOKENS == 128 && !WGMMA)
#define STARTS_EARLY (__CUDA_ARCH__ >= 900)

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
#if BULK
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
#endif
}
#if BULK
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
#else
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
// By the whole warp; bytes is a multiple of 16. Without an eviction policy: where the address in shared memory has a
// part in a uniform register, ptxas (12.8, 12.9 and the driver of CUDA 13.0) encodes cp.async with one as an illegal
// instruction for 9.0 and later.
__device__ __forceinline__ void copy(u32 to, const u8* from, u32 bytes, u32, u64) {
  for (u32 at = threadIdx.x % 32 * 16; at < bytes; at += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at) : "memory");
}
// This lane arrives when all that it has asked for is there.
__device__ __forceinline__ void barrier_arrive_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif
__device__ __forceinline__ void wait_for_kernel_before() {
#if STARTS_EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A product of bf16 pairs, exact in either form.
#if __CUDA_ARCH__ >= 900
#define PRODUCT(factor) "mul.bf16x2 %0, %1, " factor ";"
#else
#define PRODUCT(factor) \
  "{.reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 %0, %1, " factor ", zero;}"
#endif
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm(PRODUCT("%2") : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 mul2_low(u32 a, u32 b) {
  u32 d;
  asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; " PRODUCT("t") "}"
      : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 mul2_high(u32 a, u32 b) {
  u32 d;
  asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; " PRODUCT("t") "}"
      : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// One word of codes and its pair of scale bytes -> the four registers of an A fragment.
__device__ __forceinline__ void decode(u32 codes, u32 scale_word, int odd, u32* a) {
  const u32 sign = 0x80008000u, magnitude = 0x01C001C0u, both = sign | magnitude;
  u32 bytes = __byte_perm(scale_word, 0, odd ? 0x4342 : 0x4140) << 4;
  u32 scale = mul2(mul2(bytes, 0x7F007F00u), 0x77007700u);       // 2^127, then 2^111
  u32 r_lo = ((codes & 0x000F000Fu) * 4160u) & both;             // bits 0-3: row, even k
  u32 r_hi = ((codes & 0x00F000F0u) * 260u) & both;              // bits 4-7: row, odd k
  u32 s_lo = (((codes >> 8) & 0x000F000Fu) * 4160u) & both;      // bits 8-11: row+8, even k
  u32 s_hi = (codes & sign) | ((codes >> 6) & magnitude);        // bits 12-15: row+8, odd k
  a[0] = mul2_low(r_lo, scale);
  a[1] = mul2_high(s_lo, scale);
  a[2] = mul2_low(r_hi, scale);
  a[3] = mul2_high(s_hi, scale);
}

#if WARPGROUP_MATH
#define R8_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define R8_1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define R8_2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define R8_3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define R8_4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define R8_5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define R8_6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define R8_7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define R32_0 R8_0 "," R8_1 "," R8_2 "," R8_3
#define R32_1 R8_4 "," R8_5 "," R8_6 "," R8_7
#define D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define D16(i) D4(i), D4((i) + 4), D4((i) + 8), D4((i) + 12)
// The operand's description: address and 128 bytes to the next 8 k (low word), 1024 to the next 8 tokens (high).
#define WGMMA_ASYNC(shape, registers, a_fragment, b_low, b_high, ...)                                              \
  asm volatile("{.reg .pred p; .reg .b64 b; setp.eq.u32 p, 0, 0; mov.b64 b, {" b_low ", " b_high "};\n"      \
               "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" registers "}, {" a_fragment           \
               "}, b, p, 1, 1, 0;}"                                                                          \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x), "r"(1024 >> 4))

// d += A * B for a k16 block, asynchronously.
__device__ __forceinline__ void multiply(float* d, const u32* a, u32 x) {
#if TOKENS == 32
  WGMMA_ASYNC("m64n32k16", R8_0 "," R8_1, "%16,%17,%18,%19", "%20", "%21", D16(0));
#elif TOKENS == 64
  WGMMA_ASYNC("m64n64k16", R32_0, "%32,%33,%34,%35", "%36", "%37", D16(0), D16(16));
#elif TOKENS == 128
  WGMMA_ASYNC("m64n128k16", R32_0 "," R32_1, "%64,%65,%66,%67", "%68", "%69", D16(0), D16(16), D16(32), D16(48));
#endif
}
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void finish() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
#else

// d += A * B for a k16 block of one warp's 16 rows and 8 tokens.
__device__ __forceinline__ void multiply_warp(float* d, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The second operand of two k16 blocks and 8 tokens, or of one and 16.
__device__ __forceinline__ void load_matrices(u32* b, u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from) : "memory");
}
#endif

// A block's tiles, as stretches of one row tile that fit a stage.
struct Piece {
  int at, end, k_tiles, row_tile, first, count;  // count k tiles from the first on
  __device__ __forceinline__ Piece(int begin, int end, int k_tiles)
      : at(begin), end(end), k_tiles(k_tiles), row_tile(begin / k_tiles), first(begin - row_tile * k_tiles) {
    measure();
  }
  __device__ __forceinline__ void measure() { count = min(min(TILES, k_tiles - first), end - at); }
  __device__ __forceinline__ bool ends_row_tile() const { return first + count == k_tiles || at + count == end; }
  __device__ __forceinline__ void advance() {
    at += count;
    first += count;
    if (first == k_tiles) first = 0, row_tile++;
    measure();
  }
};

__device__ __forceinline__ void load_weight(const Piece& p, u32 stage, u32 full, const u8* codes, const u8* scales,
                                            int groups, u64 policy) {
#pragma unroll
  for (int g = 0; g < ROW_GROUPS; g++) {
    // The last row tile may reach beyond the weight; nobody writes those rows.
    int group = min(p.row_tile * ROW_GROUPS + g, groups - 1);
    long long tile = (long long)group * p.k_tiles + p.first;
    copy(stage + g * TILES * CODE_BYTES, codes + tile * CODE_BYTES, p.count * CODE_BYTES, full, policy);
    copy(stage + TILES * (ROW_GROUPS * CODE_BYTES + g * SCALE_BYTES), scales + tile * SCALE_BYTES,
         p.count * SCALE_BYTES, full, policy);
  }
}

__device__ __forceinline__ void load_x(const Piece& p, u32 stage, u32 full, const u8* x, u64 policy) {
  copy(stage + TILES * WEIGHT_BYTES, x + (long long)p.first * X_BYTES, p.count * X_BYTES, full, policy);
}

// x A^T of the adapters that belong to this product, `numbers` (a multiple of 8) for all tokens: the kernel before
// has left `count` parts of each. A warp adds eight numbers: 16 pairs of lanes have every 16th part each, then the
// pairs' sums are added, always in the same order. The loads pass by the L1 cache, where the parts of an earlier
// layer may be.
__device__ __forceinline__ void add_parts(const float* parts, float* sum, int count, int numbers, int warp, int lane) {
  for (int first = (blockIdx.x + gridDim.x * warp) * 8; first < numbers; first += gridDim.x * (CONSUMERS / 32) * 8) {
    const int at = first + lane % 2 * 4;
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int p = lane / 2; p < count; p += 16) {
      float4 part = __ldcg((const float4*)(parts + (long long)p * numbers + at));
      total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
    }
#pragma unroll
    for (int step = 2; step < 32; step *= 2)
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += __shfl_xor_sync(0xFFFFFFFFu, total[i], step);
    if (lane < 2) *(float4*)(sum + at) = make_float4(total[0], total[1], total[2], total[3]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
packed_gemm(const u8* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
            float* __restrict__ y, const float* xa_parts, float* xa, int M, int N, int K, int parts, int numbers) {
  extern __shared__ __align__(128) u8 stages[];
  __shared__ u64 barriers[2 * STAGES];
  // Broadcast, so that the compiler knows it to be the same for the whole warp.
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int k_tiles = K / 64, groups = N / 64;
  const int total = (groups + ROW_GROUPS - 1) / ROW_GROUPS * k_tiles;
  const int begin = (int)((long long)blockIdx.x * total / gridDim.x);
  const int end = (int)((long long)(blockIdx.x + 1) * total / gridDim.x);
  const u32 base = shared_address(stages), full = shared_address(barriers), empty = full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s * 8, BULK ? 1 : 32);
      barrier_init(empty + s * 8, CONSUMERS / 32);
    }
#if BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
  __syncthreads();

  if (warp == CONSUMERS / 32) {
    if (lane == 0 || !BULK) {
      u64 once = 0, often = 0;
#if BULK
      asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
      asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
      int pieces = 0;
      Piece p(begin, end, k_tiles);
      for (; p.at < end && pieces < STAGES; pieces++, p.advance()) {
        barrier_expect(full + pieces * 8, p.count * (STAGE_BYTES / TILES));
        load_weight(p, base + pieces * STAGE_BYTES, full + pieces * 8, codes, scales, groups, once);
      }
      wait_for_kernel_before();
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      Piece again(begin, end, k_tiles);
      for (int s = 0; s < pieces; s++, again.advance())
        load_x(again, base + s * STAGE_BYTES, full + s * 8, x, often);
      for (int s = 0, round = 0; p.at < end; p.advance()) {
        barrier_wait(empty + s * 8, round);
        barrier_expect(full + s * 8, p.count * (STAGE_BYTES / TILES));
        load_weight(p, base + s * STAGE_BYTES, full + s * 8, codes, scales, groups, once);
        load_x(p, base + s * STAGE_BYTES, full + s * 8, x, often);
        if (++s == STAGES) s = 0, round ^= 1;
      }
#else
      // A barrier on which nobody has arrived lets one pass that waits for parity 1: the first STAGES pieces.
      Piece p(begin, end, k_tiles);
      for (int s = 0, round = 1; p.at < end; p.advance()) {
        barrier_wait(empty + s * 8, round);
        load_weight(p, base + s * STAGE_BYTES, full + s * 8, codes, scales, groups, once);
        load_x(p, base + s * STAGE_BYTES, full + s * 8, x, often);
        barrier_arrive_copied(full + s * 8);
        if (++s == STAGES) s = 0, round ^= 1;
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    }
    return;
  }

  wait_for_kernel_before();
#if !ADD_LAST
  add_parts(xa_parts, xa, parts, numbers, warp, lane);
#endif
  const int row_group = warp / (TEAM / 32) % ROW_GROUPS, k_group = warp / (TEAM / 32) / ROW_GROUPS;
  // Which fragments of the row group this warp has, and which share of the tokens.
  const int first_fragment = warp % (TEAM / 32) / SPLIT * FRAGMENTS, first_token = warp % SPLIT * WARP_TOKENS;
  const u8* code_at = stages + row_group * TILES * CODE_BYTES + (first_fragment * 32 + lane) * 16;
  const u8* scale_at = stages + TILES * (ROW_GROUPS * CODE_BYTES + row_group * SCALE_BYTES) +
                       (first_fragment * 8 + lane / 4) * 8;

  float acc[VALUES];
#pragma unroll
  for (int i = 0; i < VALUES; i++) acc[i] = 0.0f;
  int stage = 0, parity = 0, unit = 0;
#if !WARPGROUP_MATH
  const u32 matrices_at = base + TILES * WEIGHT_BYTES + first_token * 128 +
                         (TOKENS <= 16 ? lane * 16 : lane / 16 * 1024 + lane % 16 * 16);
#endif
#if TOKENS <= 16
  auto tile = [&](int t) {
    uint4 code = *(const uint4*)(code_at + stage * STAGE_BYTES + t * CODE_BYTES);
    uint2 scale = *(const uint2*)(scale_at + stage * STAGE_BYTES + t * SCALE_BYTES);
    u32 b[TOKENS / 8][8], a[4];
#pragma unroll
    for (int g = 0; g < TOKENS / 8; g++) {
      u32 from = matrices_at + stage * STAGE_BYTES + t * X_BYTES + g * 1024;
      load_matrices(b[g], from);
      load_matrices(b[g] + 4, from + 512);
    }
    const u32 words[4] = {code.x, code.y, code.z, code.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      decode(words[k], k < 2 ? scale.x : scale.y, k & 1, a);
#pragma unroll
      for (int g = 0; g < TOKENS / 8; g++) multiply_warp(acc + g * 4, a, b[g][2 * k], b[g][2 * k + 1]);
    }
  };
  auto await_products = [] {};
#elif !WARPGROUP_MATH
  // One k16 block at a time: each of its products has an accumulator of its own, so that none waits for another.
  auto tile = [&](int t) {
    uint4 code[FRAGMENTS];
    uint2 scale[FRAGMENTS];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      code[f] = *(const uint4*)(code_at + stage * STAGE_BYTES + t * CODE_BYTES + f * 512);
      scale[f] = *(const uint2*)(scale_at + stage * STAGE_BYTES + t * SCALE_BYTES + f * 64);
    }
    const u32 from = matrices_at + stage * STAGE_BYTES + t * X_BYTES;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 a[FRAGMENTS][4];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        const u32 words[4] = {code[f].x, code[f].y, code[f].z, code[f].w};
        decode(words[k], k < 2 ? scale[f].x : scale[f].y, k & 1, a[f]);
      }
#pragma unroll
      for (int g = 0; g < WARP_TOKENS / 8; g += 2) {
        u32 b[4];
        load_matrices(b, from + g * 1024 + k * 256);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int f = 0; f < FRAGMENTS; f++)
            multiply_warp(acc + (f * (WARP_TOKENS / 8) + g + i) * 4, a[f], b[2 * i], b[2 * i + 1]);
      }
    }
  };
  auto await_products = [] {};
#else
  const u32 x_at = ((base + TILES * WEIGHT_BYTES) >> 4) | ((128 >> 4) << 16);
  // Two k16 blocks are decoded while the two before them are multiplied.
  auto tile = [&](int t) {
    uint4 code = *(const uint4*)(code_at + stage * STAGE_BYTES + t * CODE_BYTES);
    uint2 scale = *(const uint2*)(scale_at + stage * STAGE_BYTES + t * SCALE_BYTES);
    u32 b = x_at + stage * (STAGE_BYTES >> 4) + t * (X_BYTES >> 4);
    u32 early[2][4], late[2][4];
    decode(code.x, scale.x, 0, early[0]);
    decode(code.y, scale.x, 1, early[1]);
    fence();
    multiply(acc, early[0], b);
    multiply(acc, early[1], b + (256 >> 4));
    commit();
    decode(code.z, scale.y, 0, late[0]);
    decode(code.w, scale.y, 1, late[1]);
    fence();
    multiply(acc, late[0], b + (512 >> 4));
    multiply(acc, late[1], b + (768 >> 4));
    commit();
  };
  auto await_products = [] { finish(); };
#endif
  for (Piece p(begin, end, k_tiles); p.at < end; p.advance()) {
    barrier_wait(full + stage * 8, parity);
    int t = k_group;
    for (; t + (TOGETHER - 1) * K_GROUPS < p.count; t += TOGETHER * K_GROUPS) {
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) tile(t + i * K_GROUPS);
      await_products();
    }
    for (; t < p.count; t += K_GROUPS) {
      tile(t);
      await_products();
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage * 8);
    if (++stage == STAGES) stage = 0, parity ^= 1;
    if (!p.ends_row_tile()) continue;

    // The row tile, or this block's part of it, is complete. Warpgroups that shared K are added in order, in one
    // of two buffers in turn, so that one barrier is enough.
#if K_GROUPS > 1
    float* sums = (float*)(stages + STAGES * STAGE_BYTES) + unit % 2 * ((K_GROUPS - 1) * ROW_GROUPS * VALUES * TEAM);
    float* mine = sums + row_group * VALUES * TEAM + threadIdx.x % TEAM;
    if (k_group > 0) {
#pragma unroll
      for (int i = 0; i < VALUES; i++) mine[((k_group - 1) * ROW_GROUPS * VALUES + i) * TEAM] = acc[i];
    }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    if (k_group == 0) {
#pragma unroll
      for (int k = 0; k < K_GROUPS - 1; k++)
#pragma unroll
        for (int i = 0; i < VALUES; i++) acc[i] += mine[(k * ROW_GROUPS * VALUES + i) * TEAM];
    }
#endif
    unit++;
    int group = p.row_tile * ROW_GROUPS + row_group;
    if (k_group == 0 && group < groups) {
      // The block that holds the row tile's first k tile writes part 0.
      long long first = (long long)p.row_tile * k_tiles;
      int part = blockIdx.x - (int)(((first + 1) * gridDim.x - 1) / total);
      float* to = y + (long long)part * M * N + group * 64 + first_fragment * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < VALUES / 4; i++) {
        int m = first_token + i % (WARP_TOKENS / 8) * 8 + lane % 4 * 2;
        float* row = to + (long long)m * N + i / (WARP_TOKENS / 8) * 16;
        if (m < M) { row[0] = acc[i * 4]; row[8] = acc[i * 4 + 2]; }
        if (m + 1 < M) { row[N] = acc[i * 4 + 1]; row[N + 8] = acc[i * 4 + 3]; }
      }
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++) acc[i] = 0.0f;
  }
#if ADD_LAST
  add_parts(xa_parts, xa, parts, numbers, warp, lane);
#endif
}
