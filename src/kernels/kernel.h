#pragma once
// What the bodies need, to be included before a target region begins (target.h).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "codec/hadamard16.h"
#include "codec/small_floats.h"
#include "codec/sum.h"
#include "codec/units.h"
#include "isa/table.h"
#include "kernels/product.h"
#include "kernels/target.h"
#include "lowkv/codebook.h"
#include "quantizers/sorted/section.h"
