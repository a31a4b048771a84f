// Multiplying with mma.sync: every warp its own fragments of 16 rows, and it waits for nobody. Included by packed_gemm.cu.

#pragma once

#include "fragment.cuh"

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

// This lane's rows of the activations, as ldmatrix takes their addresses.
__device__ __forceinline__ u32 operand_address(u32 x, int lane) {
  return x + (TOKENS <= 16 ? lane * 16 : lane / 16 * 1024 + lane % 16 * 16);
}

#if TOKENS <= 16
// acc += a tile of weight * its activations. The k16 blocks of a tile add to the sets of accumulators in turn, so that a
// product does not wait for the one just before it.
__device__ __forceinline__ void multiply_tile(float* acc, const Operands& at, int stage, int t) {
  uint4 code = *(const uint4*)(at.codes + stage * STAGE_BYTES + t * CODE_BYTES);
  uint2 scale = *(const uint2*)(at.scales + stage * STAGE_BYTES + t * SCALE_BYTES);
  u32 b[TOKENS / 8][8], a[4];
#pragma unroll
  for (int g = 0; g < TOKENS / 8; g++) {
    u32 from = at.x + stage * STAGE_BYTES + t * X_BYTES + g * 1024;
    load_matrices(b[g], from);
    load_matrices(b[g] + 4, from + 512);
  }
  const u32 words[4] = {code.x, code.y, code.z, code.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    decode(words[k], k < 2 ? scale.x : scale.y, k & 1, a);
#pragma unroll
    for (int g = 0; g < TOKENS / 8; g++)
      multiply_warp(acc + k % SETS * VALUES + g * 4, a, b[g][2 * k], b[g][2 * k + 1]);
  }
}
#else
// acc += a tile of weight * its activations, one k16 block at a time: each of its products has an accumulator of its own,
// so that none waits for another.
__device__ __forceinline__ void multiply_tile(float* acc, const Operands& at, int stage, int t) {
  uint4 code[FRAGMENTS];
  uint2 scale[FRAGMENTS];
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    code[f] = *(const uint4*)(at.codes + stage * STAGE_BYTES + t * CODE_BYTES + f * 512);
    scale[f] = *(const uint2*)(at.scales + stage * STAGE_BYTES + t * SCALE_BYTES + f * 64);
  }
  const u32 from = at.x + stage * STAGE_BYTES + t * X_BYTES;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 a[FRAGMENTS][4];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      const u32 words[4] = {code[f].x, code[f].y, code[f].z, code[f].w};
      decode(words[k], k < 2 ? scale[f].x : scale[f].y, k & 1, a[f]);
    }
#pragma unroll
    for (int g = 0; g < TOKENS / 8; g += 2) {
      u32 b[4];
      load_matrices(b, from + g * 1024 + k * 256);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
          multiply_warp(acc + (f * (TOKENS / 8) + g + i) * 4, a[f], b[2 * i], b[2 * i + 1]);
    }
  }
}
#endif

__device__ __forceinline__ void await_products() {}
