// y[s, m, n] = part s of the sum over k of x[m, k] * w[n, k], w in NVFP4, for up to 512 tokens.
//
// With few tokens a product is as fast as its weight is read, so the kernel is a stream. One block sits on each
// multiprocessor for the whole product. Some of its warps do nothing but ask for the next pieces of weight and
// activations, up to STAGES of them ahead, into shared memory; the others decode and multiply. The weight does not
// depend on the kernel before this one, so the first STAGES pieces of it are asked for before that kernel has ended:
// its time is not lost for the memory.
//
// One source for every card since Ampere; qerl.kernels.cards says which switches a card has. BULK: one lane of one warp
// asks the copy engine, which counts bytes on a barrier; without it the lanes of four warps, one on each scheduler, copy
// 16 bytes at a time (cp.async), and the barrier counts lanes. WGMMA: see below. Below compute capability 9.0 a kernel
// starts when the one ahead of it has ended, and a product of two bf16 numbers is a fused multiply-add whose third operand
// is -0. There the warps that load, once they have asked for all of their own, ask the L2 cache for what the next kernels
// read (Ahead).
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
// may give a warp two fragments of 16 rows (FRAGMENTS), so that it is read half as often. With 128 tokens their
// accumulators are too many for the registers; two warps with the same fragments and half of the tokens each would
// both decode them, and there instructions take the time, not reads of shared memory.
//
// Work. The product is a line of (rows / ROWS) x (K / 64) tiles, rows outermost, cut into one piece of equal
// length for each block, or for each cluster, whose blocks share the rows of a row tile (ROWS are theirs together).
// Who starts or ends inside a row tile leaves a partial sum of it: contributor s of a row tile writes part s, and
// whoever reads the output adds the parts in order. That costs no launch here, because every reader is a kernel of
// ours, and it keeps results independent of timing.
//
// Clusters. From 128 tokens on a block reads several times as many bytes of activations as of weight from the L2 cache. So
// CLUSTER blocks share one row tile, ROW_GROUPS of its 64-row groups each, and walk along K together: each copies its
// share of the activations to all of them. The line of tiles is then cut into as many pieces as there are clusters.
// bulk_loads.cuh has the order in which they wait for one another.
//
// Experts. With EXPERTS the weight is that of many experts on top of each other, and the product goes through items: an
// expert with at most TOKENS of its tokens, whose activations lie item by item. How many items there are is known to the
// GPU alone; whoever launches this sees to it that the items are there before it starts, so that weights can be asked for
// ahead here too. The line has the row tiles of all items and is cut between them, so that there are no partial sums; an
// expert is read from memory by few blocks, which then have its next item as well.
//
// Slices. More than 256 tokens are as many slices of 256, and the clusters take turns in having one: neighbours have the
// same tiles of weight at the same time, which the memory then gives once. From 129 tokens on a tile of a block is as large
// as registers allow, so the sums are written once for each and in bf16 (store_tile): in fp32 they would be most of what
// the kernels around move.
//
// Registers. A launch gives all threads of a block equally many. With three warpgroups that multiply and a warp that
// loads that is at most 128 for each (a quarter of the multiprocessor has four of these warps), too few for 128
// tokens; with two it is 168, of which 256 tokens take 128 for accumulators. So with REGISTERS there are four warps that
// load, of which one does, and all four give registers up to those that multiply. The block then has all registers of the
// multiprocessor, and no block of the kernels before and after fits beside it.
//
// Compile-time: EXPERTS, TOKENS of a slice (8, 16, 32, 64, 128 or 256), SLICES, TEAMS of warps that multiply, each with
// 64 rows: a warpgroup, or with two FRAGMENTS a warp half of one; ROW_GROUPS 64-row groups that a block has of a row tile
// (TEAMS / ROW_GROUPS teams share K), TILES 64-wide k tiles a stage, TOGETHER tiles a team multiplies before it waits,
// STAGES, CLUSTER (1, or 2 with BULK), REGISTERS (of a thread that multiplies, where four warps that load give up theirs;
// 0: all have as many), SETS of accumulators, ADDERS (1: warps that do not multiply add LoRA's parts, one of their own or,
// with REGISTERS, those beside the one that loads; 0: those that multiply do), BULK and WGMMA.
//
// staging.cuh copies and waits, bulk_loads.cuh and thread_loads.cuh load pieces, fragment.cuh decodes, warp_math.cuh and
// warpgroup_math.cuh multiply a tile.

#if FRAGMENTS > 1 && (TOKENS <= 16 || WGMMA)
#error "Several fragments a warp are for more than 16 tokens without wgmma."
#endif
#if CLUSTER > 1 && !BULK
#error "Blocks of a cluster share activations by the copy engine."
#endif
#if EXPERTS && CLUSTER > 1
#error "Blocks of a cluster share activations, and experts have few."
#endif
#if (TOKENS > 128 || SLICES > 1) && !(BULK && WGMMA && TEAMS == ROW_GROUPS && !EXPERTS)
#error "More than 128 tokens are for the copy engine and wgmma, by teams that do not share K."
#endif
#if SETS > 1 && TOKENS > 16
#error "Several sets of accumulators are for up to 16 tokens."
#endif
#if ADDERS && EXPERTS
#error "Experts have no sums x A^T."
#endif
#if REGISTERS && !(BULK && WGMMA)
#error "Registers change hands between warpgroups of 9.0."
#endif
#define TEAM (128 / FRAGMENTS)  // threads
#define K_GROUPS (TEAMS / ROW_GROUPS)
#define CONSUMERS (TEAMS * TEAM)
#define LOADERS (BULK && !REGISTERS ? 1 : 4)  // warps that load; with REGISTERS one of them does
#define THREADS (CONSUMERS + 32 * (LOADERS + (REGISTERS ? 0 : ADDERS)))
#define KEPT_REGISTERS 24  // of a thread that gives up the others
#if REGISTERS && CONSUMERS * REGISTERS + 32 * LOADERS * KEPT_REGISTERS > 65536 / THREADS / 8 * 8 * THREADS
#error "So many registers are not there, and whoever asks for them waits for ever."
#endif
#define CODE_BYTES 2048
#define SCALE_BYTES 256
#define X_BYTES (TOKENS * 128)
#define WEIGHT_BYTES (ROW_GROUPS * (CODE_BYTES + SCALE_BYTES))  // of a k tile
#define STAGE_BYTES (TILES * (WEIGHT_BYTES + X_BYTES))
#define VALUES (FRAGMENTS * TOKENS / 2)  // accumulators a thread
#define WARPGROUP_MATH (WGMMA && TOKENS > 16)
// Sums of LoRA come after the product where they would cost it registers that it does not have.
#define ADD_LAST (TOKENS == 128 && !WGMMA)
// With few tokens the division of 64 bits that says where sums go is done before a block waits, rather than at each row
// tile's end. That was timed with up to 8 tokens and wgmma.
#define PART_AHEAD (TOKENS == 8 && WGMMA)
// Parts that a lane loads at once, of LoRA's sums; more do not fit the registers of a warp that gave up the others.
#define PARTS_AT_ONCE (ADDERS && REGISTERS ? 2 : 4)
#define STARTS_EARLY (__CUDA_ARCH__ >= 900)
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

#include "staging.cuh"

// Where a thread finds its operands of the first tile in the first stage.
struct Operands {
  const u8 *codes, *scales;
  u32 x;
};

#if WARPGROUP_MATH
#include "warpgroup_math.cuh"
#else
#include "warp_math.cuh"
#endif

__device__ __forceinline__ void wait_for_kernel_before() {
#if STARTS_EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Of this block in its cluster, and of its cluster in the grid: its slice, and its place among those that have it.
__device__ __forceinline__ int rank() { return blockIdx.x % CLUSTER; }
__device__ __forceinline__ int slice() { return blockIdx.x / CLUSTER % SLICES; }
__device__ __forceinline__ u32 cluster() { return blockIdx.x / (CLUSTER * SLICES); }
__device__ __forceinline__ u32 clusters() { return gridDim.x / (CLUSTER * SLICES); }

#if EXPERTS
// The items: of each its expert and its tokens. `groups` are the 64-row groups of an expert, ROW_GROUPS of them a row tile.
struct Items {
  const int2* of;
  int groups;
};
#else
struct Items {};
#endif

// A cluster's tiles, as segments of one row tile that fit a stage.
struct Piece {
  int at, end, k_tiles, row_tile, first, count;  // count k tiles from the first on
#if EXPERTS
  Items items;
  int item, expert, tokens;  // of the row tile
#endif
  __device__ __forceinline__ Piece(int begin, int end, int k_tiles, Items items = Items())
      : at(begin), end(end), k_tiles(k_tiles), row_tile(begin / k_tiles), first(begin - row_tile * k_tiles) {
#if EXPERTS
    this->items = items;
#endif
    locate();
    measure();
  }
  // Finds the item of the row tile; past the L1 cache, where those of an earlier layer may be.
  __device__ __forceinline__ void locate() {
#if EXPERTS
    item = row_tile * ROW_GROUPS / items.groups;
    if (at < end) {
      int2 own = __ldcg(items.of + item);
      expert = own.x, tokens = own.y;
    }
#endif
  }
  __device__ __forceinline__ void measure() { count = min(min(TILES, k_tiles - first), end - at); }
  __device__ __forceinline__ bool ends_row_tile() const { return first + count == k_tiles || at + count == end; }
#if EXPERTS
  // Where one of this block's row groups is in the expert.
  __device__ __forceinline__ int group(int row_group) const {
    return row_tile * ROW_GROUPS - item * items.groups + row_group;
  }
  // The first tile of a row group.
  __device__ __forceinline__ long long tile(int row_group, int groups) const {
    return ((long long)expert * groups + group(row_group)) * k_tiles + first;
  }
  // The first tile of activations.
  __device__ __forceinline__ long long x_tile() const { return (long long)item * k_tiles + first; }
#else
  // Where one of this block's row groups is in the weight. The last row tile may reach beyond; nobody writes there.
  __device__ __forceinline__ int group(int row_group) const {
    return (row_tile * CLUSTER + rank()) * ROW_GROUPS + row_group;
  }
  // The first tile of a row group.
  __device__ __forceinline__ long long tile(int row_group, int groups) const {
    return (long long)min(group(row_group), groups - 1) * k_tiles + first;
  }
  // The first tile of activations.
  __device__ __forceinline__ long long x_tile() const { return first * SLICES + slice(); }
#endif
  __device__ __forceinline__ void advance() {
    at += count;
    first += count;
    if (first == k_tiles) first = 0, row_tile++, locate();
    measure();
  }
};

// Where the tiles of a cluster begin on a line of so many.
__device__ __forceinline__ int share(int total, int cluster) { return (int)((long long)cluster * total / clusters()); }

// Which part of a row tile's sums this cluster writes: 0 if it has the row tile's first k tile, which is the one before `next`.
__device__ __forceinline__ u32 part_of(long long next, int total) {
  return cluster() - (int)((next * clusters() - 1) / total);
}

// What the kernels after this one read: the adapters' matrices between this product and the next, and that one's
// weight, of which so many pieces of each block are asked for ahead. A block is that of this kernel's tiling and grid;
// where the next product is tiled alike, these are the pieces that its block reads before all others.
struct Ahead {
  const u8 *b, *a, *codes, *scales;
  int b_bytes, a_bytes, N, K, pieces;
};

#if BULK
#include "bulk_loads.cuh"
#else
#include "thread_loads.cuh"
#endif

// x A^T of the adapters that belong to this product, `numbers` (a multiple of 8) for all tokens: the kernel before
// has left `count` parts of each. A warp adds eight numbers: 16 pairs of lanes have every 16th part each, then the
// pairs' sums are added, always in the same order. The loads pass by the L1 cache, where the parts of an earlier
// layer may be.
__device__ __forceinline__ void add_parts(const float* parts, float* sum, int count, int numbers, int warp, int warps,
                                          int lane) {
  for (int first = (blockIdx.x + gridDim.x * warp) * 8; first < numbers; first += gridDim.x * warps * 8) {
    const int at = first + lane % 2 * 4;
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll PARTS_AT_ONCE
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

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1)
packed_gemm(const u8* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
            float* __restrict__ y,
#if EXPERTS
            const int2* item, const int* item_count, int N, int K) {
  const Ahead next = {};
#else
            const float* xa_parts, float* xa, const u8* next_b, const u8* next_a,
            const u8* next_codes, const u8* next_scales, int M, int N, int K, int parts, int numbers, int next_b_bytes,
            int next_a_bytes, int next_N, int next_K, int next_pieces) {
  const Ahead next = {next_b, next_a, next_codes, next_scales, next_b_bytes, next_a_bytes, next_N, next_K, next_pieces};
#endif
  extern __shared__ __align__(128) u8 stages[];
  __shared__ u64 barriers[2 * STAGES];
  // Broadcast, so that the compiler knows it to be the same for the whole warp.
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int k_tiles = K / 64, groups = N / 64;
#if EXPERTS
  const Items items = {item, groups};
  const int row_tiles = __ldcg(item_count) * (groups / ROW_GROUPS);
  const int begin = share(row_tiles, cluster()) * k_tiles, end = share(row_tiles, cluster() + 1) * k_tiles;
#else
  const Items items = {};
  const int total = (groups + CLUSTER * ROW_GROUPS - 1) / (CLUSTER * ROW_GROUPS) * k_tiles;
  const int begin = share(total, cluster()), end = share(total, cluster() + 1);
#if PART_AHEAD
  // Of a cluster's row tiles only the first may have begun in another's.
  const int first_row_tile = begin / k_tiles;
  const long long first_part = part_of(first_row_tile * k_tiles + 1, total);
#endif
#endif
  const u32 base = shared_address(stages), full = shared_address(barriers), empty = full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s * 8, BULK ? 1 : 32 * LOADERS);
      barrier_init(empty + s * 8, CLUSTER * CONSUMERS / 32);
    }
#if BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
  cluster_sync();  // nobody counts bytes on barriers that are not there, or arrives on them

#if ADDERS && !REGISTERS
  if (warp == CONSUMERS / 32 + LOADERS) {
    wait_for_kernel_before();
    add_parts(xa_parts, xa, parts, numbers, 0, ADDERS, lane);
    return;
  }
#endif
  if (warp >= CONSUMERS / 32) {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(KEPT_REGISTERS));
#endif
#if ADDERS && REGISTERS
    if (warp > CONSUMERS / 32) {
      wait_for_kernel_before();
      add_parts(xa_parts, xa, parts, numbers, warp - CONSUMERS / 32 - 1, LOADERS - 1, lane);
      return;
    }
#endif
    if ((lane == 0 && warp == CONSUMERS / 32) || !BULK)
      load_all(Piece(begin, end, k_tiles, items), groups, base, full, empty, x, codes, scales, next);
    return;
  }

#if REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
  wait_for_kernel_before();
#if !ADD_LAST && !ADDERS && !EXPERTS
  add_parts(xa_parts, xa, parts, numbers, warp, CONSUMERS / 32, lane);
#endif
  const int row_group = warp / (TEAM / 32) % ROW_GROUPS, k_group = warp / (TEAM / 32) / ROW_GROUPS;
  const int first_fragment = warp % (TEAM / 32) * FRAGMENTS;  // of the row group, that this warp has
  const Operands at = {
      stages + row_group * TILES * CODE_BYTES + (first_fragment * 32 + lane) * 16,
      stages + TILES * (ROW_GROUPS * CODE_BYTES + row_group * SCALE_BYTES) + (first_fragment * 8 + lane / 4) * 8,
      operand_address(base + TILES * WEIGHT_BYTES, lane),
  };

  float acc[SETS * VALUES];
#pragma unroll
  for (int i = 0; i < SETS * VALUES; i++) acc[i] = 0.0f;
  int stage = 0, parity = 0, unit = 0;
  for (Piece p(begin, end, k_tiles, items); p.at < end; p.advance()) {
#if TOKENS > 128
    for (;; p.advance()) {  // of a row tile: in one loop ptxas moves all accumulators, and keeps some of them in memory
#endif
    barrier_wait(full + stage * 8, parity);
    int t = k_group;
    for (; t + (TOGETHER - 1) * K_GROUPS < p.count; t += TOGETHER * K_GROUPS) {
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) multiply_tile(acc, at, stage, t + i * K_GROUPS);
      await_products();
    }
    for (; t < p.count; t += K_GROUPS) {
      multiply_tile(acc, at, stage, t);
      await_products();
    }
    __syncwarp();
    barrier_arrive_in_all(lane, empty + stage * 8);
    if (++stage == STAGES) stage = 0, parity ^= 1;
#if TOKENS > 128
    if (p.ends_row_tile()) break;
    }
#else
    if (!p.ends_row_tile()) continue;
#endif

#pragma unroll
    for (int i = VALUES; i < SETS * VALUES; i++) acc[i % VALUES] += acc[i];

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
    int group = p.group(row_group);
    if (k_group == 0 && group < groups) {
#if EXPERTS
      const int M = p.tokens;
      long long at_tile = (long long)p.item * TOKENS * N + group * 64 + first_fragment * 16;
#else
#if PART_AHEAD
      const long long part = p.row_tile == first_row_tile ? first_part : 0;
#else
      const int part = part_of((long long)p.row_tile * k_tiles + 1, total);
#endif
      long long at_tile = ((long long)part * M + slice() * TOKENS) * N + group * 64 + first_fragment * 16;
#endif
#if TOKENS > 128
      store_tile(acc, (unsigned short*)y + at_tile, M - slice() * TOKENS, N, lane);
#else
      float* to = y + at_tile + lane / 4;
#pragma unroll
      for (int i = 0; i < VALUES / 4; i++) {
        int m = i % (TOKENS / 8) * 8 + lane % 4 * 2;
        float* row = to + (long long)m * N + i / (TOKENS / 8) * 16;
        if (m < M) { row[0] = acc[i * 4]; row[8] = acc[i * 4 + 2]; }
        if (m + 1 < M) { row[N] = acc[i * 4 + 1]; row[N + 8] = acc[i * 4 + 3]; }
      }
#endif
    }
#pragma unroll
    for (int i = 0; i < SETS * VALUES; i++) acc[i] = 0.0f;
  }
#if ADD_LAST && !EXPERTS
  add_parts(xa_parts, xa, parts, numbers, warp, CONSUMERS / 32, lane);
#endif
}
