// The kernels on tensor cores, after those of devices/kernels/all.h and a vocabulary: words.h or a
// test's.
#ifndef TENSOR_HEADS  // all: nvcc is asked for one head_dim at a time
#define TENSOR_HEADS 0
#endif

#include "plan.h"

#include "shared.h"

#include "codes.h"

#include "task.h"

#include "lay.h"

#include "keys.h"

#include "sorted.h"

#include "exact.h"

#include "values.h"

#include "attend.h"
