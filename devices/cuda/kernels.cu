// The kernels in CUDA: one translation unit. -fmad=false, so that codes are the CPU's.
#include "devices/kernels/cuda.h"

#include "devices/kernels/all.h"
