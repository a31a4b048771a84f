// Loading with the copy engine, by one lane. Included by packed_gemm.cu.
//
// In clusters the lane that loads copies its block's own weight, and one share of the activations to all blocks, at
// the same place of the same stage, counted on the same barrier in each. All blocks of a cluster walk through the
// same pieces, so use n of a stage is the same piece in all of them:
//   full[s] of a block: one arrival, of its own loading lane, with all bytes that come: its weight, and of the
//     activations every share, its own and the others'. The others' bytes may be counted before that arrival: the
//     phase cannot end without it.
//   empty[s] of a block: one arrival of each warp that multiplies, of every block of the cluster, once it has read
//     use n. With all of them the lane may copy use n + 1 to all blocks.
// No barrier is two phases ahead of who waits. Another block copies use n + 1 only when all warps here have arrived
// for use n, so they have seen the end of full[s]'s phase n, and its bytes count in the next. A warp arrives for use
// n + 1 only after full[s]'s next phase has ended, which takes this block's lane, which has seen the end of
// empty[s]'s phase n. Nobody waits in a circle: what copies use n + 1 waits for is reading of use n, and that waits
// for copies of use n only, in all blocks, which run at the same time as a cluster does. The first use of a stage
// waits for no arrivals; its activations are copied once all blocks have initialised their barriers.
// A block may end when nobody will write to its shared memory or arrive on its barriers: after the last pieces its lane
// waits for all arrivals on all empty[s] that are still to come. Those of its own warps say that all copies have come.

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

// Of a cluster each block brings its share to all.
__device__ __forceinline__ void load_x(const Piece& p, u32 stage, u32 full, const u8* x, u64 policy) {
  stage += TILES * WEIGHT_BYTES;
  x += p.x_tile() * X_BYTES;
  // Tiles of one slice lie side by side if there is no other.
  const u32 bytes = (SLICES > 1 ? 1 : p.count) * (X_BYTES / CLUSTER), first = rank() * bytes;
  for (int t = 0; t < (SLICES > 1 ? p.count : 1); t++)
    copy_to_all(stage + t * X_BYTES + first, x + t * (SLICES * X_BYTES) + first, bytes, full, policy);
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
  int s = 0, round = 0;
  for (; p.at < p.end; p.advance()) {
    barrier_wait(empty + s * 8, round);
    barrier_expect(full + s * 8, p.count * (STAGE_BYTES / TILES));
    load_weight(p, base + s * STAGE_BYTES, full + s * 8, codes, scales, groups, once);
    load_x(p, base + s * STAGE_BYTES, full + s * 8, x, often);
    if (++s == STAGES) s = 0, round ^= 1;
  }
#if CLUSTER > 1
  for (int last = 0; last < pieces; last++) {
    barrier_wait(empty + s * 8, round);
    if (++s == STAGES) s = 0, round ^= 1;
  }
#endif
}
