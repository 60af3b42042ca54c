// The kernels on tensor cores, after those of devices/kernels/all.h and a vocabulary: words.h or a
// test's.
#include "plan.h"

#include "shared.h"

#include "codes.h"

#include "queries.h"

#include "keys.h"

#include "exact.h"

#include "values.h"

#include "attend.h"
