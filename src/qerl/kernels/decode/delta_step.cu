// One token of each sequence through the state of its delta net (delta_net.py has the formulas and the layout).
//
// A block has one sequence, one value head and COLUMNS columns of its state S' [K, E], in 128 threads. A thread
// has 8 neighbouring columns of every LANES-th row, 16 bytes each, all loaded before the first is used: 32 KB
// are under way per block, and a few blocks per multiprocessor keep its memory busy. Each number is multiplied
// with its row's key and query in FP32 and added up over rows, in the thread, then over threads in shared memory.
// Products of key and query with the keys of the ring are small, one warp each. In the end a thread has a column.
//
// Where the token is the last before a position that is a multiple of P + 1, what the ring holds is added to S',
// which the threads still hold, and S' is rounded and written. Else the token itself goes to the ring.
//
// Compile-time: U key heads of K numbers, at most 128; V value heads of E; COLUMNS, a multiple of 8 that divides
// E; P.

typedef unsigned int u32;
typedef unsigned short Half;  // bf16

#define THREADS 128
#define BLOCKS (E / COLUMNS)    // per value head
#define GROUPS (COLUMNS / 8)    // of columns, one per thread
#define LANES (THREADS / GROUPS)  // threads that share a column
#define ROWS ((K + LANES - 1) / LANES)
#define KEPT (U * K + V * E)  // numbers of a token in the ring
#define DOTS ((P + 4) / 4)  // of a warp: those with P keys, and of the key with the query

#if COLUMNS % 8 || E % COLUMNS || COLUMNS > THREADS || K > THREADS
#error "A thread takes 8 columns of a block, and ends with one; it has one number of a key."
#endif

__device__ __forceinline__ float number(Half bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ Half rounded(float value) { return (Half)pack(value, 0.0f); }
// The 8 numbers of a thread in one row.
__device__ __forceinline__ void unpack(const uint4 row, float values[8]) {
  const u32 words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    delta_step(const float* heads, const float* gates, Half* states, Half* recent, float* fades,
               const int* positions, const int* slots, float* out, int tokens) {
  // What of each row is needed last takes the room of what is needed first.
  __shared__ float4 sums4[LANES][2][GROUPS][2];
  __shared__ float keys[P + 1][K], query[K], of_key[P + 1], of_query[P + 1], weight[P + 1];
  __shared__ float4 written4[P + 1][GROUPS][2];
  float* const sums = (float*)sums4;
  float(*const written)[COLUMNS] = (float(*)[COLUMNS])written4;

  const int head = blockIdx.x / BLOCKS, first = blockIdx.x % BLOCKS * COLUMNS, t = blockIdx.y;
  const int key_head = head / (V / U), thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int group = thread % GROUPS, own = thread / GROUPS;
  const int slot = slots[t], since = positions[t] % (P + 1);
  const bool here = slot >= 0;
  const long long place = here ? slot : 0;
  Half* const state = states + (place * V + head) * (K * E) + first + 8 * group;
  Half* const ring = recent + place * (P * KEPT);
  float* const fade = fades + place * (P * V) + head;

  // Ahead of the wait, although the kernel before is no product: its programs start when all before their
  // product have ended, and those of this one when all of its have started. So the step before, which wrote
  // state and ring, has ended. What delta_inputs writes is not yet there.
  uint4 held[ROWS];
#pragma unroll
  for (int j = 0; j < ROWS; j++) {
    const int k = own + j * LANES;
    held[j] = here && own < LANES && k < K ? *(const uint4*)(state + k * E) : make_uint4(0, 0, 0, 0);
  }
  Half key_of[P], written_of[P];
#pragma unroll
  for (int i = 0; i < P; i++) {
    const bool past = here && i < since;
    key_of[i] = past && thread < K ? ring[i * KEPT + key_head * K + thread] : 0;
    written_of[i] = past && thread < COLUMNS ? ring[i * KEPT + U * K + head * E + first + thread] : 0;
  }
  const float before = here && since ? fade[(since - 1) * V] : 0.0f;
  const float old = here && thread < since ? fade[thread * V] : 0.0f;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  float* const result = out + ((long long)t * V + head) * E + first;
  if (!here) {
    if (thread < COLUMNS) result[thread] = 0.0f;
    return;
  }
  const float* const row = heads + (long long)t * (2 * U * K + V * E);
  if (thread < K) {
    query[thread] = row[key_head * K + thread];
    keys[P][thread] = row[(U + key_head) * K + thread];
  }
  const float value = thread < COLUMNS ? row[2 * U * K + head * E + first + thread] : 0.0f;
  const float now = before + gates[t * V + head], beta = gates[(tokens + t) * V + head], whole = expf(now);
#pragma unroll
  for (int i = 0; i < P; i++) {
    if (thread < K) keys[i][thread] = number(key_of[i]);
    if (thread < COLUMNS) written[i][thread] = number(written_of[i]);
  }
  if (thread < since) weight[thread] = expf(now - old);
  __syncthreads();

#pragma unroll
  for (int n = 0; n < DOTS; n++) {
    const int i = warp + 4 * n;
    if (i < since || i == P) {
      float with_key = 0.0f, with_query = 0.0f;
#pragma unroll
      for (int k = lane; k < K; k += 32) {
        with_key += keys[i][k] * keys[P][k];
        with_query += keys[i][k] * query[k];
      }
#pragma unroll
      for (int step = 16; step; step /= 2) {
        with_key += __shfl_xor_sync(~0u, with_key, step);
        with_query += __shfl_xor_sync(~0u, with_query, step);
      }
      if (!lane) of_key[i] = with_key, of_query[i] = with_query;
    }
  }
  if (own < LANES) {
    float with_key[8] = {}, with_query[8] = {};
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      const int k = own + j * LANES;
      if (k < K) {
        float values[8];
        unpack(held[j], values);
        const float a = keys[P][k], b = query[k];
#pragma unroll
        for (int i = 0; i < 8; i++) with_key[i] += a * values[i], with_query[i] += b * values[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sums4[own][0][group][i] = *(const float4*)(with_key + 4 * i);
      sums4[own][1][group][i] = *(const float4*)(with_query + 4 * i);
    }
  }
  __syncthreads();

  if (thread < COLUMNS) {
    float known = 0.0f, read = 0.0f;
#pragma unroll
    for (int r = 0; r < LANES; r++) {
      known += sums[2 * r * COLUMNS + thread];
      read += sums[(2 * r + 1) * COLUMNS + thread];
    }
    known *= whole, read *= whole;
    for (int i = 0; i < since; i++) {
      const float faded = written[i][thread] * weight[i];
      known += of_key[i] * faded, read += of_query[i] * faded;
      written[i][thread] = faded;
    }
    const float delta = beta * (value - known);
    result[thread] = read + of_query[P] * delta;
    written[P][thread] = delta;
    if (since < P) ring[since * KEPT + U * K + head * E + first + thread] = rounded(delta);
  }
  if (since < P) {
    if (first == 0 && thread == 0) fade[since * V] = now;
    if (first == 0 && head % (V / U) == 0)
      if (thread < K) ring[since * KEPT + key_head * K + thread] = rounded(keys[P][thread]);
    return;
  }
  __syncthreads();
  if (own >= LANES) return;
#pragma unroll
  for (int j = 0; j < ROWS; j++) {
    const int k = own + j * LANES;
    if (k < K) {
      float values[8];
      unpack(held[j], values);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] *= whole;
#pragma unroll 1  // registers are for S'
      for (int i = 0; i <= P; i++) {
        const float a = keys[i][k];
        const float4 low = written4[i][group][0], high = written4[i][group][1];
        values[0] += a * low.x, values[1] += a * low.y, values[2] += a * low.z, values[3] += a * low.w;
        values[4] += a * high.x, values[5] += a * high.y, values[6] += a * high.z, values[7] += a * high.w;
      }
      *(uint4*)(state + k * E) = make_uint4(pack(values[0], values[1]), pack(values[2], values[3]),
                                            pack(values[4], values[5]), pack(values[6], values[7]));
    }
  }
}
