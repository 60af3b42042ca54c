// The whole program, for compilers that take it as a file: after the vocabulary (cuda.h).
#include "lowkv/format.h"
#include "lowkv/part.h"

#include "call.h"

#include "rows.h"

#include "codes.h"

#include "lanes.h"

#include "encode.h"

#include "rotate.h"

#include "rotated.h"

#include "trellis.h"

#include "carried.h"

#include "sorted.h"

#include "sorted_encode.h"

#include "sorted_write.h"

#include "decode.h"

#include "scores.h"

#include "join.h"

#include "expand.h"

#include "attend.h"

#include "mass.h"
