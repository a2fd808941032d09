/*
 * In place of the header of this name, which the package nvidia-cuda-crt has and PyTorch does not install: what it
 * defines for a compiler that is not CUDA's. The headers that include it come with PyTorch (nvidia-cuda-runtime).
 */
#pragma once

#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define CUDARTAPI
#define CUDARTAPI_CDECL
