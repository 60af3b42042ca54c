// What each of the implementation's sources begins with: its target region and namespace, which the
// source ends.

#include "kernels/kernel.h"

namespace lowkv::kernels::scalar {

#include "kernels/scalar/vocabulary.h"
//
#include "kernels/body/parts.h"
