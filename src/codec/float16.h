#pragma once
// Public, because hosts' rows are f16 too.
#include "lowkv/float16.h"
