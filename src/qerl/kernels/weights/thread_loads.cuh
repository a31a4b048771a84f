// Loading by 128 threads, 16 bytes at a time. Included by packed_gemm.cu.

#pragma once

// How far the pieces of a block have been asked for.
struct Loads {
  int thread, stage, parity;  // of the barrier that says that the stage may be written
  // A barrier on which nobody has arrived lets one pass that waits for parity 1: the first STAGES pieces.
  __device__ __forceinline__ Loads() : thread(threadIdx.x - CONSUMERS), stage(0), parity(1) {}

  // Asks for this thread's 16 bytes of every 2048, of as many as there are; most is known when this is compiled.
  __device__ __forceinline__ void copy(u32 to, const u8* from, int bytes, int most) const {
#pragma unroll
    for (int start = 0; start < most; start += 128 * 16)
      if (start + thread * 16 < bytes) copy16(to + start + thread * 16, from + start + thread * 16);
  }

  // Asks for one piece.
  __device__ __forceinline__ void fill(const Piece& p, int groups, u32 base, u32 full, u32 empty, const u8* x,
                                       const u8* codes, const u8* scales) {
    const u32 to = base + stage * STAGE_BYTES;
    barrier_wait(empty + stage * 8, parity);
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
      const long long tile = p.tile(g, groups);
      copy(to + g * TILES * CODE_BYTES, codes + tile * CODE_BYTES, p.count * CODE_BYTES, TILES * CODE_BYTES);
      copy(to + TILES * (ROW_GROUPS * CODE_BYTES + g * SCALE_BYTES), scales + tile * SCALE_BYTES,
           p.count * SCALE_BYTES, TILES * SCALE_BYTES);
    }
    copy(to + TILES * WEIGHT_BYTES, x + p.x_tile() * X_BYTES, p.count * X_BYTES, TILES * X_BYTES);
    barrier_arrive_copied(full + stage * 8);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

#if !EXPERTS
// Asks the L2 cache for bytes, by the threads of several blocks that load.
__device__ __forceinline__ void prefetch(const u8* from, int bytes, int block, int blocks) {
  for (int at = (block * 128 + threadIdx.x - CONSUMERS) * 32; at < bytes; at += blocks * 128 * 32) prefetch32(from + at);
}

// Asks the L2 cache for what the kernels after this one read, while they leave the memory idle. The next weight is cut
// as this kernel's tiling and grid would cut it; where its product has others, some of these tiles are not what a block
// reads first.
__device__ __forceinline__ void prefetch_ahead(const Ahead& next) {
  prefetch(next.b, next.b_bytes, blockIdx.x, gridDim.x);
  prefetch(next.a, next.a_bytes, blockIdx.x, gridDim.x);
  const int groups = next.N / 64, k_tiles = next.K / 64, total = (groups + ROW_GROUPS - 1) / ROW_GROUPS * k_tiles;
  Piece p(share(total, blockIdx.x), share(total, blockIdx.x + 1), k_tiles);
#pragma unroll 1
  for (int i = 0; i < next.pieces && p.at < p.end; i++, p.advance())
#pragma unroll 1
    for (int g = 0; g < ROW_GROUPS; g++) {
      const long long tile = p.tile(g, groups);
      prefetch(next.codes + tile * CODE_BYTES, p.count * CODE_BYTES, 0, 1);
      prefetch(next.scales + tile * SCALE_BYTES, p.count * SCALE_BYTES, 0, 1);
    }
}

#endif

// Loads all pieces of a block.
__device__ __forceinline__ void load_all(Piece p, int groups, u32 base, u32 full, u32 empty, const u8* x,
                                         const u8* codes, const u8* scales, const Ahead& next) {
  for (Loads loads; p.at < p.end; p.advance()) loads.fill(p, groups, base, full, empty, x, codes, scales);
#if !EXPERTS
  prefetch_ahead(next);
#endif
  asm volatile("cp.async.wait_all;" ::: "memory");
}
