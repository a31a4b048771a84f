// Multiplying with wgmma: the four warps of a team in step, the second operand straight from shared memory. Included by
// packed_gemm.cu.

#pragma once

#include "fragment.cuh"

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
#define R8_8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define R8_9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define R8_10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define R8_11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define R8_12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define R8_13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define R8_14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define R8_15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define R32_2 R8_8 "," R8_9 "," R8_10 "," R8_11
#define R32_3 R8_12 "," R8_13 "," R8_14 "," R8_15
#define D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define D16(i) D4(i), D4((i) + 4), D4((i) + 8), D4((i) + 12)
#define D64(i) D16(i), D16((i) + 16), D16((i) + 32), D16((i) + 48)
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
  WGMMA_ASYNC("m64n128k16", R32_0 "," R32_1, "%64,%65,%66,%67", "%68", "%69", D64(0));
#elif TOKENS == 256
  WGMMA_ASYNC("m64n256k16", R32_0 "," R32_1 "," R32_2 "," R32_3, "%128,%129,%130,%131", "%132", "%133", D64(0), D64(64));
#endif
}
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void finish() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// The low word of the operand's description. Its 18 bits of address are a block's own: those above say which block of a
// cluster, and would be read as part of the distance.
__device__ __forceinline__ u32 operand_address(u32 x, int) { return ((x & 0x3FFFF) >> 4) | ((128 >> 4) << 16); }

// acc += a tile of weight * its activations, asynchronously. Two k16 blocks are decoded while the two before them are
// multiplied.
__device__ __forceinline__ void multiply_tile(float* acc, const Operands& at, int stage, int t) {
  uint4 code = *(const uint4*)(at.codes + stage * STAGE_BYTES + t * CODE_BYTES);
  uint2 scale = *(const uint2*)(at.scales + stage * STAGE_BYTES + t * SCALE_BYTES);
  u32 b = at.x + stage * (STAGE_BYTES >> 4) + t * (X_BYTES >> 4);
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
}

__device__ __forceinline__ void await_products() { finish(); }

#if TOKENS > 128
// The bf16 numbers of two registers, the first in the low half.
__device__ __forceinline__ u32 as_halves(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Of an 8 x 8 matrix, of which a lane has two numbers side by side in row lane / 4, the transposed one.
__device__ __forceinline__ u32 transposed(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// Writes a warp's 16 rows of weight for all tokens of the slice below `tokens`, as bf16 [token, N]. A lane has pairs of
// tokens of the rows lane / 4 and lane / 4 + 8; transposed, pairs of rows of token lane / 4. Neighbouring lanes then change
// one for another, so that each has four rows side by side and a token's 32 bytes are written at once.
__device__ __forceinline__ void store_tile(const float* acc, unsigned short* y, int tokens, int N, int lane) {
  const bool odd = lane & 1;
  unsigned short* to = y + (lane % 4) * 2 + (odd ? 6 : 0);
#pragma unroll
  for (int i = 0; i < TOKENS / 8; i++) {
    const u32 top = transposed(as_halves(acc[i * 4], acc[i * 4 + 1]));
    const u32 bottom = transposed(as_halves(acc[i * 4 + 2], acc[i * 4 + 3]));
    const u32 got = __shfl_xor_sync(0xFFFFFFFFu, odd ? top : bottom, 1);
    const int m = i * 8 + lane / 4;
    if (m < tokens) *(uint2*)(to + (long long)m * N) = odd ? make_uint2(got, bottom) : make_uint2(top, got);
  }
}
#endif
