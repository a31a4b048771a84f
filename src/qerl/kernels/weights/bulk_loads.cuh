// Loading with the copy engine, by one lane. Included by packed_gemm.cu.

#pragma once

__device__ __forceinline__ void load_weight(const Piece& p, u32 stage, u32 full, const u8* codes, const u8* scales,
                                            int groups, u64 policy) {
#pragma unroll
  for (int g = 0; g < ROW_GROUPS; g++) {
    const long long tile = p.tile(g, groups);
    copy(stage + g * TILES * CODE_BYTES, codes + tile * CODE_BYTES, p.count * CODE_BYTES, full, policy);
    copy(stage + TILES * (ROW_GROUPS * CODE_BYTES + g * SCALE_BYTES), scales + tile * SCALE_BYTES,
         p.count * SCALE_BYTES, full, policy);
  }
}

__device__ __forceinline__ void load_x(const Piece& p, u32 stage, u32 full, const u8* x, u64 policy) {
  copy(stage + TILES * WEIGHT_BYTES, x + (long long)p.first * X_BYTES, p.count * X_BYTES, full, policy);
}

// Loads all pieces of a block, weights ahead of the end of the kernel before.
__device__ __forceinline__ void load_all(Piece p, int groups, u32 base, u32 full, u32 empty, const u8* x,
                                         const u8* codes, const u8* scales, const Ahead&) {
  u64 once, often;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
  int pieces = 0;
  Piece again = p;
  for (; p.at < p.end && pieces < STAGES; pieces++, p.advance()) {
    barrier_expect(full + pieces * 8, p.count * (STAGE_BYTES / TILES));
    load_weight(p, base + pieces * STAGE_BYTES, full + pieces * 8, codes, scales, groups, once);
  }
  wait_for_kernel_before();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  for (int s = 0; s < pieces; s++, again.advance())
    load_x(again, base + s * STAGE_BYTES, full + s * 8, x, often);
  for (int s = 0, round = 0; p.at < p.end; p.advance()) {
    barrier_wait(empty + s * 8, round);
    barrier_expect(full + s * 8, p.count * (STAGE_BYTES / TILES));
    load_weight(p, base + s * STAGE_BYTES, full + s * 8, codes, scales, groups, once);
    load_x(p, base + s * STAGE_BYTES, full + s * 8, x, often);
    if (++s == STAGES) s = 0, round ^= 1;
  }
}
