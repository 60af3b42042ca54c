#pragma once
// What the bodies need, to be included before a target region begins (target.h).

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "codec/bfloat16.h"
#include "codec/float16.h"
#include "codec/hadamard16.h"
#include "families/row/outliers.h"
#include "kernels/product.h"
#include "kernels/table.h"
#include "kernels/target.h"
#include "kernels/units.h"
