// W [rows, K] in 16 or 32 bits, or W^T [K, rows] in E4M3, from an NVFP4 weight in fragment order (packed_gemm.cu
// has the layout).
//
// A copy that multiplies: 0.5625 bytes are read and 2 written for each element, so all that matters is that both
// sides are wide and many. A warp takes 16 rows of a 64 x 64 tile and holds the codes of TILES such tiles, all
// loaded before the first is used. What a lane decodes (4-byte pairs of two rows) goes through shared memory, and
// comes back as 16 bytes of one row: eight lanes write one whole line of 128 bytes.
//
// Arithmetic as in qerl.fp4.format.dequantize: code * (scale / global scale) in fp32, cast once. A code's
// magnitude bits, shifted to an fp32's lowest exponent bits and highest mantissa bit, are its value times 2^-126,
// exactly, subnormal included; a scale's bits likewise times 2^-120.
//
// E4M3 is for products in FP8, whose tensor cores read both operands along the dimension that is summed, here the
// rows. A code times its block scale, 2688 at most, is multiplied by a number given by its bits and rounded to four
// significant bits. A block's 64 rows by TILES * 64 columns are turned round in shared memory, byte by byte, and leave
// as 64 bytes of one column; neighbouring blocks write the other half of a line.
//
// Before compute capability 9.0 a kernel starts when the one ahead of it has ended, and there is nothing to wait for.
//
// Compile-time: TILES, and OUT: 0 bf16, 1 fp16, 2 fp32 (unused in training; written straight from registers), 3 E4M3.

typedef unsigned int u32;

#if OUT == 2
typedef float Element;
#elif OUT == 3
typedef unsigned char Element;
#else
typedef unsigned short Element;
#endif

__device__ __forceinline__ float code_value(u32 word, int shift) {
  u32 code = word >> shift;
  u32 bits = ((code & 7u) << 22) | ((code & 8u) << 28);
  return __uint_as_float(bits) * 8.507059173023462e37f;  // 2^126
}
__device__ __forceinline__ float scale_value(u32 word, int shift) {
  u32 byte = word >> shift;
  u32 bits = ((byte & 0x7fu) << 20) | ((byte & 0x80u) << 24);
  return __uint_as_float(bits) * 1.329227995784916e36f;  // 2^120
}
#if OUT == 3
__device__ __forceinline__ u32 pack(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

extern "C" __global__ void __launch_bounds__(128)
    transpose_e4m3(const uint4* codes, const uint2* scales, Element* out, int tiles, int stride, int factor_bits) {
  const int PITCH = 80;  // 64 rows, and 16 bytes against bank conflicts
  extern __shared__ uint4 all_staged[];
  Element* staged = (Element*)all_staged;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const int first = blockIdx.y * TILES, count = min(TILES, tiles - first);
  uint4 code[TILES];
  uint2 scale[TILES];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (i < count) {
      const long long tile = (long long)blockIdx.x * tiles + first + i;
      code[i] = codes[tile * 128 + threadIdx.x];
      scale[i] = scales[tile * 32 + warp * 8 + r];
    }
  }
  const float factor = __int_as_float(factor_bits);
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (i >= count) break;
    const u32 words[4] = {code[i].x, code[i].y, code[i].z, code[i].w};
    const u32 steps[2] = {scale[i].x, scale[i].y};
#pragma unroll
    for (int b = 0; b < 4; b++) {
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const float step = scale_value(steps[b / 2], 16 * (b % 2) + 8 * p) * factor;
#pragma unroll
        for (int q = 0; q < 2; q++) {
          const int shift = 16 * q + 8 * p;
          const u32 pair = pack(code_value(words[b], shift) * step, code_value(words[b], shift + 4) * step);
          Element* at = staged + (i * 64 + 16 * b + 8 * q + 2 * c) * PITCH + warp * 16 + 8 * p + r;
          at[0] = pair & 0xff, at[PITCH] = pair >> 8;
        }
      }
    }
  }
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  for (int j = threadIdx.x; j < count * 256; j += 128) {
    const int column = j / 4, part = j % 4 * 16;
    *(uint4*)(out + (long long)(first * 64 + column) * stride + blockIdx.x * 64 + part) =
        *(uint4*)(staged + column * PITCH + part);
  }
}
#else
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
#if OUT == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

extern "C" __global__ void __launch_bounds__(128)
    dequantize(const uint4* codes, const uint2* scales, const float* global_scale, Element* out, int rows,
               int tiles, int stride) {
  extern __shared__ uint4 all_staged[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  // A warp's 16 rows of 128 bytes, each with 16 bytes of padding against bank conflicts.
  uint4(*staged)[9] = (uint4(*)[9])all_staged + 16 * warp;
  const int first = blockIdx.y * TILES;
  // The weights never change, so they may be read while the kernel before still runs; `out` may be in its use.
  uint4 code[TILES];
  uint2 scale[TILES];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (first + i < tiles) {
      const long long tile = (long long)blockIdx.x * tiles + first + i;
      code[i] = codes[tile * 128 + threadIdx.x];
      scale[i] = scales[tile * 32 + warp * 8 + r];
    }
  }
  const float divisor = *global_scale;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (first + i >= tiles) break;
    const u32 words[4] = {code[i].x, code[i].y, code[i].z, code[i].w};
    const u32 steps[2] = {scale[i].x, scale[i].y};
#pragma unroll
    for (int b = 0; b < 4; b++) {
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const float step = __fdiv_rn(scale_value(steps[b / 2], 16 * (b % 2) + 8 * p), divisor);
#pragma unroll
        for (int q = 0; q < 2; q++) {
          const int shift = 16 * q + 8 * p;
          const float low = code_value(words[b], shift) * step;
          const float high = code_value(words[b], shift + 4) * step;
#if OUT == 2
          const long long row = (long long)blockIdx.x * 64 + warp * 16 + 8 * p + r;
          if (row < rows) {
            float* at = out + row * stride + (first + i) * 64 + 16 * b + 8 * q + 2 * c;
            at[0] = low, at[1] = high;
          }
#else
          ((u32*)&staged[8 * p + r][2 * b + q])[c] = pack(low, high);
#endif
        }
      }
    }
#if OUT != 2
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int in_warp = 4 * j + lane / 8;
      const long long row = (long long)blockIdx.x * 64 + warp * 16 + in_warp;
      if (row < rows)
        *(uint4*)(out + row * stride + (first + i) * 64 + lane % 8 * 8) = staged[in_warp][lane % 8];
    }
    __syncwarp();
#endif
  }
}
#endif
