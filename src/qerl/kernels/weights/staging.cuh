// The barriers on which warps wait for pieces of weight and activations, and the two ways in which these get to shared
// memory: the copy engine brings whole stretches and counts their bytes (BULK), or each thread brings 16 bytes at a
// time. Included by packed_gemm.cu.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

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
#if CLUSTER > 1
// Copies to the same place in all blocks of the cluster, and counts the bytes on the same barrier in each.
__device__ __forceinline__ void copy_to_all(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "{.reg .b16 all; mov.b16 all, %5;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1], %2, [%3], all, %4;}"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy), "n"((1 << CLUSTER) - 1) : "memory");
}
// A warp arrives on the same barrier in all blocks of the cluster. To release to this block alone is enough, because no
// memory that threads have written is handed over: what the warp has read it has in registers, and wgmma has ended.
__device__ __forceinline__ void barrier_arrive_in_all(int lane, u32 barrier) {
  if (lane < CLUSTER)
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier), "r"(lane) : "memory");
}
// Waits for all threads of the cluster, and sees barriers that one of each block has initialised.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
#else
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
// Without an eviction policy: where the address in shared memory has a part in a uniform register, ptxas (12.8, 12.9 and
// the driver of CUDA 13.0) encodes cp.async with one as an illegal instruction for 9.0 and later.
__device__ __forceinline__ void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Asks the L2 cache for the 32 bytes at an address.
__device__ __forceinline__ void prefetch32(const u8* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// This thread arrives when all that it has asked for is there.
__device__ __forceinline__ void barrier_arrive_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif
#if CLUSTER == 1
#if BULK
__device__ __forceinline__ void copy_to_all(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  copy(to, from, bytes, barrier, policy);
}
#endif
__device__ __forceinline__ void barrier_arrive_in_all(int lane, u32 barrier) {
  if (lane == 0) barrier_arrive(barrier);
}
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
#endif
