#pragma once
// What the bodies need, to be included before a target region begins (target.h).

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/float16.h"
#include "families/row/outliers.h"
#include "kernels/product.h"
#include "kernels/tables.h"
#include "kernels/target.h"
#include "kernels/units.h"
