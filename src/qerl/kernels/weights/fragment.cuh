// A word of NVFP4 codes and its scales as the first operand of a tensor core, in bf16. Included by packed_gemm.cu.
//
// A code s e e m becomes the bf16 bits s 0000000 ee m 000000, which is w * 2^-126, exactly, subnormal
// included; a scale byte shifted left by 4 is sf * 2^-120. The scale is raised by 2^238 in two multiplications,
// so that the product of both is w * sf * 2^-8: exact in bf16 (at most 6 significant bits). The caller multiplies
// by 2^8 / global scale. A register takes the codes of one bit position in both halves of the word, that is
// k = 2c and 2c+8 (or 2c+1 and 2c+9) instead of neighbours; the activations are stored in the same order, and a
// sum does not care. A multiplication by 2^12 + 2^6 moves sign and magnitude to their places at once, on the
// pipe that the logic instructions leave idle.

#pragma once

#include "staging.cuh"

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
